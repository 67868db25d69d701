"""What the stages of gpu_check.py share: the machine, the time that is left, models, engines and pages on them."""

from __future__ import annotations

import dataclasses
import gc
import json
import pathlib
import statistics
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

import paged_kernels
from paged_backend import LLM, EngineConfig
from paged_backend.backend import backend_of
from paged_backend.model import loader
from paged_backend.model.runner import ModelRunner

_SHAPE = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
}
TINY = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 272,
    "max_position_embeddings": 512,
}
BLOCK = 16
_LAUNCHES = 16
"""At least, of which the time is taken together."""


def describe(error: Exception) -> str:
    """In the results; all of it is printed."""
    traceback.print_exception(error)
    return f"{type(error).__name__}: {error}"[:1000]


class Check:
    """The machine, the time that is left, and the results so far."""

    def __init__(self, *, is_dry: bool, minutes: float, out: pathlib.Path) -> None:
        self.is_dry, self._out = is_dry, out
        self.device = torch.device("cpu" if is_dry else "cuda")
        self.dtype = torch.float32 if is_dry else torch.bfloat16
        self._deadline = time.monotonic() + 60 * minutes
        self.results: dict[str, Any] = {}

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
                found = {**self.results.get(name, {}), "error": describe(error)}
        self.keep(name, {"seconds": round(time.monotonic() - start, 1), **found})
        print(f"{name}: {json.dumps(self.results[name], default=str)}", flush=True)
        gc.collect()
        if not self.is_dry:
            torch.cuda.empty_cache()

    def keep(self, name: str, found: dict[str, Any]) -> None:
        """What a stage has found so far, whatever becomes of the rest."""
        self.results[name] = found
        self._out.write_text(json.dumps(self.results, indent=1, default=str) + "\n")

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
        """Of one call among many, without the time between launches: they are captured and replayed, so many at a time
        that what the host takes for that does not count."""
        if self.is_dry:
            return self.seconds_of(*functions)
        for function in functions:
            function()
        launched = functions * -(-_LAUNCHES // len(functions))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for function in launched:
                function()
        return self.seconds_of(graph.replay) / len(launched)

    def random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, device=self.device, dtype=self.dtype)


def model_config(check: Check, **changes: Any) -> LlamaConfig:
    shape = TINY if check.is_dry else _SHAPE
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
    return runner, LLM.from_backend(backend_of(loaded, runner), **settings)


class Pages:
    """Random keys and values of sequences of one length, scattered over pages, and queries for them."""

    def __init__(
        self,
        check: Check,
        num_seqs: int,
        length: int,
        num_queries: int = 1,
        *,
        heads: tuple[int, int] = (32, 8),
        head_size: int = 128,
        value_size: int | None = None,
    ) -> None:
        """With a `value_size` the first so many numbers of a key are its value."""
        num_heads, num_kv_heads = heads
        blocks = -(-length // BLOCK)
        self.query = check.random(num_seqs * num_queries, num_heads, head_size)
        shape = (num_seqs * blocks, num_kv_heads, BLOCK, head_size)
        self.keys, self.values = check.random(*shape), None if value_size else check.random(*shape)
        tables = torch.randperm(num_seqs * blocks, dtype=torch.int32).view(num_seqs, blocks)
        starts = torch.arange(num_seqs + 1, dtype=torch.int32) * num_queries
        lengths = torch.full((num_seqs,), length, dtype=torch.int32)
        self._places = [one.to(check.device) for one in (tables, starts, lengths)]
        self.num_bytes = 2 * num_seqs * length * num_kv_heads * head_size * self.keys.itemsize
        self._options: dict[str, Any] = {"scale": head_size**-0.5, "value_size": value_size}
        self._plan: dict[str, Any] = {}
        if not check.is_dry:
            from paged_kernels.triton_attention import AttentionPlan

            self._plan["plan"] = AttentionPlan(num_seqs if num_queries == 1 else 0, length)

    def attend(self, attention: Callable[..., Tensor] | None = None, **options: Any) -> Tensor:
        if attention is None:
            attention = _kernel()
            options |= self._plan
        return attention(self.query, self.keys, self.values, *self._places, **self._options, **options)


def _kernel() -> Callable[..., Tensor]:
    if not torch.cuda.is_available():
        return paged_kernels.paged_attention
    from paged_kernels.triton_attention import paged_attention

    return paged_attention
