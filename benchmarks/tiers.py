"""Models that cannot take packs, against transformers' `generate`: output tokens per second.

    python benchmarks/tiers.py mamba2 qwen3_next lfm2 bloom --requests 1 8

Models are random, with 50 to 110 million parameters, in bfloat16. All prompts of a task are equally long, so that
`generate` computes no padding. Both sides live in a process each and take turns; the result is the median.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
import warnings
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from paged_backend import LLM, SamplingParams, check_model
from rounds import start, take_turns, versions

VOCAB_SIZE = 32_000
_COMMON = {"vocab_size": VOCAB_SIZE, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_HEADS = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "hidden_size": 512}
CONFIGS: dict[str, dict[str, Any]] = {
    "mamba2": {"hidden_size": 512, "num_hidden_layers": 24, "num_heads": 16, "n_groups": 1},
    "qwen3_next": _HEADS
    | {
        "num_hidden_layers": 12,
        "intermediate_size": 1024,
        "mlp_only_layers": [*range(12)],  # random routers choose by rounding
        "linear_num_key_heads": 8,
        "linear_num_value_heads": 16,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
    },
    "lfm2": _HEADS
    | {
        "num_hidden_layers": 16,
        "intermediate_size": 2048,
        "layer_types": ["conv", "conv", "conv", "full_attention"] * 4,
    },
    "bloom": {"hidden_size": 768, "n_layer": 12, "n_head": 12},
    "falcon": {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "alibi": True},
}


class Task(NamedTuple):
    """Prompts of random tokens, and so many tokens for each."""

    num_requests: int
    prompt_length: int
    num_tokens: int
    seed: int

    def prompts(self) -> list[list[int]]:
        generator = torch.Generator().manual_seed(self.seed)
        shape = (self.num_requests, self.prompt_length)
        return torch.randint(3, VOCAB_SIZE, shape, generator=generator).tolist()


def save(architecture: str, folder: str) -> int:
    """A random checkpoint; how many parameters it has."""
    config = AutoConfig.for_model(architecture, **_COMMON | CONFIGS[architecture])
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def serve_ours(connection: Connection, folder: str) -> None:
    with LLM(folder, kv_cache_memory="256MiB", enable_prefix_caching=False) as llm:
        connection.send("ready")
        while (task := connection.recv()) is not None:
            params = SamplingParams(temperature=0, max_tokens=task.num_tokens, ignore_eos=True)
            begin = time.perf_counter()
            llm.generate(task.prompts(), params, use_tqdm=False)
            connection.send(task.num_requests * task.num_tokens / (time.perf_counter() - begin))


def serve_theirs(connection: Connection, folder: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    connection.send("ready")
    while (task := connection.recv()) is not None:
        token_ids = torch.tensor(task.prompts())
        options = {"min_new_tokens": task.num_tokens, "max_new_tokens": task.num_tokens, "do_sample": False}
        begin = time.perf_counter()
        with torch.inference_mode():
            model.generate(token_ids, attention_mask=torch.ones_like(token_ids), **options)
        connection.send(task.num_requests * task.num_tokens / (time.perf_counter() - begin))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("architectures", nargs="*", default=[*CONFIGS], metavar="architecture", help=", ".join(CONFIGS))
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    print(versions())
    for architecture in arguments.architectures:
        measure(architecture, arguments)


def measure(architecture: str, arguments: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        num_parameters = save(architecture, folder)
        tier = check_model(folder, kv_cache_memory="64MiB").way
        engines = {"ours": start(serve_ours, folder), "generate": start(serve_theirs, folder)}
        for num_requests in arguments.requests:
            for engine in engines.values():  # what is computed once
                engine.send(Task(num_requests, arguments.prompt, 2, 0))
                engine.recv()

            def task(round_: int, num_requests: int = num_requests) -> Task:
                return Task(num_requests, arguments.prompt, arguments.tokens, round_)

            rates = take_turns(engines, arguments.rounds, task)
            ours, theirs = (statistics.median(rates[name]) for name in ("ours", "generate"))
            print(
                f"{architecture:12} {num_parameters / 1e6:4.0f} million, {tier}, {num_requests:2} requests: "
                f"ours {ours:6.1f} tokens/s, generate {theirs:6.1f}, {ours / theirs:5.2f}x",
                flush=True,
            )
        for engine in engines.values():
            engine.send(None)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()
