"""What LoRA adapters cost: output tokens per second without them, with the engine ready for them, and with them.

    python benchmarks/lora.py --requests 1 8 --rank 16

Adapters are random, on all linear layers. Two engines, one of which takes adapters, live in a process each; each round
runs every case once. The result is the median, and its ratio to the engine that takes none.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from paged_backend import LLM, LoRARequest, SamplingParams, demo_folder
from rounds import start, versions

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
NUM_ADAPTERS = 8


def save_adapter(folder: Path, model: str, rank: int, seed: int) -> LoRARequest:
    generator = torch.Generator().manual_seed(seed)
    with torch.device("meta"):
        layers = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model)).named_modules()
    tensors = {}
    for name, module in layers:
        if name.endswith(TARGETS):
            key = f"base_model.model.{name}.lora_"
            tensors[f"{key}A.weight"] = torch.randn(rank, module.in_features, generator=generator) * 0.01
            tensors[f"{key}B.weight"] = torch.randn(module.out_features, rank, generator=generator) * 0.01
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": rank}))
    return LoRARequest(folder.name, folder)


class Task(NamedTuple):
    """One run of one case: request *i* has adapter *i*, as often as they go round."""

    num_requests: int
    num_tokens: int
    adapters: list[LoRARequest | None]


def serve(connection: Connection, model: str, dtype: str, enable_lora: bool) -> None:
    """The process of one engine, which answers with tokens per second."""
    llm = LLM(model, dtype=dtype, kv_cache_memory="64MiB", enable_lora=enable_lora, max_loras=NUM_ADAPTERS)
    run(llm, Task(1, 4, [None]))
    connection.send("ready")
    while (task := connection.recv()) is not None:
        run(llm, task._replace(num_tokens=1))
        connection.send(run(llm, task))


def run(llm: LLM, task: Task) -> float:
    prompts = [[10 + (7 * i + j) % 1000 for j in range(32)] for i in range(task.num_requests)]
    wanted = [task.adapters[i % len(task.adapters)] for i in range(task.num_requests)]
    params = SamplingParams(temperature=0, max_tokens=task.num_tokens, ignore_eos=True)
    begin = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False, lora_request=wanted if any(wanted) else None)
    return task.num_requests * task.num_tokens / (time.perf_counter() - begin)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(demo_folder()))
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    print(f"{versions()}, {arguments.model} in {arguments.dtype}, rank {arguments.rank}")
    plain, ready = (start(serve, arguments.model, arguments.dtype, takes) for takes in (False, True))
    with tempfile.TemporaryDirectory() as folder:
        numbers = range(NUM_ADAPTERS)
        adapters = [save_adapter(Path(folder, str(i)), arguments.model, arguments.rank, i) for i in numbers]
        cases: dict[str, tuple[Connection, list[LoRARequest | None]]] = {
            "no adapters taken": (plain, [None]),
            "taken, none used": (ready, [None]),
            "one adapter": (ready, adapters[:1]),
            "every other request": (ready, [adapters[0], None]),
            f"{NUM_ADAPTERS} adapters": (ready, [*adapters]),
        }
        for num_requests in arguments.requests:
            measure(cases, num_requests, arguments.tokens, arguments.rounds)
    for engine in (plain, ready):
        engine.send(None)
    for process in multiprocessing.active_children():
        process.join()


def measure(
    cases: dict[str, tuple[Connection, list[LoRARequest | None]]], num_requests: int, num_tokens: int, rounds: int
) -> None:
    rates: dict[str, list[float]] = {case: [] for case in cases}
    for _ in range(rounds):
        for case, (engine, adapters) in cases.items():
            engine.send(Task(num_requests, num_tokens, adapters))
            rates[case].append(engine.recv())
    base = statistics.median(rates["no adapters taken"])
    for case, values in rates.items():
        median = statistics.median(values)
        print(f"{num_requests:3} requests, {case:20} {median:7.1f} tokens/s {median / base:6.2f}x", flush=True)


if __name__ == "__main__":
    main()
