"""Two models of a real server take turns in memory: what they answer, and what is left of them when they have gone."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from helpers import wait_until
from helpers_server import answered, free_port
from paged_backend import demo_folder

PROMPT = "The capital of France is"
NUM_TOKENS = 12
WEIGHTS = 540 * 10**6
"""Bytes of one of them, in float32."""


@contextlib.contextmanager
def serving_two(*options: str) -> Iterator[tuple[httpx.Client, psutil.Process]]:
    """The demo model as `a`, and once more as `b`."""
    port = free_port()
    command = [sys.executable, "-m", "paged_backend.cli", "serve", "demo", "demo", "--port", str(port), *options]
    with subprocess.Popen([*command, "--served-model-name", "a", "b"], cwd=Path(__file__).parents[1]) as process:
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120) as client:
                wait_until(lambda: is_ready(client), 60)
                yield client, psutil.Process(process.pid)
        finally:
            process.terminate()


def is_ready(client: httpx.Client) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return client.get("/ready").status_code == 200
    return False


def ask(client: httpx.Client, model: str) -> str:
    body = {"model": model, "prompt": PROMPT, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
    return str(answered(client.post("/v1/completions", json=body))["choices"][0]["text"])


def are_unloaded(client: httpx.Client) -> bool:
    return client.get("/metrics").text.count('sleep_state="discard_all"} 1.0') == 2


@torch.inference_mode()
def right_answer() -> str:
    tokenizer = AutoTokenizer.from_pretrained(demo_folder())
    model = AutoModelForCausalLM.from_pretrained(demo_folder(), dtype=torch.float32).eval()
    inputs = tokenizer(PROMPT, return_tensors="pt")
    length = {"max_new_tokens": NUM_TOKENS, "min_new_tokens": NUM_TOKENS}
    ids = model.generate(**inputs, **length, do_sample=False)[0, inputs.input_ids.shape[1] :]
    return str(tokenizer.decode(ids))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_unloaded_models_give_their_memory_back_and_answer_as_before_when_they_return() -> None:
    options = ["--dtype", "float32", "--kv-cache-memory", "64MiB", "--model-idle-timeout", "1"]
    with serving_two(*options) as (client, process):
        assert are_unloaded(client) and client.get("/health").status_code == 200
        answers, loaded, unloaded = [], [], []
        for _ in range(2):
            for model in ("a", "b"):
                answers.append(ask(client, model))
                loaded.append(process.memory_info().rss)
            wait_until(lambda: are_unloaded(client), 60)
            wait_until(lambda: min(loaded) - process.memory_info().rss > 0.8 * WEIGHTS, 60)
            unloaded.append(process.memory_info().rss)
    assert answers == [right_answer()] * 4
    assert max(unloaded) - unloaded[0] < 0.2 * WEIGHTS
