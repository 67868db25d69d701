"""What structured output costs: tokens per second with and without it, and what free rows pay beside it.

    python benchmarks/structured.py --rounds 5

One engine, whose batches take turns round by round, in changing order. In a row of a batch the model generates as many
tokens as in every other one: JSON documents that follow one another, cut at `--num-tokens`. Run it on a quiet machine;
the ratios count, not the rates.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import statistics
import time

import torch

import paged_backend
from paged_backend import LLM, SamplingParams, StructuredOutputsParams
from paged_backend.sampling.grammar import GrammarCompiler
from workloads import Workload

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "email": {"type": "string", "pattern": "^[a-z]{1,20}@[a-z]{1,20}\\.com$"},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 20}, "maxItems": 4},
        "score": {"type": "number", "minimum": 0, "maximum": 100},
        "active": {"type": "boolean"},
        "role": {"enum": ["admin", "user", "guest"]},
        "address": {
            "type": "object",
            "properties": {
                "street": {"type": "string", "maxLength": 40},
                "zip": {"type": "string", "pattern": "^\\d{5}$"},
            },
            "required": ["street", "zip"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "age", "email", "tags", "score", "active", "role", "address"],
    "additionalProperties": False,
}
# As many documents as there is room for, so that every row generates the same number of tokens.
DOCUMENTS = {"type": "array", "items": PERSON, "minItems": 100}


def params(num_tokens: int, *, is_bound: bool) -> SamplingParams:
    schema = StructuredOutputsParams(json=DOCUMENTS) if is_bound else None
    return SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, structured_outputs=schema)


def seconds(llm: LLM, bound: list[bool], num_tokens: int, round_: int) -> tuple[float, float]:
    """How long the batch took, and how long its last free row took."""
    conversations = Workload("structured", len(bound)).conversations(round_)
    each = [params(num_tokens, is_bound=is_bound) for is_bound in bound]
    start = time.monotonic()
    outputs = llm.chat(conversations, each, use_tqdm=False)
    total = time.monotonic() - start
    assert all(len(output.outputs[0].token_ids) == num_tokens for output in outputs)
    ends = [output.metrics.finished_time for output in outputs if output.metrics]
    return total, max(
        (end for end, is_bound in zip(ends, bound, strict=True) if end and not is_bound), default=start
    ) - start


def compile_seconds(llm: LLM, rounds: int) -> list[float]:
    """Each with an empty cache, the vocabulary already read."""
    eos_token_id = llm.get_tokenizer().eos_token_id
    compiler = GrammarCompiler(llm.tokenizer.backend, len(llm.get_tokenizer()), [eos_token_id])
    compiler.compile(StructuredOutputsParams(regex="a"))
    times = []
    for round_ in range(rounds):
        schema = StructuredOutputsParams(json=PERSON | {"title": f"Person {round_}"})
        start = time.perf_counter()
        compiler.compile(schema)
        times.append(time.perf_counter() - start)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo", help="demo, or a model folder (default: demo)")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--num-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()

    half = arguments.rows // 2
    batches = {
        "free": [False] * arguments.rows,
        "bound": [True] * arguments.rows,
        "mixed": [False] * (arguments.rows - half) + [True] * half,
    }
    print(
        f"paged-backend {paged_backend.__version__}, torch {torch.__version__}, "
        f"llguidance {importlib.metadata.version('llguidance')}, Python {platform.python_version()}, "
        f"{torch.get_num_threads()} threads of {os.cpu_count()} cores, {arguments.model}, "
        f"{arguments.rows} rows of {arguments.num_tokens} tokens, {arguments.rounds} rounds"
    )
    with LLM(arguments.model, kv_cache_memory="2GiB", enable_prefix_caching=False) as llm:
        compiling = compile_seconds(llm, 20)
        print(
            f"compiling 8 fields: median {1e3 * statistics.median(compiling):.1f} ms, best {1e3 * min(compiling):.1f}"
        )
        for bound in batches.values():
            seconds(llm, bound, 8, 0)
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in batches}
        for round_ in range(1, arguments.rounds + 1):
            for name, bound in list(batches.items())[:: 1 if round_ % 2 else -1]:
                times[name].append(seconds(llm, bound, arguments.num_tokens, round_))
    num_tokens = arguments.rows * arguments.num_tokens
    for name, measured in times.items():
        rates = [num_tokens / total for total, _ in measured]
        print(f"{name:6} median {statistics.median(rates):7.1f} tokens/s, best {max(rates):7.1f}")
    speed = statistics.median(a / b for (a, _), (b, _) in zip(times["free"], times["bound"], strict=True))
    slower = statistics.median(b / a for (_, a), (_, b) in zip(times["free"], times["mixed"], strict=True))
    print(f"bound is {speed:.3f}x as fast as free; beside bound rows, free ones take {slower:.3f}x as long")


if __name__ == "__main__":
    main()
