"""Is the engine right on this GPU, and how fast? One command, eight minutes.

    python benchmarks/gpu_check.py --out gpu.json
    python benchmarks/gpu_check.py --dry          everything at tiny sizes on the CPU, to see that the script runs

Right comes first. Then what the device can do is measured, so that attention can be given as a share of it; then whole
engines are compared on a random model of Llama 3 8B's shape, made on the device: this one with CUDA graphs and without,
transformers' `generate` and `generate_batch`, and vLLM where it is installed. Each stage has a time limit of its own
making: one for which too little of `--minutes` is left is skipped. Results are written after each stage.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import gc
import importlib.util
import json
import pathlib
import random
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig, PreTrainedModel

import paged_kernels
from paged_backend import LLM, Backend, EngineConfig, SamplingParams
from paged_backend.model import loader
from paged_backend.model.runner import ModelRunner
from paged_backend.sampling.sampler import Sampler
from paged_kernels import reference

_SHAPE = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
}
_TINY = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 272,
    "max_position_embeddings": 512,
}
_BLOCK = 16
_FEATURES: dict[str, dict[str, Any]] = {"plain": {}, "window": {"window": 33}, "softcap": {"softcap": 20.0}}


class Check:
    """The machine, the time that is left, and the results so far."""

    def __init__(self, *, is_dry: bool, minutes: float, out: pathlib.Path) -> None:
        self.is_dry, self._out = is_dry, out
        self.device = torch.device("cpu" if is_dry else "cuda")
        self.dtype = torch.float32 if is_dry else torch.bfloat16
        self._deadline = time.monotonic() + 60 * minutes
        self.results: dict[str, Any] = {}
        self._folder = tempfile.TemporaryDirectory()

    @property
    def seconds_left(self) -> float:
        return self._deadline - time.monotonic()

    def stage(self, name: str, seconds: float, run: Callable[[Check], dict[str, Any]]) -> None:
        start = time.monotonic()
        if self.seconds_left < seconds and not self.is_dry:
            found: dict[str, Any] = {"skipped": f"it takes {seconds:.0f} s, and {self.seconds_left:.0f} s are left"}
        else:
            try:
                found = run(self)
            except Exception as error:
                traceback.print_exc()
                found = {"error": f"{type(error).__name__}: {error}"[:1000]}
        self.results[name] = {"seconds": round(time.monotonic() - start, 1), **found}
        self._out.write_text(json.dumps(self.results, indent=1, default=str) + "\n")
        print(f"{name}: {json.dumps(self.results[name], default=str)}", flush=True)
        gc.collect()
        if not self.is_dry:
            torch.cuda.empty_cache()

    def synchronize(self) -> None:
        if not self.is_dry:
            torch.cuda.synchronize()

    def seconds_of(self, *functions: Callable[[], object], repeats: int = 20) -> float:
        """The median of one call; several functions take turns, so that caches do not hold what they read."""
        for function in functions:
            function()
        times = []
        for number in range(2 if self.is_dry else repeats):
            function = functions[number % len(functions)]
            self.synchronize()
            start = time.perf_counter()
            function()
            self.synchronize()
            times.append(time.perf_counter() - start)
        return statistics.median(times)

    def seconds_of_launches(self, *functions: Callable[[], object]) -> float:
        """Of one call among many, without the time between launches: they are captured and replayed."""
        if self.is_dry:
            return self.seconds_of(*functions)
        for function in functions:
            function()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for function in functions:
                function()
        return self.seconds_of(graph.replay) / len(functions)

    def random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, device=self.device, dtype=self.dtype)

    def config_folder(self) -> str:
        """A folder with the large model's configuration alone."""
        model_config(self).save_pretrained(self._folder.name)
        return self._folder.name


def model_config(check: Check, **changes: Any) -> LlamaConfig:
    shape = _TINY if check.is_dry else _SHAPE
    fields = {"eos_token_id": None, "pad_token_id": 0, "initializer_range": 0.02, "tie_word_embeddings": False}
    return LlamaConfig(**{**shape, **fields, "dtype": check.dtype, "architectures": ["LlamaForCausalLM"], **changes})


