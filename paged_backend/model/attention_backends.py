"""Whose kernels store keys and values in pages and attend to them: one interface, and who is chosen for a model.

All of them compute what `paged_kernels.reference` defines, over the same pages. A backend says what it lacks for a
model; nobody else knows what it can do.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

import paged_kernels
from paged_backend.errors import ConfigError
from paged_kernels import reference
from paged_kernels.transfers import to_device

if TYPE_CHECKING:
    from paged_backend.model.attention import AttentionMetadata, LayerSpec
    from paged_backend.model.kv_cache import LayerCache

logger = logging.getLogger(__name__)

_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_FLASHINFER_WORKSPACE = 256 * 2**20  # bytes; what its documentation takes, twice
_FLASH_ATTN_BLOCK = 256


class Needs(NamedTuple):
    """What a model asks of a backend."""

    device: torch.device
    dtype: torch.dtype
    cache_dtype: torch.dtype
    block_size: int
    specs: Sequence[LayerSpec]

    def of_layers(self, **wanted: Callable[[LayerSpec], bool]) -> list[str]:
        """The names of what some layer wants."""
        return [name.replace("_", " ") for name, is_wanted in wanted.items() if any(map(is_wanted, self.specs))]


class StepAttention(Protocol):
    """Attention in one step, layer by layer."""

    def store(self, cache: LayerCache, key: Tensor, value: Tensor | None) -> None:
        """key [T, K, D] and value [T, K, Dv] into their slots; no value if the cache has none."""
        ...

    def attend(self, spec: LayerSpec, cache: LayerCache, query: Tensor, sinks: Tensor | None) -> Tensor:
        """query [T, H, D] -> [T, H, Dv]"""
        ...


class AttentionBackend(Protocol):
    """Made once for a model."""

    name: ClassVar[str]
    is_capturable: ClassVar[bool] = False
    """Whether a CUDA graph may replay its calls for other requests of the same `BatchShape`."""
    puts_decodes_first: ClassVar[bool] = False
    """Whether steps are faster with the sequences that compute one token before all others."""
    lets_steps_queue: ClassVar[bool] = True
    """Whether a step may be launched before the one before is computed."""

    def __init__(self, needs: Needs) -> None:
        pass

    @classmethod
    def lacks(cls, needs: Needs) -> list[str]:
        """What it cannot do of what is needed, in words; nothing, if it suits."""
        ...

    def step(self, metadata: AttentionMetadata) -> StepAttention: ...


class _KernelStep:
    """By functions with the signatures of `paged_kernels.reference`."""

    def __init__(
        self, metadata: AttentionMetadata, store: Callable[..., None], attend: Callable[..., Tensor], **options: Any
    ) -> None:
        self._metadata, self._store, self._attend, self._options = metadata, store, attend, options

    def store(self, cache: LayerCache, key: Tensor, value: Tensor | None) -> None:
        self._store(key, value, cache.keys, cache.values, self._metadata.slot_mapping, **cache.scales)

    def attend(self, spec: LayerSpec, cache: LayerCache, query: Tensor, sinks: Tensor | None) -> Tensor:
        metadata = self._metadata
        return self._attend(
            query,
            cache.keys,
            cache.values,
            metadata.block_tables,
            metadata.query_start_loc,
            metadata.seq_lens,
            **spec.kernel_options(sinks),
            **cache.scales,
            **self._options,
        )


class CpuAttention(AttentionBackend):
    """Our kernels for CPUs."""

    name: ClassVar[str] = "cpu"

    @classmethod
    def lacks(cls, needs: Needs) -> list[str]:
        lacking = [] if needs.device.type == "cpu" else [f"it computes on CPUs, not on {needs.device}"]
        return lacking + (["float8 caches; use 'int8'"] if needs.cache_dtype in _FLOAT8 else [])

    def step(self, metadata: AttentionMetadata) -> StepAttention:
        return _KernelStep(metadata, paged_kernels.store_kv, paged_kernels.paged_attention)


class TorchAttention(AttentionBackend):
    """The definition, in plain torch: slow, and right on every device."""

    name: ClassVar[str] = "torch"

    @classmethod
    def lacks(cls, needs: Needs) -> list[str]:
        return []

    def step(self, metadata: AttentionMetadata) -> StepAttention:
        return _KernelStep(metadata, reference.store_kv, reference.paged_attention)


class TritonAttention(AttentionBackend):
    """Our kernels for GPUs of NVIDIA and AMD."""

    name: ClassVar[str] = "triton"
    is_capturable: ClassVar[bool] = True
    puts_decodes_first: ClassVar[bool] = True

    def __init__(self, needs: Needs) -> None:
        self._kernels: Any = importlib.import_module("paged_kernels.triton_attention")

    @classmethod
    def lacks(cls, needs: Needs) -> list[str]:
        if importlib.util.find_spec("triton") is None:
            return ["Triton is not installed (pip install 'paged-backend[gpu]')"]
        device: Any = importlib.import_module("paged_kernels.triton_device")
        if needs.device.type != ("cpu" if device.INTERPRETED.value else "cuda"):
            return [f"it computes on GPUs, not on {needs.device}, unless TRITON_INTERPRET=1 was set at the start"]
        configs: Any = importlib.import_module("paged_kernels.triton_configs")
        try:
            architecture = device.current_device().architecture
            configs.check_cache_dtype(architecture, needs.cache_dtype)
            for spec in needs.specs:
                size = max(spec.head_size, spec.value_head_size)
                configs.attention_config(architecture, size, 1, needs.dtype, needs.cache_dtype)
        except (ValueError, RuntimeError) as error:
            return [str(error)]
        return []

    def step(self, metadata: AttentionMetadata) -> StepAttention:
        kernels, shape = self._kernels, metadata.shape
        plan = kernels.AttentionPlan(shape.num_decodes, shape.max_seq_len)
        return _KernelStep(metadata, kernels.store_kv, kernels.paged_attention, plan=plan)


class _LibraryStep:
    """Keys and values are stored by our kernels, into pages that libraries can read."""

    def __init__(self, metadata: AttentionMetadata) -> None:
        self._metadata = metadata

    def store(self, cache: LayerCache, key: Tensor, value: Tensor | None) -> None:
        paged_kernels.store_kv(key, value, cache.keys, cache.values, self._metadata.slot_mapping, **cache.scales)


class FlashAttention(AttentionBackend):
    """flash_attn_varlen_func of the package flash-attn, version 2."""

    name: ClassVar[str] = "flash_attn"

    def __init__(self, needs: Needs) -> None:
        self._function: Any = importlib.import_module("flash_attn").flash_attn_varlen_func

    @classmethod
    def lacks(cls, needs: Needs) -> list[str]:
        lacking = _lacks_as_library(needs, "flash_attn", "flash-attn", most=256, step=8)
        if needs.block_size % _FLASH_ATTN_BLOCK:
            lacking.append(f"it takes block_size={_FLASH_ATTN_BLOCK}, not {needs.block_size}")
        return lacking

    def step(self, metadata: AttentionMetadata) -> StepAttention:
        return _FlashStep(metadata, self._function)


class _FlashStep(_LibraryStep):
    def __init__(self, metadata: AttentionMetadata, function: Callable[..., Tensor]) -> None:
        super().__init__(metadata)
        self._function, self._shape = function, metadata.shape
        starts = metadata.seq_lens.cumsum(0, dtype=torch.int32)
        self._key_starts = torch.nn.functional.pad(starts, (1, 0))
        """[S + 1]: where each sequence's keys would begin in a pack of them."""

    def attend(self, spec: LayerSpec, cache: LayerCache, query: Tensor, sinks: Tensor | None) -> Tensor:
        metadata = self._metadata
        assert cache.values is not None
        return self._function(
            query,
            cache.keys.transpose(1, 2),
            cache.values.transpose(1, 2),
            cu_seqlens_q=metadata.query_start_loc,
            cu_seqlens_k=self._key_starts,
            max_seqlen_q=self._shape.max_query_len,
            max_seqlen_k=self._shape.max_seq_len,
            softmax_scale=spec.scale,
            causal=True,
            window_size=(-1, -1) if spec.window is None else (spec.window - 1, 0),
            softcap=spec.softcap or 0.0,
            block_table=metadata.block_tables,
        )


