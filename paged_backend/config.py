"""The engine's settings: frozen, and checked once, here."""

from __future__ import annotations

import dataclasses
import math
import os
import re
from collections.abc import Mapping
from typing import Any

from paged_backend.errors import ConfigError
from paged_backend.fields import Checker, rejects_unknown_arguments

DTYPES = ("auto", "float32", "bfloat16", "float16")
KV_CACHE_DTYPES = ("auto", "int8", "fp8", "fp8_e4m3", "fp8_e5m2")
ATTENTION_BACKENDS = ("auto", "triton", "flash_attn", "flashinfer", "torch", "cpu")
QUANTIZATIONS = (None, "int8", "int4", "unpacked")
_DTYPE_SPELLINGS = {"half": "float16", "float": "float32"}
_UNITS = {
    "": 1,
    **{unit: 1000**power for power, unit in enumerate(("KB", "MB", "GB", "TB"), start=1)},
    **{unit: 1024**power for power, unit in enumerate(("KIB", "MIB", "GIB", "TIB"), start=1)},
}


@rejects_unknown_arguments(ConfigError)
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig:
    """Check guesses at the next tokens of a sequence in the step that computes its newest one.

    Outputs stay what they are, but for the rounding of logits. How many guesses a step checks is decided step by step,
    by how often they were right and by how full the step is.
    """

    method: str = "ngram"
    """`ngram`: what followed the last time that the newest tokens occurred in the prompt or the output."""
    num_speculative_tokens: int = 8
    """Most guesses for one sequence in a step."""
    prompt_lookup_max: int | None = None
    """Longest run of newest tokens that is looked up; None: `prompt_lookup_min`, or 4."""
    prompt_lookup_min: int | None = None
    """Shortest one; None: `prompt_lookup_max`, or 2."""

    def __post_init__(self) -> None:
        check = Checker(ConfigError, self)
        if self.method != "ngram":
            raise ConfigError(f"method={self.method!r} of speculative_config is not available; available: 'ngram'")
        check.integer("num_speculative_tokens", 1)
        check.integer("prompt_lookup_max", 1, optional=True)
        check.integer("prompt_lookup_min", 1, self.prompt_lookup_max, optional=True)

    @property
    def lookup_sizes(self) -> range:
        """How many of the newest tokens are looked up, longest first."""
        longest = self.prompt_lookup_max or self.prompt_lookup_min or 4
        shortest = self.prompt_lookup_min or self.prompt_lookup_max or 2
        return range(longest, shortest - 1, -1)


