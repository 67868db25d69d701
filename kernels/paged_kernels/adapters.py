"""The low-rank weights of several adapters for one layer, and which rows are whose: made once, used in many calls."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paged_kernels.transfers import to_device

_MANY_ROWS = 16
"""Of one adapter: on a CPU, two products by torch are faster than going row by row."""


class Piece(NamedTuple):
    """What an adapter adds to some columns of a layer's output."""

    first: int
    """The first of these columns."""
    shrink: Tensor
    """[R, K]"""
    expand: Tensor
    """[R, N] for N columns."""


class Pointers(NamedTuple):
    """Pieces as the CPU's kernel reads them. Each array is [adapters, most pieces]; an adapter with fewer has pieces
    of rank 0."""

    shrinks: NDArray[np.int64]
    """Addresses."""
    expands: NDArray[np.int64]
    ranks: NDArray[np.int64]
    firsts: NDArray[np.int64]
    widths: NDArray[np.int64]


class Extent(NamedTuple):
    """What all pieces of a layer have room in."""

    num_pieces: int
    """Of one adapter."""
    rank: int
    width: int
    is_aligned: bool
    """Whether all begin, and end, at multiples of 16 columns."""


class LowRankAdapters:
    """The pieces of each adapter for one layer; an adapter that does not change it has none."""

    def __init__(self, pieces: Sequence[Sequence[Piece]]) -> None:
        self.pieces = pieces
        self.is_empty = not any(pieces)

    @functools.cached_property
    def pointers(self) -> Pointers:
        shape = (5, len(self.pieces), self._most_pieces)
        table = np.zeros(shape, np.int64)
        for row, of_adapter in enumerate(self.pieces):
            for column, (first, shrink, expand) in enumerate(of_adapter):
                assert shrink.is_contiguous() and expand.is_contiguous()
                sizes = (shrink.shape[0], first, expand.shape[1])
                table[:, row, column] = (shrink.data_ptr(), expand.data_ptr(), *sizes)
        shrinks, expands, ranks, firsts, widths = table
        return Pointers(shrinks, expands, ranks, firsts, widths)

    @functools.cached_property
    def table(self) -> Tensor:
        """The pointers as the GPUs' kernel reads them, where the weights are: [5, adapters, most pieces]."""
        return to_device(np.stack(self.pointers), self._some_weight.device)

    @functools.cached_property
    def extent(self) -> Extent:
        pointers = self.pointers
        is_aligned = not ((pointers.firsts | pointers.widths) % 16).any()
        return Extent(pointers.ranks.shape[1], int(pointers.ranks.max()), int(pointers.widths.max()), is_aligned)

    @functools.cached_property
    def dtype(self) -> torch.dtype:
        """Of all weights."""
        return self._some_weight.dtype

    @property
    def _most_pieces(self) -> int:
        """Of one adapter."""
        return max(map(len, self.pieces))

    @functools.cached_property
    def _some_weight(self) -> Tensor:
        return next(pieces[0].shrink for pieces in self.pieces if pieces)

    @functools.cached_property
    def cost(self) -> int:
        """Most weights that a row is multiplied with."""
        return max(sum(one.shrink.numel() + one.expand.numel() for one in pieces) for pieces in self.pieces)


class ExchangeableAdapters(LowRankAdapters):
    """Adapters that others may take the place of, in the same memory: what was launched may then be launched again."""

    def __init__(self, num_adapters: int, room: Extent, dtype: torch.dtype, device: torch.device) -> None:
        """None of them has a piece yet; those to come have `room`."""
        super().__init__([()] * num_adapters)
        self.is_empty = False
        self.extent, self.dtype = room, dtype
        self.table = torch.zeros(5, num_adapters, room.num_pieces, dtype=torch.int64, device=device)

    def exchange(self, pieces: Sequence[Sequence[Piece]]) -> None:
        """From now on the adapters have these pieces."""
        self.pieces = pieces
        for name in ("pointers", "cost"):
            self.__dict__.pop(name, None)
        self.table.copy_(to_device(np.stack(self.pointers), self.table.device))

    @property
    def _most_pieces(self) -> int:
        return self.extent.num_pieces


class RowIndex:
    """Which adapter each row has, by its place among the adapters; -1 for none."""

    def __init__(
        self, index: NDArray[np.int32], num_adapters: int, memory: dict[tuple[torch.device, int], Tensor] | None = None
    ) -> None:
        """index [M]. The tiles are put into `memory`, if it is given, which gets what is missing there."""
        self.index = index
        self._num_adapters = num_adapters
        counts = np.bincount(index + 1, minlength=num_adapters + 1)[1:]
        many = map(int, np.flatnonzero(counts > _MANY_ROWS))
        self.of_many = [(number, np.flatnonzero(index == number)) for number in many]
        """The adapters with many rows, and the rows of each."""
        has_few = np.append((counts > 0) & (counts <= _MANY_ROWS), False)  # the last one is that of rows with none
        self.few = np.flatnonzero(has_few[index])
        """The rows of all others."""
        self.adapters_of_few = index[self.few].astype(np.int64)

        self._tiles = {} if memory is None else memory
        for (device, num_rows), tiles in self._tiles.items():
            tiles.copy_(to_device(self._make_tiles(num_rows), device))

    def __len__(self) -> int:
        return len(self.index)

    def tiles(self, num_rows: int, device: torch.device) -> Tensor:
        """Up to so many rows of one adapter in each tile: [tiles, 1 + num_rows] int32, the adapter and the rows; -1
        for none. How many tiles there are depends on the numbers of rows and adapters only."""
        if (device, num_rows) not in self._tiles:
            self._tiles[device, num_rows] = to_device(self._make_tiles(num_rows), device)
        return self._tiles[device, num_rows]

    def _make_tiles(self, num_rows: int) -> NDArray[np.int32]:
        tiles = np.full((len(self) // num_rows + self._num_adapters, 1 + num_rows), -1, np.int32)
        next_tile = 0
        for number in range(self._num_adapters):
            chosen = np.flatnonzero(self.index == number)
            for start in range(0, len(chosen), num_rows):
                part = chosen[start : start + num_rows]
                tiles[next_tile, 0], tiles[next_tile, 1 : 1 + len(part)] = number, part
                next_tile += 1
        return tiles
