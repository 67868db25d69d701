"""The tensors that hold keys and values, and how many blocks of them fit."""

from __future__ import annotations

import pathlib
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import psutil
import torch
from torch import Tensor

from paged_backend.config import EngineConfig
from paged_backend.engine.kv_layout import KVLayout
from paged_backend.errors import ConfigError
from paged_backend.model.huge_pages import ask_for_huge_pages

_SCALE = torch.bfloat16
_SCALED = (torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)
"""The types whose numbers have a scale per token and head."""
_STORAGE = {
    "int8": torch.int8,
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}
_CPU_SHARE = 1 / 3
_CPU_MOST = 4 * 2**30
_GIB = 2**30
_CGROUPS = pathlib.Path("/sys/fs/cgroup")


class KVShape(Protocol):
    """What a layer keeps per token."""

    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_size(self) -> int: ...
    @property
    def value_head_size(self) -> int: ...
    @property
    def has_own_values(self) -> bool:
        """Whether values are numbers of their own, and not the first `value_head_size` of their keys'."""

    @property
    def source(self) -> int | None:
        """Another layer, whose keys and values are this one's too."""

    @property
    def is_stored(self) -> bool:
        """Whether it has its own."""


class LayerCache(NamedTuple):
    """Keys [blocks, K, block_size, D] and values [blocks, K, block_size, Dv] of a layer, and what they are multiples
    of, [blocks, K, block_size] each, if they have 8 bits. No values if they are the first numbers of their keys."""

    keys: Tensor
    values: Tensor | None
    key_scales: Tensor | None
    value_scales: Tensor | None

    @property
    def scales(self) -> dict[str, Any]:
        """As the kernels take them."""
        return {"k_scales": self.key_scales, "v_scales": self.value_scales}

    def copy_blocks(self, sources: Tensor, targets: Tensor) -> None:
        """All sources are read before a target is written, since a target may be another copy's source."""
        for tensor in self:
            if tensor is not None:
                same = tensor.view(torch.uint8) if tensor.itemsize == 1 else tensor  # float8 has few operations
                same[targets] = same[sources]


def storage_dtype(config: EngineConfig, dtype: torch.dtype) -> torch.dtype:
    """What keys and values of a model that computes in `dtype` are stored as."""
    return dtype if config.kv_cache_dtype == "auto" else _STORAGE[config.kv_cache_dtype]


def token_bytes(specs: Iterable[KVShape], dtype: torch.dtype) -> int:
    """What these layers keep of one token."""
    of_head = _SCALE.itemsize if dtype in _SCALED else 0
    num_bytes = 0
    for spec in specs:
        if spec.is_stored:
            sizes = [spec.head_size, *([spec.value_head_size] if spec.has_own_values else [])]
            num_bytes += spec.num_kv_heads * sum(size * dtype.itemsize + of_head for size in sizes)
    return num_bytes