@rejects_unknown_arguments(ConfigError)
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """How the engine is built; the names are vLLM's where it has one.

    Raises `ConfigError` that names the field, its value and its limit.
    """

    dtype: str = "auto"
    """`auto` (the checkpoint's; float32 where a CPU lacks arithmetic for it and not all products are our kernels'),
    `float32`, `bfloat16`, `float16`; also `float`, `half` or a torch.dtype."""
    device: str = "auto"
    """`auto`, `cpu`, `cuda` or `mps` (correct, but slow), as torch spells it."""
    max_model_len: int | None = None
    """Most tokens of a prompt and its output together; None: the model's own limit."""
    kv_cache_memory: int | str | None = None
    """Memory for keys and values, in bytes or as `"2GiB"`, in each rank; None: a share of what is free."""
    gpu_memory_utilization: float = 0.9
    """The share of the device memory that is free when the model is loaded that the engine may take when
    `kv_cache_memory` is None: what the largest step takes is measured, and the KV cache gets the rest. On a CPU, where
    the memory is everybody's, the cache gets a third of this share, and 4 GiB at most."""
    kv_cache_dtype: str = "auto"
    """`auto`: keys and values in the model's dtype; `int8`: as integers with a scale per token and head, so that about
    twice as many tokens of a 16-bit model fit and long contexts are read faster; on GPUs also `fp8_e4m3`, or `fp8`, and
    `fp8_e5m2`: as floats of 8 bits, with scales too."""
    attention_backend: str = "auto"
    """Whose kernels attend: `auto` (the first of these that suits model and device), `triton`, `flashinfer` or
    `flash_attn` on GPUs, `cpu`, or `torch`: plain and slow, on all devices."""
    block_size: int = 16
    """Tokens per block, 1 to 256."""
    num_gpu_blocks_override: int | None = None
    """Number of blocks, whatever the memory; for tests and for comparing engines."""
    enable_prefix_caching: bool = True
    """Keep the blocks of finished requests findable until their memory is needed."""
    max_num_seqs: int = 256
    """Most sequences in one step."""
    max_num_batched_tokens: int = 512
    """Most tokens computed in one step."""
    max_num_queued_reqs: int | None = None
    """Most requests waiting for their first step, each counted as often as it has samples (`n`); one more raises
    `OverloadedError`. None: no limit."""
    max_logprobs: int = 20
    """Largest `logprobs` and `prompt_logprobs` a request may ask for; -1: no limit."""
    speculative_config: SpeculativeConfig | Mapping[str, Any] | None = None
    """A SpeculativeConfig, or its fields as a mapping: `{"method": "ngram", "num_speculative_tokens": 8}`."""
    seed: int | None = 0
    """Where requests without a seed draw theirs from; None: anew in each process."""
    enforce_eager: bool = False
    """Launch every step's kernels one by one, rather than capture decode steps into CUDA graphs and replay these."""
    async_scheduling: bool | None = None
    """Schedule and launch a step while the one before runs, whose tokens it finds on the device. None: where that pays,
    on CUDA devices; not with `speculative_config`, whose guesses need to know them."""
    quantization: str | None = None
    """None: weights as the checkpoint has them, packed ones in few bits on a CPU; `unpacked`: those too in `dtype`;
    `int8`, `int4`: the linear layers' weights are rounded to 8 or 4 bits when they are loaded, on a CPU. Whoever has
    weights in few bits rounds inputs to 8: faster, in less memory, a little less exact. See docs/quantization.md."""
    tensor_parallel_size: int = 1
    """Ranks that a model is cut into: each has its part of the weights and of each token's keys and values. Rank 0 is
    this process, the others are processes that it starts; on CUDA each has a device. See docs/tensor-parallelism.md."""
    swap_space: float = 0
    """GiB of host memory, in each rank, for the keys and values of preempted sequences, so that they need not be
    computed again; pinned if there is a CUDA device. 0: they are recomputed, as are those that do not fit."""
    enable_lora: bool = False
    """Take requests for LoRA adapters (`lora_request`)."""
    max_loras: int = 8
    """Most different adapters in one step; requests for more wait."""
    max_lora_rank: int = 64
    """Largest rank of an adapter."""
    max_cpu_loras: int | None = None
    """Most adapters that are kept loaded, those in use aside; None: `max_loras`."""
    trust_remote_code: bool = False
    """Run Python code that comes with a checkpoint."""
    revision: str | None = None
    """Branch, tag or commit of a hub repository."""
    chat_template: str | None = None
    """A Jinja template, or a path to one, instead of the tokenizer's own."""
    tool_call_parser: str | None = "auto"
    """How the model writes tool calls: the name of a format (`hermes`, `llama3_json`, `mistral`, ...), `auto` (the one
    whose marks its chat template has) or None (tool calls stay in the text)."""
    reasoning_parser: str | None = "auto"
    """The same for reasoning: `deepseek_r1`, `qwen3`, `openai`, ..., `auto` or None."""
    generation_config: str = "auto"
    """`auto`: take sampling defaults from the model's generation_config.json; `none`: do not (its end tokens count
    either way)."""
    cache_dir: str | None = None
    """Where converted models are kept; None: `~/.cache/paged-backend`."""

    def __post_init__(self) -> None:
        check = Checker(ConfigError, self)
        dtype = str(self.dtype).removeprefix("torch.")
        object.__setattr__(self, "dtype", _DTYPE_SPELLINGS.get(dtype, dtype))
        check.choice("dtype", DTYPES)
        check.choice("generation_config", ("auto", "none"))
        check.choice("kv_cache_dtype", KV_CACHE_DTYPES)
        check.choice("attention_backend", ATTENTION_BACKENDS)
        check.integer("max_model_len", 2, optional=True)
        check.number("gpu_memory_utilization", 0.0, 1.0, open_low=True)
        check.integer("block_size", 1, 256)
        check.integer("num_gpu_blocks_override", 2, optional=True)
        check.number("swap_space", 0.0, math.inf)
        check.integer("max_num_seqs", 1)
        check.integer("max_num_batched_tokens", 1)
        check.integer("max_num_queued_reqs", 1, optional=True)
        check.integer("max_logprobs", -1)
        check.integer("seed", 0, 2**63 - 1, optional=True)
        check.integer("max_loras", 1)
        check.integer("max_lora_rank", 1)
        check.integer("max_cpu_loras", self.max_loras, optional=True)
        check.flag("enable_lora", "enable_prefix_caching", "trust_remote_code", "enforce_eager")
        if self.async_scheduling is not None:
            check.flag("async_scheduling")
        object.__setattr__(self, "kv_cache_memory", parse_bytes(self.kv_cache_memory))
        object.__setattr__(self, "speculative_config", _speculative_config(self.speculative_config))
        if self.quantization not in QUANTIZATIONS:
            available = ", ".join(map(repr, QUANTIZATIONS))
            raise ConfigError(f"quantization={self.quantization!r} is not available; available: {available}")
        if self.async_scheduling and self.speculative_config is not None:
            raise ConfigError(
                "async_scheduling=True does not work with speculative_config, whose guesses follow from tokens that "
                "are not known in time; leave one of them out"
            )
        check.integer("tensor_parallel_size", 1)
        if self.tensor_parallel_size > 1:
            self._check_sharding()

    def _check_sharding(self) -> None:
        for name, default in (("quantization", None), ("enable_lora", False)):
            if getattr(self, name) != default:
                raise ConfigError(
                    f"{name}={getattr(self, name)!r} does not work with "
                    f"tensor_parallel_size={self.tensor_parallel_size}; leave one of them at its default"
                )

    @property
    def speculation(self) -> SpeculativeConfig | None:
        """`speculative_config`, which is no mapping any more."""
        assert not isinstance(self.speculative_config, Mapping)
        return self.speculative_config

    @property
    def cache_folder(self) -> str:
        return self.cache_dir or os.path.join(os.path.expanduser("~"), ".cache", "paged-backend")


def _speculative_config(value: object) -> SpeculativeConfig | None:
    if value is None or isinstance(value, SpeculativeConfig):
        return value
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        raise ConfigError(f"speculative_config={value!r} must be a SpeculativeConfig, a mapping of its fields or None")
    return SpeculativeConfig(**value)


def parse_bytes(value: int | str | None) -> int | None:
    """`2 * 2**30`, `"2GiB"`, `"500 MB"` or `"1024"` as bytes; None stays None."""
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and value > 0):
        return value
    match = (
        re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]i?B)?\s*", value, re.IGNORECASE) if isinstance(value, str) else None
    )
    number = float(match[1]) * _UNITS[(match[2] or "").upper()] if match else 0.0
    num_bytes = int(number) if math.isfinite(number) else 0
    if num_bytes <= 0:
        raise ConfigError(
            f"kv_cache_memory={value!r} must be a number of bytes > 0, or a string like '2GiB' or '500MB'"
        )
    return num_bytes
