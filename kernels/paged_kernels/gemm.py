"""Matrix products with weights as checkpoints have them: bfloat16 in rows, so that they are held only once.

Weights are widened to float32 on the way into the registers and multiplied there. With a few rows the time is that of
reading the weights; with many it is that of float32 arithmetic, which many CPUs do faster than bfloat16's. A tile of
columns is widened first if there are many rows, or if the depth is not a multiple of the registers' size.

An element's sum is taken in an order that its depth alone decides. So a row's result does not change with the rows
beside it nor with the number of threads, to the last bit.
"""

import functools
from typing import Any, TypeAlias

import numba
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paged_kernels import compiled
from paged_kernels.compiled import SERIAL_PRODUCT, TYPES, array_at, set_num_threads
from paged_kernels.native import address_of, call
from paged_kernels.vector import (
    BFLOAT16_IS_FAST,
    LANES,
    NUM_SUMS,
    add_dots,
    copy_from_float32,
    copy_in_pairs,
    from_float32,
)

_STEP = 32  # a multiple of PAIR
_DEPTH = 1024  # how deep to multiply in one go: a block of rows and one of columns fit in the L1 cache
_TILE = 32  # columns that are widened together
_TILE_OF_PAIRS = 16  # columns of bfloat16 that fit in the L1 cache beside some rows
_MOST_ROWS = 512  # that are multiplied with a tile
_MOST_ROWS_IN_PLACE = 64  # above, it is faster by 5 % to widen a tile of columns first
_ROWS_OF_THREAD = 48  # from so many on, threads share the rows and each widens all the weights

_BLOCK = NUM_SUMS // 4  # the most rows that are multiplied at once, with four columns
_BLOCK_OF_EIGHT = NUM_SUMS // 8  # or with eight
_WIDTH_OF_2 = 8 if _BLOCK_OF_EIGHT >= 2 else 4
_WIDTH_OF_3 = 8 if _BLOCK_OF_EIGHT >= 3 else 4

Matrix: TypeAlias = tuple[int, int, int, int, tuple[int, int], None]  # addresses as in packed.py; columns, depth
Types: TypeAlias = tuple[NDArray[Any], NDArray[Any], NDArray[Any]]

# Nothing may be reordered.
_compile = functools.partial(compiled.compile_kernel, fast_math=frozenset())


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """See `reference.linear`."""
    (num_rows, depth), num_columns = x.shape, weight.shape[0]
    assert weight.shape[1] == depth and weight.is_contiguous()
    if x.stride(1) != 1:
        x = x.contiguous()
    if bias is not None:
        bias = bias.float().contiguous()
    out = x.new_empty(num_rows, num_columns)
    num_threads = 1 if num_rows * num_columns * depth < SERIAL_PRODUCT else set_num_threads()
    types, matrix = types_of(x, weight), matrix_of(weight, bias)
    multiply(part_kernel(types), types, x.data_ptr(), x.stride(0), matrix, out.data_ptr(), num_rows, num_threads)
    return out


def matrix_of(weight: Tensor, bias: Tensor | None) -> Matrix:
    """As `packed.matrix_of` has it; there are no scales and no factors, and nothing is rounded."""
    num_columns, depth = weight.shape
    return weight.data_ptr(), 0, 0, 0 if bias is None else bias.data_ptr(), (num_columns, depth), None


def part_kernel(types: Types) -> int:
    """The address of the kernel that `multiply` has the threads run, for these types."""
    return _part_kernel(*(like.dtype for like in types))


@functools.cache
def _part_kernel(*dtypes: np.dtype[Any]) -> int:
    return address_of(_multiply, *(np.empty(0, dtype) for dtype in dtypes), *[0] * 11)


def types_of(x: Tensor, weight: Tensor) -> Types:
    """Of inputs, weights, and inputs that have been widened."""
    in_pairs = BFLOAT16_IS_FAST and x.dtype == weight.dtype == torch.bfloat16
    return TYPES[x.dtype], TYPES[weight.dtype], TYPES[torch.bfloat16 if in_pairs else torch.float32]