class FlashInfer(AttentionBackend):
    """BatchPrefillWithPagedKVCacheWrapper of the package flashinfer-python; it plans once per step for all layers that
    have the same window, softcap, scale and sizes.

    A plan goes to the device from host memory of the wrapper, which the next step's plan overwrites.
    """

    name: ClassVar[str] = "flashinfer"
    lets_steps_queue: ClassVar[bool] = False

    def __init__(self, needs: Needs) -> None:
        module: Any = importlib.import_module("flashinfer")
        workspace = torch.empty(_FLASHINFER_WORKSPACE, dtype=torch.uint8, device=needs.device)
        self._make: Callable[[], Any] = functools.partial(module.BatchPrefillWithPagedKVCacheWrapper, workspace, "HND")
        self._wrappers: dict[tuple[Any, ...], Any] = {}
        self._needs = needs

    @classmethod
    def lacks(cls, needs: Needs) -> list[str]:
        lacking = _lacks_as_library(needs, "flashinfer", "flashinfer-python", most=256, step=64)
        return lacking + (["heads of 192 numbers"] if any(spec.head_size == 192 for spec in needs.specs) else [])

    def step(self, metadata: AttentionMetadata) -> StepAttention:
        return _FlashInferStep(metadata, self._wrapper, self._needs)

    def _wrapper(self, options: tuple[Any, ...]) -> Any:
        """Each plan has one of its own, since the next one would overwrite it."""
        if options not in self._wrappers:
            self._wrappers[options] = self._make()
        return self._wrappers[options]


