"""All frameworks in one process on one loaded model: one copy of its weights, one KV cache, one batch."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from llama_index.core.base.llms.types import ChatMessage

import transformers_paged
from helpers import WAIT_SECONDS, in_threads, is_idle
from helpers_models import make_model, make_tokenizer
from langchain_paged import ChatPaged
from llama_index.llms.paged import Paged
from paged_backend import LLM, SamplingParams

SETTINGS = {"kv_cache_memory": "8MiB", "block_size": 8}
NUM_NEW = 40


@pytest.fixture
def parts() -> Iterator[tuple[Any, Any, LLM]]:
    model, tokenizer = make_model("llama"), make_tokenizer()
    llm = LLM.shared(model, tokenizer, **SETTINGS)
    with transformers_paged.enable(model, tokenizer, **SETTINGS):
        yield model, tokenizer, llm
    llm.close()


def test_all_frameworks_share_the_steps_of_one_engine(parts: tuple[Any, Any, LLM]) -> None:
    model, tokenizer, llm = parts
    chat = ChatPaged(llm=llm, temperature=0, max_tokens=NUM_NEW, ignore_eos=True)
    paged = Paged(model=model, tokenizer=tokenizer, engine_kwargs=SETTINGS, temperature=0, max_tokens=NUM_NEW)
    inputs = tokenizer(["Hello"], return_tensors="pt")
    all_are_there = threading.Barrier(4, timeout=WAIT_SECONDS)

    def at_once(call: Any) -> Any:
        def run() -> Any:
            all_are_there.wait()
            return call()

        return run

    calls = [
        lambda: chat.invoke("Hello").usage_metadata["output_tokens"],
        lambda: paged.chat([ChatMessage(role="user", content="Hello")], ignore_eos=True).raw["usage"][
            "completion_tokens"
        ],
        lambda: (
            model.generate(**inputs, min_new_tokens=NUM_NEW, max_new_tokens=NUM_NEW, do_sample=False).shape[1]
            - inputs["input_ids"].shape[1]
        ),
        lambda: (
            llm.generate("Hello", SamplingParams(temperature=0, max_tokens=NUM_NEW, ignore_eos=True), use_tqdm=False)[
                0
            ].num_output_tokens
        ),
    ]
    assert in_threads(*map(at_once, calls)) == [NUM_NEW] * 4

    stats = llm.stats()
    assert stats.largest_batch == 4
    assert stats.finished == {"length": 4}  # each of them went through this engine
    assert is_idle(stats)


def test_the_weights_are_there_once(parts: tuple[Any, Any, LLM]) -> None:
    model, _, llm = parts
    with torch.no_grad():
        before = llm.score("ab", "c")[0][0].logprob
        model.lm_head.weight.mul_(-1.0)
    llm.reset_prefix_cache()

    assert llm.score("ab", "c")[0][0].logprob != before  # the engine has no copy of them
