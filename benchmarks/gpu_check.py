"""Is the engine right on this GPU, and how fast? One command, eight minutes.

    python benchmarks/gpu_check.py --out gpu.json
    python benchmarks/gpu_check.py --dry          everything at tiny sizes on the CPU, to see that the script runs

From a checkout that is not installed: PYTHONPATH=.:kernels python benchmarks/gpu_check.py

Right comes first. Then what the device can do is measured, so that attention can be given as a share of it; then whole
engines are compared on a random model of Llama 3 8B's shape, made on the device: this one with CUDA graphs and without,
transformers' `generate` and `generate_batch`, and vLLM where it is installed. Each stage has a time limit of its own
making: one for which too little of `--minutes` is left is skipped. Results are written after each stage. What others
make of it comes last, and whatever still runs a minute after the time is over is ended.
"""

from __future__ import annotations

import argparse
import faulthandler
import functools
import importlib.metadata
import importlib.util
import json
import pathlib
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from gpu_right import adapters_are_right, engine_is_right, kernels_are_right
from gpu_setup import Check, Pages, describe, make_llm, make_model, model_config, use_own_attention
from paged_backend import LLM, SamplingParams
from paged_backend.model.runner import ModelRunner


def machine(check: Check) -> dict[str, Any]:
    versions = {
        name: importlib.metadata.version(name) if importlib.util.find_spec(name) else None
        for name in ("transformers", "triton", "vllm")
    }
    found: dict[str, Any] = {"torch": torch.__version__, **versions}
    if not check.is_dry:
        properties = torch.cuda.get_device_properties(0)
        found |= {"gpu": properties.name, "processors": properties.multi_processor_count}
        query = [
            "nvidia-smi",
            "--query-gpu=clocks.sm,clocks.mem,temperature.gpu,driver_version",
            "--format=csv,noheader",
        ]
        found["nvidia_smi"] = subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()
    return found


def ceilings(check: Check) -> dict[str, Any]:
    num = 2**16 if check.is_dry else 2**30
    source, target = check.random(num), check.random(num)
    seconds = check.seconds_of(lambda: target.copy_(source), repeats=10)
    size = 128 if check.is_dry else 8192
    matrix = check.random(size, size)
    product = check.seconds_of(lambda: matrix @ matrix, repeats=10)
    return {"copy_TBps": 2 * source.nbytes / seconds / 1e12, "matmul_TFLOPs": 2 * size**3 / product / 1e12}