class _FlashInferStep(_LibraryStep):
    def __init__(
        self, metadata: AttentionMetadata, wrapper_for: Callable[[tuple[Any, ...]], Any], needs: Needs
    ) -> None:
        super().__init__(metadata)
        self._wrapper_for, self._needs, self._group = wrapper_for, needs, metadata.group
        host, size = metadata.host, needs.block_size
        nums_blocks = -(-host.seq_lens // size)
        is_held = np.arange(host.block_tables.shape[1]) < nums_blocks[:, None]
        starts = np.concatenate([[0], nums_blocks.cumsum()]).astype(np.int32)
        last_lengths = host.seq_lens - (nums_blocks - 1) * size
        indices = to_device(host.block_tables[is_held], metadata.seq_lens.device)
        on_host = (torch.from_numpy(array) for array in (host.query_start_loc, starts))
        self._batch = (*on_host, indices, torch.from_numpy(last_lengths.astype(np.int32)))
        self._planned: dict[tuple[Any, ...], Any] = {}

    def attend(self, spec: LayerSpec, cache: LayerCache, query: Tensor, sinks: Tensor | None) -> Tensor:
        options = (query.shape[1], spec.num_kv_heads, spec.head_size, spec.scale, spec.window, spec.softcap)
        if options not in self._planned:
            self._planned[options] = self._plan(options)
        out: Tensor = self._planned[options].run(query, (cache.keys, cache.values))
        return out

    def _plan(self, options: tuple[Any, ...]) -> Any:
        num_heads, num_kv_heads, head_size, scale, window, softcap = options
        wrapper = self._wrapper_for((self._group, *options))
        wrapper.plan(
            *self._batch,
            num_heads,
            num_kv_heads,
            head_size,
            self._needs.block_size,
            causal=True,
            sm_scale=scale,
            window_left=-1 if window is None else window - 1,
            logits_soft_cap=softcap,
            q_data_type=self._needs.dtype,
            kv_data_type=self._needs.cache_dtype,
        )
        return wrapper


def _lacks_as_library(needs: Needs, module: str, package: str, *, most: int, step: int) -> list[str]:
    """What all libraries lack."""
    lacking = []
    if importlib.util.find_spec(module) is None:
        lacking.append(f"it is not installed (pip install {package})")
    if needs.device.type != "cuda":
        lacking.append(f"it computes on CUDA devices, not on {needs.device}")
    if needs.dtype not in (torch.bfloat16, torch.float16):
        lacking.append(f"it computes in bfloat16 and float16, not in {needs.dtype}")
    if needs.cache_dtype != needs.dtype:
        lacking.append("a KV cache of another type than the model's")
    sizes = {(spec.head_size, spec.value_head_size) for spec in needs.specs}
    if any(size != value_size or size > most or size % step for size, value_size in sizes):
        lacking.append(f"heads of {', '.join(map(str, sorted(sizes)))} numbers (keys, values)")
    return lacking + needs.of_layers(
        chunked_attention=lambda spec: spec.chunk is not None,
        attention_sinks=lambda spec: spec.has_sinks,
        latents=lambda spec: not spec.has_own_values,
    )


_BACKENDS: tuple[type[AttentionBackend], ...] = (
    CpuAttention,
    TritonAttention,
    FlashInfer,
    FlashAttention,
    TorchAttention,
)
_AUTOMATIC = {"cpu": ("cpu",), "cuda": ("triton", "flashinfer", "flash_attn", "torch")}
"""In this order; devices of other types have the definition only."""


def attention_backend(name: str, needs: Needs) -> AttentionBackend:
    """The one called `name`, or for `auto` the first one that suits; ConfigError if none does, with the reasons."""
    by_name = {backend.name: backend for backend in _BACKENDS}
    names = _AUTOMATIC.get(needs.device.type, ("torch",)) if name == "auto" else (name,)
    reasons: list[str] = []
    for candidate in names:
        lacking = by_name[candidate].lacks(needs)
        if not lacking:
            if reasons:
                logger.warning("attention by %r, since %s", candidate, "; ".join(reasons))
            return by_name[candidate](needs)
        reasons.append(f"{candidate!r} lacks: {', '.join(lacking)}")
    suitable = [other for other, backend in by_name.items() if other not in names and not backend.lacks(needs)]
    way_out = f"use attention_backend={suitable[0]!r}, which suits, or " if suitable else ""
    raise ConfigError(
        f"attention_backend={name!r} cannot serve this model on {needs.device} with "
        f"{str(needs.cache_dtype).removeprefix('torch.')} keys and values: {'; '.join(reasons)}; {way_out}"
        "change what it lacks"
    )
