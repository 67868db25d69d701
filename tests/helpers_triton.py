"""A check of every memory access of interpreted Triton kernels."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from triton.runtime import interpreter

Program = tuple[int, int, int]
_MOST_PROGRAMS = 2**20  # in one dimension of a grid


class WatchedLaunch:
    """One launch of a kernel: its grid, and the bytes that all its programs read and wrote, per argument."""

    def __init__(
        self, kernel: str, grid: tuple[int, ...], arguments: dict[str, Any], others: tuple[Tensor, ...]
    ) -> None:
        self.kernel, self.grid = kernel, grid
        self.bytes_read: Counter[str] = Counter()
        self.bytes_written: Counter[str] = Counter()
        self.num_loads = 0
        """Of all programs, whether anything came of them or not."""
        tensors = {name: value for name, value in arguments.items() if isinstance(value, Tensor)}
        tensors |= {f"other {number}": tensor for number, tensor in enumerate(others)}
        self._names = list(tensors)
        self._bounds = np.array([_extent(tensor) for tensor in tensors.values()], np.uint64).reshape(-1, 2)
        self._read: list[tuple[Program, NDArray[np.uint64]]] = []
        self._written: list[tuple[Program, NDArray[np.uint64]]] = []

    def note(self, program: Program, pointers: Any, mask: Any, *, is_store: bool) -> None:
        """AssertionError if an address is outside of every argument."""
        shape = np.broadcast_shapes(pointers.data.shape, mask.data.shape)
        addresses = np.broadcast_to(pointers.data, shape)[np.broadcast_to(mask.data, shape)].astype(np.uint64)
        width = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        begins, ends = self._bounds[:, 0], self._bounds[:, 1]
        is_inside = (addresses[:, None] >= begins) & (addresses[:, None] + np.uint64(width) <= ends)
        num_stray = int((~is_inside.any(1)).sum())
        verb = "stores" if is_store else "loads"
        assert not num_stray, f"{self.kernel}, program {program}: {verb} {num_stray} numbers outside of its arguments"
        counts = self.bytes_written if is_store else self.bytes_read
        self.num_loads += not is_store
        for name, is_here in zip(self._names, is_inside.T, strict=True):
            counts[name] += int(is_here.sum()) * width
        (self._written if is_store else self._read).append((program, addresses))

    def assert_no_race(self) -> None:
        """No address that a program writes is read or written by another one."""
        writers, written = self._by_program(self._written)
        readers, read = self._by_program(self._read)
        addresses, first = np.unique(written, return_index=True)
        self._assert_same(writers, writers[first][np.searchsorted(addresses, written)], "write the same address")
        is_written = np.isin(read, addresses)
        writers_of_read = writers[first][np.searchsorted(addresses, read[is_written])]
        self._assert_same(readers[is_written], writers_of_read, "read and write the same address")

    def _by_program(
        self, accesses: list[tuple[Program, NDArray[np.uint64]]]
    ) -> tuple[NDArray[np.int64], NDArray[np.uint64]]:
        """The program of each access, as a number, and its address."""
        if not accesses:
            return np.empty(0, np.int64), np.empty(0, np.uint64)
        programs, addresses = zip(*accesses, strict=True)
        x, y, z = np.array(programs).T
        numbers = (x * _MOST_PROGRAMS + y) * _MOST_PROGRAMS + z
        return np.repeat(numbers, [len(some) for some in addresses]), np.concatenate(addresses)

    def _assert_same(self, programs: NDArray[np.int64], others: NDArray[np.int64], verb: str) -> None:
        for at in np.flatnonzero(programs != others)[:1]:
            pair = [(n // _MOST_PROGRAMS**2, n // _MOST_PROGRAMS % _MOST_PROGRAMS, n % _MOST_PROGRAMS)
                    for n in (int(others[at]), int(programs[at]))]  # fmt: skip
            raise AssertionError(f"{self.kernel}: programs {pair[0]} and {pair[1]} {verb}")


def _extent(tensor: Tensor) -> tuple[int, int]:
    """The addresses of its first byte and of the one after its last."""
    if tensor.numel() == 0:
        return 0, 0
    length = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + length * tensor.element_size()


@contextlib.contextmanager
def watched_memory(*others: Tensor) -> Iterator[list[WatchedLaunch]]:
    """The launches inside this block. AssertionError, or Triton's error with its text, for an access that is wrong.

    Kernels may access the `others`, too, whose addresses they find in memory.
    """
    launches: list[WatchedLaunch] = []
    builder = interpreter.interpreter_builder
    run, load, store = (
        interpreter.GridExecutor.__call__, type(builder).create_masked_load, type(builder).create_masked_store
    )  # fmt: skip

    def watched_run(self: Any, *args: Any, **kwargs: Any) -> None:
        arguments = {**dict(zip(self.arg_names, args, strict=False)), **kwargs}
        launches.append(WatchedLaunch(self.fn.__name__, self.grid, arguments, others))
        run(self, *args, **kwargs)
        launches[-1].assert_no_race()

    def watched_load(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        launches[-1].note(self.grid_idx, pointers, mask, is_store=False)
        return load(self, pointers, mask, *rest)

    def watched_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        launches[-1].note(self.grid_idx, pointers, mask, is_store=True)
        return store(self, pointers, value, mask, *rest)

    interpreter.GridExecutor.__call__ = watched_run
    type(builder).create_masked_load, type(builder).create_masked_store = watched_load, watched_store
    try:
        yield launches
    finally:
        interpreter.GridExecutor.__call__ = run
        type(builder).create_masked_load, type(builder).create_masked_store = load, store


def poisoned_empty(monkeypatch: Any) -> None:
    """What kernels allocate is full of NaN, so that what they never wrote shows."""
    new_empty = Tensor.new_empty

    def poisoned(self: Tensor, *size: Any, **options: Any) -> Tensor:
        tensor = new_empty(self, *size, **options)
        return tensor.fill_(torch.nan) if tensor.is_floating_point() else tensor

    monkeypatch.setattr(Tensor, "new_empty", poisoned)
