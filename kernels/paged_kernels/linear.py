"""Matrix products with weights as checkpoints have them, in bfloat16 and row-major, so that they are held only once.

Weights are widened to float32 on the way into the registers and multiplied there: with one or a few rows the time is
that of reading the weights, with many that of float32 arithmetic, which many CPUs do faster than bfloat16's.

An element's sum is taken in an order that depends on its own row and column alone. So a row's result does not change
with the rows beside it nor with the number of threads, to the last bit.
"""

from typing import Any

import functools

import numba
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paged_kernels.cpu import _array, _compile as _compile_fast, _set_num_threads
from paged_kernels.vector import (
    NUM_SUMS,
    add_dots,
    copy_from_float32,
    copy_in_pairs,
    copy_to_float32,
    from_float32,
    to_float32,
    LANES,
    PAIR,
    WIDTH,
)

_STEP = 32  # a multiple of PAIR and LANES
_DEPTH = 1024  # numbers of a row that are multiplied in one go: a block of rows and one of columns fit in the L1 cache
_TILE = 32  # columns that are widened together
_MOST_ROWS = 512  # that are multiplied with a tile
_BLOCK = NUM_SUMS // 4
_EIGHT = NUM_SUMS // 8  # up to so many rows are multiplied with eight columns at a time, others with four
_DIRECT = 2 * _BLOCK
_SERIAL_COST = 100_000
_SERIAL_LOAD = 30_000

_compile = functools.partial(_compile_fast, fast_math=frozenset())
_NO_BIAS = np.empty(0, np.float32)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """See `reference.linear`."""
    if x.stride(1) != 1:
        x = x.contiguous()
    num_rows, depth = x.shape
    stride = x.stride(0)
    out = x.new_empty(num_rows, weight.shape[0])
    flat = x.as_strided(((num_rows - 1) * stride + depth if num_rows else 0,), (1,))
    b = _NO_BIAS if bias is None else bias.float().numpy()
    _linear(_array(flat), stride, _array(weight), b, _array(out), _set_num_threads())
    return out