def decode_attention(check: Check) -> dict[str, Any]:
    """The bytes of keys and values per second, as a share of what a copy moves."""
    copy = check.results.get("ceilings", {}).get("copy_TBps")
    sizes = (
        [(1, 64), (2, 48)] if check.is_dry else [(1, 4096), (1, 32768), (8, 4096), (32, 4096), (128, 2048), (64, 512)]
    )
    found = {}
    for num_seqs, length in sizes:
        sets = 1 if check.is_dry else max(1, min(6, int(4e8 // (num_seqs * length * 4096))))
        pages = [Pages(check, num_seqs, length) for _ in range(sets)]
        seconds = check.seconds_of_launches(*(one.attend for one in pages))
        rate = pages[0].num_bytes / seconds / 1e12
        found[f"{num_seqs} x {length}"] = {
            "us": round(seconds * 1e6, 1),
            "TBps": round(rate, 3),
            "share_of_copy": round(rate / copy, 3) if copy else None,
        }
    return found


def prefill_attention(check: Check) -> dict[str, Any]:
    found = {}
    for length in (64,) if check.is_dry else (512, 2048, 8192):
        pages = Pages(check, 1, length, length)
        ours = check.seconds_of_launches(pages.attend)
        query = check.random(1, 32, length, 128)
        key, value = (check.random(1, 8, length, 128) for _ in range(2))

        def dense(query: Tensor = query, key: Tensor = key, value: Tensor = value) -> Tensor:
            return torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)

        sdpa = check.seconds_of_launches(dense)
        found[str(length)] = {
            "us": round(ours * 1e6, 1),
            "sdpa_us": round(sdpa * 1e6, 1),
            "ratio": round(sdpa / ours, 2),
        }
    return found


class Workload:
    """Prompts of various lengths, and how many tokens are wanted after each."""

    def __init__(self, check: Check, num_requests: int, *, is_uniform: bool) -> None:
        draw, vocab_size = random.Random(num_requests), model_config(check).vocab_size
        longest = 12 if check.is_dry else 512
        num_prompt = (4, 12) if check.is_dry else (32, 512)
        self.prompts = [
            [draw.randrange(1, vocab_size) for _ in range(draw.randint(*num_prompt))] for _ in range(num_requests)
        ]
        # Most answers are short, and some are long.
        lengths = [max(1, round(longest * draw.random() ** 3)) for _ in self.prompts]
        self.lengths = [longest // 4] * num_requests if is_uniform else [*lengths[1:], longest]

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)


def whole_engines(check: Check) -> dict[str, Any]:
    """Tokens per second; only tokens that were wanted count."""
    model = make_model(model_config(check), check.device, check.dtype)
    num_requests = 4 if check.is_dry else 64
    loads = {kind: Workload(check, num_requests, is_uniform=kind == "uniform") for kind in ("mixed", "uniform")}
    found: dict[str, Any] = {}
    settings: dict[str, Any] = {"max_num_seqs": 64, "max_num_batched_tokens": 2048, "max_model_len": 1088}
    if check.is_dry:
        settings = {"kv_cache_memory": "8MiB", "max_num_seqs": 4}
    settings["enable_prefix_caching"] = False  # else nothing of the prompts would be left to compute
    ways: dict[str, dict[str, Any]] = {
        "paged-backend": {},
        "paged-backend, one step after the other": {"async_scheduling": False},
        "paged-backend, eager": {"enforce_eager": True},
    }
    for name, options in ways.items():
        runner, llm = make_llm(model, **settings, **options)
        with llm:
            for load in loads.values():
                _generate(llm, load)  # compiles, and captures
            found[name] = {
                kind: _rate(check, load, functools.partial(_generate, llm, load)) for kind, load in loads.items()
            }
            found[name] |= _steps(check, llm, 1 if check.is_dry else 64)
            found[name] |= _overhead(check, llm, runner, 1 if check.is_dry else 64)
        check.keep("whole engines", found)
    use_own_attention(model)
    mixed = loads["mixed"]
    found["transformers generate"] = {"mixed": _rate(check, mixed, lambda: _generate_padded(check, model, mixed))}
    ours, static = found["paged-backend"]["mixed"], found["transformers generate"]["mixed"]
    return {**found, "ratio_to_generate": round(ours / static, 1)}


def _rate(check: Check, load: Workload, run: Callable[[], object]) -> float:
    check.synchronize()
    start = time.perf_counter()
    run()
    check.synchronize()
    return round(load.num_tokens / (time.perf_counter() - start), 1)


def _generate(llm: LLM, load: Workload) -> None:
    params = [SamplingParams(max_tokens=length, temperature=0, ignore_eos=True) for length in load.lengths]
    llm.generate(load.prompts, params, use_tqdm=False)


def _generate_padded(check: Check, model: PreTrainedModel, load: Workload) -> None:
    """A static batch runs until its longest answer is there."""
    longest = max(map(len, load.prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in load.prompts], device=check.device)
    model.generate(ids, attention_mask=(ids > 0).long(), max_new_tokens=max(load.lengths), do_sample=False)


def _steps(check: Check, llm: LLM, num_seqs: int) -> dict[str, float]:
    """Milliseconds of a step of as many sequences, with all that the engine does, per token of each."""
    prompts = [[1 + number % 200] * 8 for number in range(num_seqs)]
    params = SamplingParams(max_tokens=16 if check.is_dry else 128, temperature=0, ignore_eos=True)
    llm.generate(prompts, params, use_tqdm=False)
    before = llm.stats()
    start = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    seconds, after = time.perf_counter() - start, llm.stats()
    num_steps = after.num_steps - before.num_steps
    return {f"step_ms_of_{num_seqs}": round(1e3 * seconds / num_steps, 3)}


def _overhead(check: Check, llm: LLM, runner: ModelRunner, num_seqs: int) -> dict[str, float]:
    """What of the time from step to step the device does not compute the model, and what the host takes to launch it.

    The device's own clock is read, so that nothing waits that did not wait before. A device that has nothing to do
    while a step is prepared counts that time as the model's; `host_ms` is most of it."""
    execute, starts, clocks, host = runner.execute, list[float](), list[Any](), list[float]()

    def timed(output: Any) -> Tensor:
        before, after = _Clock(check), _Clock(check)
        starts.append(time.perf_counter())
        before.read()
        logits = execute(output)
        after.read()
        host.append(time.perf_counter() - starts[-1])
        clocks.append((before, after))
        return logits

    runner.execute = timed  # type: ignore[method-assign]
    try:
        _steps(check, llm, num_seqs)
    finally:
        runner.execute = execute  # type: ignore[method-assign]
    check.synchronize()
    half = len(starts) // 2  # those before warm up
    seconds = [before.seconds_to(after) for before, after in clocks[half:-1]]
    whole = starts[-1] - starts[half]
    return {
        "share_of_steps_outside_the_model": round(1 - sum(seconds) / whole, 4),
        "host_ms_to_launch": round(1e3 * statistics.median(host[half:]), 3),
    }


class _Clock:
    """When the device got as far as where `read` was called."""

    def __init__(self, check: Check) -> None:
        self._event = None if check.is_dry else torch.cuda.Event(enable_timing=True)
        self._seconds = 0.0

    def read(self) -> None:
        if self._event is None:
            self._seconds = time.perf_counter()
        else:
            self._event.record()

    def seconds_to(self, later: _Clock) -> float:
        if self._event is None or later._event is None:
            return later._seconds - self._seconds
        return float(self._event.elapsed_time(later._event)) / 1e3


def graphs(check: Check) -> dict[str, Any]:
    """How much of a decode step is launching, for few sequences: with graphs and without."""
    model = make_model(model_config(check), check.device, check.dtype)
    found = {}
    for num_seqs in (1,) if check.is_dry else (1, 8, 64):
        for name, is_eager in (("replayed", False), ("eager", True)):
            memory = "8MiB" if check.is_dry else "8GiB"
            _, llm = make_llm(model, max_num_seqs=num_seqs, kv_cache_memory=memory, enforce_eager=is_eager)
            with llm:
                found[f"{name}: {num_seqs}"] = _steps(check, llm, num_seqs)[f"step_ms_of_{num_seqs}"]
    return found


def generate_batch(check: Check) -> dict[str, Any]:
    """transformers' own batching. What goes wrong in it is its own fault."""
    if check.is_dry:
        return {"skipped": "it is for GPUs"}
    model: Any = make_model(model_config(check), check.device, check.dtype)
    load = Workload(check, 64, is_uniform=True)
    config = GenerationConfig(max_new_tokens=load.lengths[0], do_sample=False, eos_token_id=-1, pad_token_id=0)
    try:
        rate = _rate(check, load, lambda: model.generate_batch(inputs=load.prompts, generation_config=config))
    except Exception as error:
        return {"failed": describe(error)}
    return {"uniform": rate}


_VLLM = """
import json, sys, time
from vllm import LLM, SamplingParams
folder, loads = json.loads(sys.stdin.read())
llm = LLM(folder, load_format="dummy", skip_tokenizer_init=True, max_model_len=1088, gpu_memory_utilization=0.8,
          enable_prefix_caching=False)
found = {}
for name, (prompts, lengths) in 2 * list(loads.items()):  # the first ones warm up
    params = [SamplingParams(max_tokens=n, temperature=0, ignore_eos=True, detokenize=False) for n in lengths]
    start = time.perf_counter()
    llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    found[name] = round(sum(lengths) / (time.perf_counter() - start), 1)
print("RESULT " + json.dumps(found))
"""


def vllm(check: Check) -> dict[str, Any]:
    if importlib.util.find_spec("vllm") is None or check.is_dry:
        return {"skipped": "vLLM is not installed"}
    loads = {
        name: Workload(check, 64, is_uniform=is_uniform) for name, is_uniform in (("mixed", False), ("uniform", True))
    }
    with tempfile.TemporaryDirectory() as folder:
        model_config(check).save_pretrained(folder)
        done = subprocess.run(
            [sys.executable, "-c", _VLLM],
            input=json.dumps([folder, {name: [load.prompts, load.lengths] for name, load in loads.items()}]),
            capture_output=True,
            text=True,
            timeout=check.seconds_left,
            check=False,
        )
    results = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if not results:
        return {"error": done.stderr[-1000:]}
    found: dict[str, Any] = json.loads(results[-1].removeprefix("RESULT "))
    return found


_MANY_TOKENS = 128 * 1024
"""In the cache: from here on decode attention is bound by memory."""
_STAGES: dict[str, tuple[float, Callable[[Check], dict[str, Any]]]] = {
    "machine": (5, machine),
    "kernels are right": (60, kernels_are_right),
    "engine is right": (40, engine_is_right),
    "adapters are right": (15, adapters_are_right),
    "ceilings": (10, ceilings),
    "decode attention": (30, decode_attention),
    "prefill attention": (20, prefill_attention),
    "whole engines": (150, whole_engines),
    "graphs": (60, graphs),
    "generate_batch": (45, generate_batch),
    "vllm": (90, vllm),
}
"""And the seconds below which there is no use in beginning."""


def targets(results: dict[str, Any]) -> dict[str, str]:
    """What is to be reached, and what was; nothing of stages that did not come to their end."""
    found: dict[str, str] = {}

    def judge(name: str, value: float | None, is_met: Callable[[float], bool]) -> None:
        if value is not None:
            found[name] = f"{value}: {'met' if is_met(value) else 'MISSED'}"

    for size, figures in results.get("decode attention", {}).items():
        num_seqs, _, length = size.partition(" x ")
        if isinstance(figures, dict) and int(num_seqs) * int(length) >= _MANY_TOKENS:
            judge(f"decode attention of {size} >= 0.8 of a copy", figures["share_of_copy"], lambda share: share >= 0.8)
    engines = results.get("whole engines", {})
    outside = engines.get("paged-backend", {}).get("share_of_steps_outside_the_model")
    judge("outside the model < 0.05 of a step", outside, lambda share: share < 0.05)
    judge("mixed lengths >= 10 x generate", engines.get("ratio_to_generate"), lambda ratio: ratio >= 10)
    return found


def table(results: dict[str, Any]) -> str:
    """The figures that decide, as lines of a Markdown table."""
    lines = ["| what | figure |", "| --- | --- |"]
    for name, found in results.items():
        for key, value in found.items():
            text = ", ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else value
            lines += [] if key == "seconds" else [f"| {name}: {key} | {text} |"]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry", action="store_true", help="tiny sizes, on the CPU")
    parser.add_argument("--minutes", type=float, default=8.0, help="most that it may take (default: 8)")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("gpu_check.json"))
    parser.add_argument("--stages", nargs="*", default=list(_STAGES), choices=list(_STAGES), help="only these")
    arguments = parser.parse_args()
    if not arguments.dry and not torch.cuda.is_available():
        parser.error("torch sees no CUDA device; --dry runs everything at tiny sizes on the CPU")
    if not arguments.dry:
        faulthandler.dump_traceback_later(60 * (arguments.minutes + 1), exit=True)
    check = Check(is_dry=arguments.dry, minutes=arguments.minutes, out=arguments.out)
    for name in arguments.stages:
        check.stage(name, *_STAGES[name])
    check.stage("targets", 0, lambda check: targets(check.results))
    print(table(check.results))
    if any("error" in found or not found.get("is_right", True) for found in check.results.values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
