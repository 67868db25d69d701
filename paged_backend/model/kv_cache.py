"""The tensors that hold keys and values, and how many blocks of them fit."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from typing import Protocol

import psutil
import torch
from torch import Tensor

from paged_backend.config import EngineConfig
from paged_backend.errors import ConfigError

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
    def source(self) -> int | None:
        """Another layer, whose keys and values are this one's too."""

    @property
    def is_stored(self) -> bool:
        """Whether it has its own."""


def block_bytes(specs: Sequence[KVShape], block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block over all layers."""
    stored = (spec for spec in specs if spec.is_stored)
    num_values = sum(spec.num_kv_heads * (spec.head_size + spec.value_head_size) for spec in stored)
    return num_values * block_size * dtype.itemsize


def num_blocks_for(config: EngineConfig, bytes_per_block: int, max_model_len: int, device: torch.device) -> int:
    """How many blocks the cache gets: what the memory holds, but no more than the largest batch can use.

    Raises ConfigError, with the numbers, if the machine lacks the memory asked for, or if it holds no sequence.
    """
    blocks_per_sequence = -(-max_model_len // config.block_size)
    num_useful = blocks_per_sequence * config.max_num_seqs
    available = available_memory(device)
    if config.num_gpu_blocks_override is not None:
        num_blocks = config.num_gpu_blocks_override
    else:
        num_blocks = min(memory_for(config, device) // bytes_per_block, num_useful)
    needed = num_blocks * bytes_per_block
    if needed > available:
        raise ConfigError(
            f"kv_cache_memory={config.kv_cache_memory!r}: a KV cache of {needed / _GIB:.2f} GiB ({num_blocks} blocks) "
            f"does not fit in the {available / _GIB:.2f} GiB that are free on {device}; lower it"
        )
    if num_blocks < 2:
        raise ConfigError(
            f"kv_cache_memory={config.kv_cache_memory!r} holds {num_blocks} blocks of {config.block_size} tokens "
            f"({bytes_per_block} bytes each); it must hold at least 2, which take {2 * bytes_per_block} bytes"
        )
    return num_blocks


def allocate(
    specs: Sequence[KVShape], num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
) -> list[tuple[Tensor, Tensor]]:
    """Keys [blocks, K, block_size, D] and values [blocks, K, block_size, Dv] of each layer, not initialised; those of a
    layer that shares another one's are the same tensors."""

    def tensor(spec: KVShape, head_size: int) -> Tensor:
        return torch.empty(num_blocks, spec.num_kv_heads, block_size, head_size, dtype=dtype, device=device)

    layers: list[tuple[Tensor, Tensor]] = []
    for spec in specs:
        if spec.source is None:
            layers.append((tensor(spec, spec.head_size), tensor(spec, spec.value_head_size)))
        else:
            layers.append(layers[spec.source])
    return layers


def available_memory(device: torch.device | str = "auto") -> int:
    """Free bytes on the device; on a CPU, within the limit of the container if there is one."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(device)
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
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


def memory_for(config: EngineConfig, device: torch.device) -> int:
    """Bytes that the cache may take: those asked for, or a share of what is free."""
    if config.kv_cache_memory is not None:
        assert isinstance(config.kv_cache_memory, int)
        return config.kv_cache_memory
    share = int(available_memory(device) * config.gpu_memory_utilization)
    return share if device.type == "cuda" else min(int(share * _CPU_SHARE), _CPU_MOST)
