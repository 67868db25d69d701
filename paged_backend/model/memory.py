"""How the memory for sequences is shared out between pages and what sequences keep besides, and what steps take."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import torch

from paged_backend.config import EngineConfig
from paged_backend.engine.kv_layout import KVLayout
from paged_backend.errors import ConfigError, PagedBackendError
from paged_backend.model import kv_cache

_STATES_SHARE = 1 / 2
_CPU_ALLOCATOR = "DefaultCPUAllocator"
"""In what torch says where it finds no memory on a CPU, for which it has no error of its own."""


class Room(NamedTuple):
    """For how much there is memory."""

    num_blocks: int
    max_num_seqs: int


class DeviceMeter:
    """What computations take of a CUDA device's memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def peak_of(self, compute: Callable[[], object]) -> int:
        """Bytes that are in use at once while this is computed, and not afterwards."""
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)
        before = torch.cuda.memory_allocated(self._device)
        compute()
        torch.cuda.synchronize(self._device)
        peak = torch.cuda.max_memory_allocated(self._device) - before
        torch.cuda.empty_cache()
        return peak


def meter_of(device: torch.device) -> DeviceMeter | None:
    """None where steps take what is left of a memory of which the cache takes little: on a CPU."""
    return DeviceMeter(device) if device.type == "cuda" else None


def room_for(
    config: EngineConfig,
    layout: KVLayout,
    block_bytes: int,
    state_bytes: int,
    max_model_len: int,
    device: torch.device,
    *,
    step_bytes: int = 0,
) -> Room:
    """As many blocks as fit beside the largest step, which takes `step_bytes`, and can be of use. What sequences keep
    besides pages, `state_bytes` each, takes half of the memory at most: it limits how many may run at once."""
    block_bytes = max(1, block_bytes)  # a model without attention needs blocks only to count by
    if not state_bytes:
        needs = layout, block_bytes, max_model_len, device
        return Room(kv_cache.num_blocks_for(config, *needs, step_bytes=step_bytes), config.max_num_seqs)
    memory = kv_cache.memory_for(config, device, step_bytes)
    num_states = min(int(memory * _STATES_SHARE) // state_bytes, config.max_num_seqs)
    if num_states < 1:
        raise ConfigError(
            f"kv_cache_memory={config.kv_cache_memory!r} gives {memory} bytes, half of them for sequences' states; "
            f"one takes {state_bytes} bytes; raise it"
        )
    rest = dataclasses.replace(config, kv_cache_memory=memory - num_states * state_bytes, max_num_seqs=num_states)
    needs = layout, block_bytes, max_model_len, device
    return Room(kv_cache.num_blocks_for(rest, *needs, step_bytes=step_bytes), num_states)


def is_out_of_memory(error: Exception) -> bool:
    """Whether a computation failed for want of memory."""
    if isinstance(error, PagedBackendError):  # which says what became of it
        return False
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or _CPU_ALLOCATOR in str(error)
