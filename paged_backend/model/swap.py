"""Blocks in host memory, for sequences that had to make room."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from paged_backend.errors import ConfigError
from paged_backend.model.kv_cache import LayerCache, available_memory

_GIB = 2**30
Copy = tuple[int, int]
"""From this block to that one."""


class HostBlocks:
    """As many blocks of all layers as fit into `swap_space` GiB of host memory.

    Copies are made block by block, with no memory in between. On a CUDA device the memory is pinned and the copies run
    on a stream of their own, in the order in which they were asked for: they wait for what was computed before, what is
    computed later waits for them, and the host for neither.
    """

    def __init__(self, kv_cache: Sequence[LayerCache], swap_space: float) -> None:
        tensors = {id(one): one for cache in kv_cache for one in cache if one is not None}  # layers may share theirs
        block_bytes = sum(tensor[0].nbytes for tensor in tensors.values())
        self.num_blocks = _num_blocks(swap_space, block_bytes) if tensors else 0
        self._device = next(iter(tensors.values())).device if tensors else torch.device("cpu")
        is_cuda = self._device.type == "cuda"
        self._pairs = [
            (tensor, torch.empty(self.num_blocks, *tensor.shape[1:], dtype=tensor.dtype, pin_memory=is_cuda))
            for tensor in tensors.values()
        ]
        self._stream = torch.cuda.Stream(self._device) if is_cuda else None  # type: ignore[no-untyped-call]

    def copy_out(self, copies: Sequence[Copy]) -> None:
        """From the device's blocks to the host's."""
        if copies:
            with self._aside():
                for device_blocks, host_blocks in self._pairs:
                    _copy(device_blocks, host_blocks, copies)

    def copy_in(self, copies: Sequence[Copy]) -> None:
        """From the host's blocks to the device's."""
        if copies:
            with self._aside():
                for device_blocks, host_blocks in self._pairs:
                    _copy(host_blocks, device_blocks, copies)

    @contextlib.contextmanager
    def _aside(self) -> Iterator[None]:
        if self._stream is None:
            yield
            return
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            yield
        current.wait_stream(self._stream)


def _num_blocks(swap_space: float, block_bytes: int) -> int:
    wanted, available = int(swap_space * _GIB), available_memory("cpu")
    if wanted > available:
        raise ConfigError(
            f"swap_space={swap_space!r} (GiB) does not fit in the {available / _GIB:.2f} GiB of host memory that are "
            "free; lower it"
        )
    if wanted < block_bytes:
        raise ConfigError(
            f"swap_space={swap_space!r} (GiB) holds no block, which takes {block_bytes} bytes; raise it to at least "
            f"{block_bytes / _GIB:.6f}, or set it to 0"
        )
    return wanted // block_bytes


def _copy(sources: Tensor, targets: Tensor, copies: Sequence[Copy]) -> None:
    """One copy for each run of neighbours."""
    start = 0
    for end in range(1, len(copies) + 1):
        source, target = copies[start]
        if end < len(copies) and copies[end] == (source + end - start, target + end - start):
            continue
        size = end - start
        targets[target : target + size].copy_(sources[source : source + size], non_blocking=True)
        start = end