def num_blocks_for(
    config: EngineConfig,
    layout: KVLayout,
    bytes_per_block: int,
    max_model_len: int,
    device: torch.device,
    *,
    step_bytes: int = 0,
) -> int:
    """How many blocks the cache gets: what the memory holds beside the largest step, which takes `step_bytes`, but no
    more than the largest batch can use.

    Raises ConfigError, with the numbers, if the machine lacks the memory asked for, or if it holds no sequence.
    """
    num_useful = layout.num_blocks_for(max_model_len) * config.max_num_seqs
    available = available_memory(device)
    if config.num_gpu_blocks_override is not None:
        num_blocks = config.num_gpu_blocks_override
    else:
        num_blocks = min(memory_for(config, device, step_bytes) // bytes_per_block, num_useful)
    num_caches = config.tensor_parallel_size if device.type == "cpu" else 1  # in the memory of this device
    needed = num_blocks * bytes_per_block * num_caches
    beside, way_out = "", ""
    if step_bytes:
        beside = f" beside the {step_bytes / _GIB:.2f} GiB that a step of {config.max_num_batched_tokens} tokens takes"
        way_out = ", or max_num_batched_tokens or max_num_seqs"
    if needed + step_bytes > available:
        raise ConfigError(
            f"kv_cache_memory={config.kv_cache_memory!r}: a KV cache of {needed / _GIB:.2f} GiB ({num_blocks} blocks) "
            f"does not fit in the {available / _GIB:.2f} GiB that are free on {device}{beside}; lower it{way_out}"
        )
    num_groups = len(layout.reaches)
    num_least = 2 * num_groups
    if num_blocks < num_least:
        asked = "kv_cache_memory" if config.num_gpu_blocks_override is None else "num_gpu_blocks_override"
        raise ConfigError(
            f"{asked}={getattr(config, asked)!r} holds {num_blocks} blocks of {config.block_size} tokens "
            f"({bytes_per_block} bytes each){beside}; it must hold at least {num_least}"
            + (f", 2 for each of {num_groups} groups of layers" if num_groups > 1 else "")
            + f", which take {num_least * bytes_per_block} bytes"
        )
    return num_blocks


def allocate(
    specs: Sequence[KVShape],
    num_blocks: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
    places: Sequence[int] | None = None,
) -> list[LayerCache]:
    """The cache of each layer, not initialised. That of a layer that shares another one's is the same, and so are those
    of layers with the same place, if places are given."""

    def pages(num_heads: int, size: int) -> tuple[Tensor, Tensor | None]:
        slots = (num_blocks, num_heads, block_size)
        scales = torch.empty(slots, dtype=_SCALE, device=device) if dtype in _SCALED else None
        tensor = torch.empty(*slots, size, dtype=dtype, device=device)
        ask_for_huge_pages(tensor)
        return tensor, scales

    def cache(spec: KVShape) -> LayerCache:
        keys, key_scales = pages(spec.num_kv_heads, spec.head_size)
        if not spec.has_own_values:
            return LayerCache(keys, None, key_scales, None)
        values, value_scales = pages(spec.num_kv_heads, spec.value_head_size)
        return LayerCache(keys, values, key_scales, value_scales)

    if places is None:
        places = [index if spec.source is None else spec.source for index, spec in enumerate(specs)]
    caches: dict[int, LayerCache] = {}
    for spec, place in zip(specs, places, strict=True):
        if place not in caches:
            caches[place] = cache(spec)
    return [caches[place] for place in places]


def available_memory(device: torch.device | str = "auto") -> int:
    """Free bytes on the device; on a CPU, within the limit of the container if there is one."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(device)
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    if device.type == "mps":
        return int(torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory())
    return min(int(psutil.virtual_memory().available), *_cgroup_memory())


def _cgroup_memory() -> list[int]:
    """What the container's limit leaves, in either version of cgroups; file caches that can go count as free."""
    left = []
    for limit_file, used_file, inactive in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file"),
    ):
        try:
            limit, used = (int((_CGROUPS / name).read_text()) for name in (limit_file, used_file))
            lines = (_CGROUPS / limit_file).with_name("memory.stat").read_text().splitlines()
            stat = dict(line.split() for line in lines)
        except (OSError, ValueError):  # not Linux, not this version, or no limit ("max")
            continue
        left.append(limit - used + int(stat.get(inactive, 0)))
    return left


def memory_for(config: EngineConfig, device: torch.device, step_bytes: int = 0) -> int:
    """Bytes that the cache may take: those asked for, or a share of what is free, less what the largest step takes."""
    if config.kv_cache_memory is not None:
        assert isinstance(config.kv_cache_memory, int)
        return config.kv_cache_memory
    share = max(0, int(available_memory(device) * config.gpu_memory_utilization) - step_bytes)
    return share if device.type == "cuda" else min(int(share * _CPU_SHARE), _CPU_MOST) // config.tensor_parallel_size