@functools.partial(_compile, parallel=True)
def _linear(
    x: NDArray[Any],
    stride: int,
    weight: NDArray[Any],
    bias: NDArray[np.float32],
    out: NDArray[Any],
    num_threads: int,
) -> None:
    num_columns, depth = weight.shape
    for first in range(0, len(out), _MOST_ROWS):
        part = out[first : first + _MOST_ROWS]
        num_rows = len(part)
        rows = _aligned(num_rows, -(-depth // _STEP) * _STEP)
        if num_threads == 1 or num_rows * num_columns * depth < _SERIAL_COST:
            _load_rows(x, first * stride, stride, rows, depth, 0, num_rows, weight)
            _multiply(rows, weight, bias, part, 0, num_columns)
        else:
            if num_rows * depth < _SERIAL_LOAD:
                _load_rows(x, first * stride, stride, rows, depth, 0, num_rows, weight)
            else:
                for thread in numba.prange(num_threads):
                    begin, end = num_rows * thread // num_threads, num_rows * (thread + 1) // num_threads
                    _load_rows(x, first * stride, stride, rows, depth, begin, end, weight)
            for thread in numba.prange(num_threads):
                begin, end = _bound(num_columns, thread, num_threads), _bound(num_columns, thread + 1, num_threads)
                _multiply(rows, weight, bias, part, begin, end)


@_compile
def _bound(num_columns: int, thread: int, num_threads: int) -> int:
    """The first column of a thread: a multiple of eight."""
    return min(-(-num_columns // 8) * thread // num_threads * 8, num_columns)


@_compile
def _load_rows(
    x: NDArray[Any], start: int, stride: int, rows: NDArray[np.float32], depth: int, begin: int, end: int, weight: Any
) -> None:
    for row in range(begin, end):
        _load(x, start + row * stride, rows, row, depth, weight)


@_compile
def _load(
    source: NDArray[Any], start: int, rows: NDArray[np.float32], row: int, width: int, weight: NDArray[Any]
) -> None:
    """Copy numbers into a row, padded with zeros, in the order for this weight."""
    target = row * rows.shape[1]
    whole = width // _STEP * _STEP
    if weight.itemsize == 4:
        copy_to_float32(source, start, rows, target, whole)
    else:
        copy_in_pairs(source, start, rows, target, whole)
    if whole < width:
        for i in range(whole, whole + _STEP):
            rows[row, i] = 0
        numbers = source[start : start + width] if source.ndim == 1 else source.ravel()[start : start + width]
        for i in range(whole, width):
            place = i
            if weight.itemsize == 2:
                place = i // PAIR * PAIR + i % PAIR // 2 + i % 2 * WIDTH
            rows[row, place] = to_float32(numbers[i])


@_compile
def _multiply(
    rows: NDArray[np.float32],
    weight: NDArray[Any],
    bias: NDArray[np.float32],
    out: NDArray[Any],
    begin: int,
    end: int,
) -> None:
    """Some columns of the output."""
    num_rows, depth = len(out), weight.shape[1]
    direct = num_rows <= _DIRECT and depth % _STEP == 0
    tile = _aligned(_TILE, min(_DEPTH, rows.shape[1]))
    totals = _aligned(num_rows, _TILE)
    for column in range(begin, end, _TILE):
        num_columns = min(_TILE, end - column)
        for row in range(num_rows):
            for c in range(num_columns):
                totals[row, c] = bias[column + c] if len(bias) else np.float32(0)
        for k in range(0, depth, _DEPTH):
            width = min(_DEPTH, depth - k)
            if direct and num_columns % 8 == 0:
                _add(rows, k, width, weight, column * depth + k, depth, num_columns, totals)
            else:
                for c in range(num_columns):
                    _load(weight, (column + c) * depth + k, tile, c, width, weight)
                padded = -(-width // _STEP) * _STEP
                _add(rows, k, padded, tile, 0, tile.shape[1], -(-num_columns // 8) * 8, totals)
        for row in range(num_rows):
            whole = num_columns // LANES * LANES
            copy_from_float32(totals, row * _TILE, out, row * out.shape[1] + column, whole)
            for c in range(whole, num_columns):
                out[row, column + c] = from_float32(totals[row, c], out)


@_compile
def _add(
    rows: NDArray[np.float32],
    k: int,
    width: int,
    columns: NDArray[Any],
    start: int,
    stride: int,
    num_columns: int,
    totals: NDArray[np.float32],
) -> None:
    num_rows = len(totals)
    num_blocks = -(-num_rows // _BLOCK)
    for block in range(num_blocks):
        first, end = num_rows * block // num_blocks, num_rows * (block + 1) // num_blocks
        x, depth, total = first * rows.shape[1] + k, rows.shape[1], first * _TILE
        count = end - first
        step = 8 if count <= _EIGHT else 4
        for c in range(0, num_columns, step):
            w, t = start + c * stride, total + c
            if count == 1:
                add_dots(rows, x, depth, columns, w, stride, width, totals, t, _TILE, 1, 4 if _EIGHT < 1 else 8)
            elif count == 2:
                add_dots(rows, x, depth, columns, w, stride, width, totals, t, _TILE, 2, 4 if _EIGHT < 2 else 8)
            elif count == 3:
                add_dots(rows, x, depth, columns, w, stride, width, totals, t, _TILE, 3, 4 if _EIGHT < 3 else 8)
            elif count == 4:
                add_dots(rows, x, depth, columns, w, stride, width, totals, t, _TILE, 4, 4)
            elif count == 5:
                add_dots(rows, x, depth, columns, w, stride, width, totals, t, _TILE, 5, 4)
            else:
                add_dots(rows, x, depth, columns, w, stride, width, totals, t, _TILE, 6, 4)


@_compile
def _aligned(num_rows: int, width: int) -> NDArray[np.float32]:
    """Memory that begins at a multiple of 64 bytes: vectors that straddle cache lines load half as fast."""
    memory = np.empty(num_rows * width + 16, np.float32)
    first = (-memory.ctypes.data % 64) // 4
    return memory[first : first + num_rows * width].reshape(num_rows, width)