@functools.partial(_compile, parallel=True)
def multiply(
    part: int, types: Types, x: int, stride: int, matrix: Matrix, out: int, num_rows: int, num_threads: int
) -> None:
    """Rows that are `stride` numbers apart times a matrix. Each thread takes some of the columns, in eights, or of the
    rows if there are many."""
    x_like, weight_like, row_like = types
    weight, _, _, bias, (num_columns, depth), _ = matrix
    num_eights = -(-num_columns // 8)
    for thread in numba.prange(num_threads):
        row, end_row, column, end_column = 0, num_rows, 0, num_columns
        if num_rows < num_threads * _ROWS_OF_THREAD:
            column = num_eights * thread // num_threads * 8
            end_column = min(num_eights * (thread + 1) // num_threads * 8, num_columns)
        else:
            row, end_row = num_rows * thread // num_threads, num_rows * (thread + 1) // num_threads
        args = (x_like, weight_like, row_like, x, weight, bias, out, stride, num_columns, depth)
        call(part, (*args, row, end_row, column, end_column))


@_compile
def _multiply(
    x_like: NDArray[Any],
    weight_like: NDArray[Any],
    row_like: NDArray[Any],
    x: int,
    weight: int,
    bias: int,
    out: int,
    stride: int,
    num_columns: int,
    depth: int,
    row: int,
    end_row: int,
    column: int,
    end_column: int,
) -> None:
    """The output's rows and columns within these bounds."""
    weights = array_at(weight, 0, num_columns * depth, weight_like)
    for first in range(row, end_row, _MOST_ROWS):
        num_rows = min(_MOST_ROWS, end_row - first)
        rows = _aligned(num_rows, _padded(depth), row_like)
        for r in range(num_rows):
            _widen(array_at(x, (first + r) * stride, depth, x_like), 0, depth, rows[r])
        target = array_at(out, first * num_columns, num_rows * num_columns, x_like)
        _multiply_rows(rows, weights, bias, target, num_columns, depth, column, end_column)


@_compile
def _multiply_rows(
    rows: NDArray[Any],
    weights: NDArray[Any],
    bias: int,
    out: NDArray[Any],
    num_columns: int,
    depth: int,
    column: int,
    end_column: int,
) -> None:
    num_rows = len(rows)
    is_narrow = weights.itemsize == 2 and (num_rows <= _MOST_ROWS_IN_PLACE or rows.itemsize == 2)
    reads_in_place = is_narrow and depth % _STEP == 0
    tile = _aligned(_TILE, min(_DEPTH, rows.shape[1]), rows)
    totals = _aligned(num_rows, _TILE, np.empty(0, np.float32))
    tile_width = _TILE_OF_PAIRS if rows.itemsize == 2 else _TILE
    for first in range(column, end_column, tile_width):
        width = min(tile_width, end_column - first)
        _reset(totals, bias, first, width)
        for k in range(0, depth, _DEPTH):
            length = min(_DEPTH, depth - k)
            if reads_in_place and width % 8 == 0:
                _add_products(rows, k, weights, first * depth + k, depth, length, width, totals)
            else:
                for c in range(width):
                    _widen(weights, (first + c) * depth + k, length, tile[c])
                _add_products(rows, k, tile.reshape(-1), 0, tile.shape[1], _padded(length), width, totals)
        _round(totals, width, out, first, num_columns)


@_compile
def _widen(source: NDArray[Any], start: int, length: int, row: NDArray[Any]) -> None:
    """Copy numbers into a row in pairs, padded with zeros."""
    whole = length // _STEP * _STEP
    copy_in_pairs(source, start, row, 0, whole)
    if whole < length:
        rest = np.zeros(_STEP, source.dtype)
        for i in range(length - whole):
            rest[i] = source[start + whole + i]
        copy_in_pairs(rest, 0, row, whole, _STEP)


@_compile
def _reset(totals: NDArray[np.float32], bias: int, first: int, width: int) -> None:
    """Begin the sums, with the bias if there is one."""
    totals[:] = 0
    if bias != 0:
        numbers = array_at(bias, first, width, totals)
        for row in range(len(totals)):
            for c in range(width):
                totals[row, c] = numbers[c]


@_compile
def _add_products(
    rows: NDArray[Any],
    k: int,
    columns: NDArray[Any],
    start: int,
    stride: int,
    length: int,
    width: int,
    totals: NDArray[np.float32],
) -> None:
    """Multiply as many rows at once as there are registers for, all blocks about as high."""
    num_rows, depth = rows.shape
    num_blocks = -(-num_rows // _BLOCK)
    for block in range(num_blocks):
        first, end = num_rows * block // num_blocks, num_rows * (block + 1) // num_blocks
        x, height = first * depth + k, end - first
        at_once = 8 if height <= _BLOCK_OF_EIGHT else 4
        for c in range(0, width, at_once):
            w, t = start + c * stride, first * _TILE + c
            # The next columns: the processor does not foresee them, and memory is 1.3 to 1.8 times as fast for it.
            ahead = at_once * stride
            if rows.itemsize == 2 and num_blocks > 1:  # each block of rows has some of the next tile fetched
                ahead = width * stride if block == c * num_blocks // width else 0
            if height == 1:
                add_dots(rows, x, depth, columns, w, stride, length, totals, t, _TILE, ahead, 1, 8)
            elif height == 2:
                add_dots(rows, x, depth, columns, w, stride, length, totals, t, _TILE, ahead, 2, _WIDTH_OF_2)
            elif height == 3:
                add_dots(rows, x, depth, columns, w, stride, length, totals, t, _TILE, ahead, 3, _WIDTH_OF_3)
            elif height == 4:
                add_dots(rows, x, depth, columns, w, stride, length, totals, t, _TILE, ahead, 4, 4)
            elif height == 5:
                add_dots(rows, x, depth, columns, w, stride, length, totals, t, _TILE, ahead, 5, 4)
            else:
                add_dots(rows, x, depth, columns, w, stride, length, totals, t, _TILE, ahead, 6, 4)


@_compile
def _round(totals: NDArray[np.float32], width: int, out: NDArray[Any], first: int, num_columns: int) -> None:
    whole = width // LANES * LANES
    for row in range(len(totals)):
        target = row * num_columns + first
        copy_from_float32(totals, row * _TILE, out, target, whole)
        for c in range(whole, width):
            out[target + c] = from_float32(totals[row, c], out)


@_compile
def _padded(length: int) -> int:
    return -(-length // _STEP) * _STEP


@_compile
def _aligned(num_rows: int, width: int, like: NDArray[Any]) -> NDArray[Any]:
    """Memory that begins at a multiple of 64 bytes: vectors that straddle cache lines load half as fast."""
    memory = np.empty(num_rows * width + 64 // like.itemsize, like.dtype)
    first = (-memory.ctypes.data % 64) // like.itemsize
    return memory[first : first + num_rows * width].reshape(num_rows, width)