def make_model(config: LlamaConfig, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    torch.manual_seed(0)
    with device:
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return model.eval().requires_grad_(False)


def use_own_attention(model: PreTrainedModel) -> None:
    """As before an engine ran it."""
    model.set_attn_implementation("sdpa")


def make_llm(model: PreTrainedModel, **settings: Any) -> tuple[ModelRunner, LLM]:
    """On weights that are the engine's own, so that it may merge them as it does with those of a checkpoint."""
    use_own_attention(model)
    config = EngineConfig(**settings)
    loaded = dataclasses.replace(loader.load(model, None, config), owns_weights=True)
    runner = ModelRunner(loaded, config)
    backend = Backend(
        name="random",
        runner=runner,
        sampler=Sampler(runner.vocab_size),
        tokenizer=None,
        max_model_len=loaded.max_model_len,
        num_swap_blocks=runner.num_swap_blocks,
        close=runner.close,
    )
    return runner, LLM.from_backend(backend, **settings)


# --- stages ---


def machine(check: Check) -> dict[str, Any]:
    versions = {
        name: importlib.util.find_spec(name) is not None for name in ("triton", "flash_attn", "flashinfer", "vllm")
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


class Pages:
    """Random keys and values of sequences of one length, scattered over pages, and queries for them."""

    def __init__(
        self, check: Check, num_seqs: int, length: int, num_queries: int = 1, heads: tuple[int, int] = (32, 8)
    ):
        num_heads, num_kv_heads = heads
        blocks = -(-length // _BLOCK)
        self.query = check.random(num_seqs * num_queries, num_heads, 128)
        self.keys, self.values = (check.random(num_seqs * blocks, num_kv_heads, _BLOCK, 128) for _ in range(2))
        tables = torch.randperm(num_seqs * blocks, dtype=torch.int32).view(num_seqs, blocks)
        starts = torch.arange(num_seqs + 1, dtype=torch.int32) * num_queries
        lengths = torch.full((num_seqs,), length, dtype=torch.int32)
        self._places = [one.to(check.device) for one in (tables, starts, lengths)]
        self.num_bytes = 2 * num_seqs * length * num_kv_heads * 128 * self.keys.itemsize
        self._options: dict[str, Any] = {}
        if not check.is_dry:
            from paged_kernels.triton_attention import AttentionPlan

            self._options["plan"] = AttentionPlan(num_seqs if num_queries == 1 else 0, length)

    def attend(self, attention: Callable[..., Tensor] | None = None, **options: Any) -> Tensor:
        if attention is None:
            attention = _kernel()
            options |= self._options
        return attention(self.query, self.keys, self.values, *self._places, scale=128**-0.5, **options)


def _kernel() -> Callable[..., Tensor]:
    if not torch.cuda.is_available():
        return paged_kernels.paged_attention
    from paged_kernels.triton_attention import paged_attention

    return paged_attention


def kernels_are_right(check: Check) -> dict[str, Any]:
    """Attention and what is around it, against the definitions on the same device."""
    differences: dict[str, float] = {}
    sizes = [(3, 40, 1), (2, 50, 20)] if check.is_dry else [(3, 700, 1), (5, 4000, 1), (2, 300, 300), (3, 900, 70)]
    for num_seqs, length, num_queries in sizes:
        for name, options in _FEATURES.items():
            pages = Pages(check, num_seqs, length, num_queries)
            actual, expected = (
                pages.attend(**options).double(),
                pages.attend(reference.paged_attention, **options).double(),
            )
            differences[f"{num_seqs}x{length} q{num_queries} {name}"] = float(
                (actual - expected).norm() / expected.norm()
            )
    x, residual, weight = check.random(7, 4096), check.random(7, 4096), check.random(4096)
    actual, _ = paged_kernels.add_rms_norm(x, residual.clone(), weight, 1e-5)
    expected, _ = reference.add_rms_norm(x, residual.clone(), weight, 1e-5)
    differences["add_rms_norm"] = float((actual.double() - expected.double()).norm() / expected.double().norm())
    gates = check.random(7, 2 * 4096)
    actual, expected = paged_kernels.silu_and_mul(gates), reference.silu_and_mul(gates)
    differences["silu_and_mul"] = float((actual.double() - expected.double()).norm() / expected.double().norm())
    worst = max(differences.values())
    return {"is_right": worst < 1e-2, "worst": worst, "wrong": {k: v for k, v in differences.items() if not v < 1e-2}}


def engine_is_right(check: Check) -> dict[str, Any]:
    """Greedy tokens of a small float32 model: those of transformers, with graphs, without, preempted and swapped."""
    config = LlamaConfig(**{**_TINY, "eos_token_id": None, "pad_token_id": 0, "initializer_range": 0.15})
    model = make_model(config, check.device, torch.float32)
    draw = random.Random(0)
    prompts = [[draw.randrange(1, 272) for _ in range(draw.randint(5, 60))] for _ in range(12)]
    expected = []
    for prompt in prompts:
        ids = torch.tensor([prompt], device=check.device)
        expected.append(model.generate(ids, max_new_tokens=40, do_sample=False)[0, len(prompt) :].tolist())
    found = {}
    params = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
    ways: dict[str, dict[str, Any]] = {
        "graphs": {},
        "eager": {"enforce_eager": True},
        "swapped": {"num_gpu_blocks_override": 24, "swap_space": 0.1},
        "chunked": {"max_num_batched_tokens": 16},
        "torch": {"attention_backend": "torch"},
    }
    for name, settings in ways.items():
        _, llm = make_llm(model, max_num_seqs=16, kv_cache_memory="64MiB", **settings)
        with llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
        same = [output.outputs[0].token_ids == tokens for output, tokens in zip(outputs, expected, strict=True)]
        found[name] = f"{sum(same)} of {len(same)} as transformers"
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
        ours = check.seconds_of(pages.attend, repeats=10)
        query = check.random(1, 32, length, 128)
        key, value = (check.random(1, 8, length, 128) for _ in range(2))

        def dense(query: Tensor = query, key: Tensor = key, value: Tensor = value) -> Tensor:
            return torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)

        sdpa = check.seconds_of(dense, repeats=10)
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
    mixed, uniform = loads.values()
    found: dict[str, Any] = {}
    settings: dict[str, Any] = {"max_num_seqs": 64, "max_num_batched_tokens": 2048, "max_model_len": 1088}
    if check.is_dry:
        settings = {"kv_cache_memory": "8MiB", "max_num_seqs": 4}
    for name, options in {"paged-backend": {}, "paged-backend, eager": {"enforce_eager": True}}.items():
        runner, llm = make_llm(model, **settings, **options)
        with llm:
            _generate(llm, uniform)  # compiles, and captures
            found[name] = {
                kind: _rate(check, load, functools.partial(_generate, llm, load)) for kind, load in loads.items()
            }
            found[name] |= _steps(check, llm, 1 if check.is_dry else 64)
            found[name]["share_of_steps_outside_the_model"] = _overhead(check, llm, runner, 1 if check.is_dry else 64)
    use_own_attention(model)
    found["transformers generate"] = {"mixed": _rate(check, mixed, lambda: _generate_padded(check, model, mixed))}
    if hasattr(model, "generate_batch") and not check.is_dry:
        try:
            rate: float | str = _rate(check, uniform, lambda: _generate_batch(model, uniform))
        except Exception as error:  # which loses nobody else's figures
            rate = f"{type(error).__name__}: {error}"[:300]
        found["transformers generate_batch"] = {"uniform": rate}
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


def _generate_batch(model: Any, load: Workload) -> None:
    config = GenerationConfig(max_new_tokens=load.lengths[0], do_sample=False, eos_token_id=-1, pad_token_id=0)
    model.generate_batch(inputs=load.prompts, generation_config=config)


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


def _overhead(check: Check, llm: LLM, runner: ModelRunner, num_seqs: int) -> float:
    """What of a step's time is not the model's: scheduling, sampling, output."""
    execute, seconds = runner.execute, list[float]()

    def timed(output: Any) -> Tensor:
        start = time.perf_counter()
        logits = execute(output)
        check.synchronize()
        seconds.append(time.perf_counter() - start)
        return logits

    runner.execute = timed  # type: ignore[method-assign]
    try:
        before = llm.stats()
        _steps(check, llm, num_seqs)
        after = llm.stats()
    finally:
        runner.execute = execute  # type: ignore[method-assign]
    return round(1 - sum(seconds) / (after.step_seconds - before.step_seconds), 4)


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


_VLLM = """
import json, sys, time
from vllm import LLM, SamplingParams
folder, loads = json.loads(sys.stdin.read())
llm = LLM(folder, load_format="dummy", skip_tokenizer_init=True, max_model_len=1088, gpu_memory_utilization=0.8)
found = {}
for name, (prompts, lengths) in [("warm-up", loads["uniform"]), *loads.items()]:
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
    job = json.dumps([check.config_folder(), {name: [load.prompts, load.lengths] for name, load in loads.items()}])
    done = subprocess.run(
        [sys.executable, "-c", _VLLM],
        input=job,
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


_STAGES: dict[str, tuple[float, Callable[[Check], dict[str, Any]]]] = {
    "machine": (5, machine),
    "kernels are right": (60, kernels_are_right),
    "engine is right": (40, engine_is_right),
    "ceilings": (10, ceilings),
    "decode attention": (30, decode_attention),
    "prefill attention": (20, prefill_attention),
    "whole engines": (150, whole_engines),
    "graphs": (60, graphs),
    "vllm": (90, vllm),
}
"""And the seconds below which there is no use in beginning."""


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
    check = Check(is_dry=arguments.dry, minutes=arguments.minutes, out=arguments.out)
    for name in arguments.stages:
        check.stage(name, *_STAGES[name])
    print(table(check.results))
    if any("error" in found for found in check.results.values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
