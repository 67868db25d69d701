"""Low-rank additions to the outputs of linear layers, each row with the weights of its own adapter.

Rows that share an adapter with many others are multiplied together, by torch. The rest, as in a step where each
sequence computes one token, is one call for all adapters: its time is that of reading their weights.
"""

import functools
from typing import Any

import numba
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paged_kernels import compiled
from paged_kernels.adapters import LowRankAdapters, Piece, RowIndex
from paged_kernels.compiled import SERIAL_PRODUCT, TYPES, array_at, set_num_threads
from paged_kernels.vector import from_float32, to_float32

_compile = compiled.compile_kernel


def add_low_rank(out: Tensor, x: Tensor, adapters: LowRankAdapters, rows: RowIndex) -> None:
    """See `reference.add_low_rank`."""
    for number, of_adapter in rows.of_many:
        for piece in adapters.pieces[number]:
            _add_to_rows(out, x, piece, of_adapter)
    if not len(rows.few):
        return
    assert x.stride(1) == out.stride(1) == 1
    pointers = adapters.pointers
    weight_like = TYPES[adapters.dtype]
    args = (TYPES[x.dtype], weight_like, x.data_ptr(), out.data_ptr(), x.stride(0), out.stride(0), x.shape[1])
    if len(rows.few) == 1 or len(rows.few) * adapters.cost < SERIAL_PRODUCT or set_num_threads() == 1:
        _add_rows(*args, *pointers, rows.few, rows.adapters_of_few)
    else:
        _add_rows_in_threads(*args, *pointers, rows.few, rows.adapters_of_few)


def _add_to_rows(out: Tensor, x: Tensor, piece: Piece, rows: NDArray[np.int64]) -> None:
    first, shrink, expand = piece
    columns = out[:, first : first + expand.shape[1]]
    start, end = int(rows[0]), int(rows[-1]) + 1
    if end - start == len(rows):  # as they are, if they belong to one sequence
        part = columns[start:end]
        part += (x[start:end] @ shrink.T) @ expand
    else:
        chosen = torch.from_numpy(rows)
        columns.index_add_(0, chosen, (x[chosen] @ shrink.T) @ expand)


@functools.partial(_compile, parallel=True)
def _add_rows_in_threads(
    x_like: NDArray[Any],
    weight_like: NDArray[Any],
    x: int,
    out: int,
    x_stride: int,
    out_stride: int,
    depth: int,
    shrinks: NDArray[np.int64],
    expands: NDArray[np.int64],
    ranks: NDArray[np.int64],
    firsts: NDArray[np.int64],
    widths: NDArray[np.int64],
    rows: NDArray[np.int64],
    adapters: NDArray[np.int64],
) -> None:
    for i in numba.prange(len(rows)):
        source = array_at(x, rows[i] * x_stride, depth, x_like)
        tables = (shrinks[adapters[i]], expands[adapters[i]], ranks[adapters[i]], firsts[adapters[i]])
        _add_row(source, weight_like, out, rows[i] * out_stride, *tables, widths[adapters[i]])


@_compile
def _add_rows(
    x_like: NDArray[Any],
    weight_like: NDArray[Any],
    x: int,
    out: int,
    x_stride: int,
    out_stride: int,
    depth: int,
    shrinks: NDArray[np.int64],
    expands: NDArray[np.int64],
    ranks: NDArray[np.int64],
    firsts: NDArray[np.int64],
    widths: NDArray[np.int64],
    rows: NDArray[np.int64],
    adapters: NDArray[np.int64],
) -> None:
    for i in range(len(rows)):
        source = array_at(x, rows[i] * x_stride, depth, x_like)
        tables = (shrinks[adapters[i]], expands[adapters[i]], ranks[adapters[i]], firsts[adapters[i]])
        _add_row(source, weight_like, out, rows[i] * out_stride, *tables, widths[adapters[i]])


@_compile
def _add_row(
    x: NDArray[Any],
    weight_like: NDArray[Any],
    out: int,
    out_start: int,
    shrinks: NDArray[np.int64],
    expands: NDArray[np.int64],
    ranks: NDArray[np.int64],
    firsts: NDArray[np.int64],
    widths: NDArray[np.int64],
) -> None:
    """One row, with the pieces of its adapter."""
    depth = len(x)
    wide = np.empty(depth, np.float32)
    for k in range(depth):
        wide[k] = to_float32(x[k])
    for piece in range(len(ranks)):
        rank, width = ranks[piece], widths[piece]
        sums = np.zeros(width, np.float32)
        for r in range(rank):
            shrink = array_at(shrinks[piece], r * depth, depth, weight_like)
            expand = array_at(expands[piece], r * width, width, weight_like)
            low = np.float32(0)
            for k in range(depth):
                low += wide[k] * to_float32(shrink[k])
            for c in range(width):
                sums[c] += low * to_float32(expand[c])
        target = array_at(out, out_start + firsts[piece], width, x)
        for c in range(width):
            target[c] = from_float32(to_float32(target[c]) + sums[c], target)
