"""Output tokens per second of this engine, and of transformers on the same weights in the same run.

    python benchmarks/throughput.py --engines paged generate generate_batch --rounds 5

Each engine lives in a process of its own, since thread pools of one process get in each other's way. They take turns
round by round, so that whatever else the machine does hits all of them. Run it on a quiet machine; the ratios count,
not the rates.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
import transformers

import paged_backend
from paged_backend import LLM, SamplingParams
from rounds import start, take_turns, versions
from workloads import WORKLOADS, Conversation, Workload

Generate = Callable[[list[Conversation], int], None]


def paged_engine(model: str, dtype: str, options: dict[str, Any]) -> Generate:
    llm = LLM(model, dtype=dtype, **{"kv_cache_memory": "2GiB"} | options)

    def generate(conversations: list[Conversation], num_tokens: int) -> None:
        params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
        outputs = llm.chat(conversations, params, use_tqdm=False)
        assert all(len(output.outputs[0].token_ids) == num_tokens for output in outputs)

    return generate


class TransformersEngine:
    """`generate` on a padded batch, or `generate_batch`, transformers' own continuous batching."""

    def __init__(self, model: str, dtype: str) -> None:
        folder = model
        if model == "demo":
            folder = str(paged_backend.demo_folder())
        self._tokenizer = transformers.AutoTokenizer.from_pretrained(folder, padding_side="left")
        self._model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()

    def _rendered(self, conversations: list[Conversation]) -> list[str]:
        return [
            self._tokenizer.apply_chat_template(conversation, add_generation_prompt=True, tokenize=False)
            for conversation in conversations
        ]

    @torch.inference_mode()
    def generate(self, conversations: list[Conversation], num_tokens: int) -> None:
        texts = [
            self._tokenizer.apply_chat_template(c, add_generation_prompt=True, tokenize=False) for c in conversations
        ]
        batch = self._tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
        self._model.generate(**batch, max_new_tokens=num_tokens, min_new_tokens=num_tokens, do_sample=False)

    @torch.inference_mode()
    def generate_batch(self, conversations: list[Conversation], num_tokens: int) -> None:
        texts = [
            self._tokenizer.apply_chat_template(c, add_generation_prompt=True, tokenize=False) for c in conversations
        ]
        config = transformers.GenerationConfig(
            max_new_tokens=num_tokens, do_sample=False, eos_token_id=-1, pad_token_id=self._tokenizer.pad_token_id
        )
        inputs = self._tokenizer(texts, add_special_tokens=False)["input_ids"]
        self._model.generate_batch(inputs=inputs, generation_config=config, progress_bar=False)


def serve(connection: Connection, name: str, model: str, dtype: str, options: dict[str, Any]) -> None:
    """The process of one engine: does each (workload, round) it is sent and answers with the seconds it took."""
    if name.startswith("paged"):
        generate = paged_engine(model, dtype, {"enable_prefix_caching": name == "paged"} | options)
    else:
        generate = getattr(TransformersEngine(model, dtype), name)
    generate(Workload("warm-up", 2, 8).conversations(0), 8)
    connection.send("ready")
    while (task := connection.recv()) is not None:
        workload, round_ = task
        conversations = workload.conversations(round_)
        start = time.perf_counter()
        generate(conversations, workload.num_tokens)
        connection.send(time.perf_counter() - start)


def measure(engines: dict[str, Connection], workload: Workload, rounds: int) -> dict[str, list[float]]:
    """Rates of each engine, one per round."""
    seconds = take_turns(engines, rounds, lambda round_: (workload, round_))
    num_tokens = workload.num_conversations * workload.num_tokens
    return {name: [num_tokens / value for value in values] for name, values in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo", help="demo, or a model folder (default: demo)")
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16", "float16"))
    names = ("paged", "paged_without_prefix_cache", "generate", "generate_batch")
    parser.add_argument("--engines", nargs="+", default=["paged", "generate"], choices=names)
    parser.add_argument("--workloads", nargs="+", default=list(WORKLOADS)[:5], choices=list(WORKLOADS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", help="also write the figures to this JSON file")
    parser.add_argument("--engine-options", type=json.loads, default={}, help="JSON of EngineConfig fields for `paged`")
    arguments = parser.parse_args()

    common = (arguments.model, arguments.dtype, arguments.engine_options)
    engines = {name: start(serve, name, *common) for name in arguments.engines}
    print(f"{versions()}, {arguments.model} in {arguments.dtype}, {arguments.rounds} rounds")
    results = {}
    for name in arguments.workloads:
        rates = results[name] = measure(engines, WORKLOADS[name], arguments.rounds)
        first = arguments.engines[0]
        for engine, values in rates.items():
            ratio = statistics.median(a / b for a, b in zip(rates[first], values, strict=True))
            print(
                f"{name:9} {engine:15} median {statistics.median(values):7.1f} tokens/s, best {max(values):7.1f}"
                + (f"   {first} is {ratio:.2f}x" if engine != first else ""),
                flush=True,
            )
    for engine in engines.values():
        engine.send(None)
    if arguments.output:
        pathlib.Path(arguments.output).write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
