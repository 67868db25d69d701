"""Matrix products with packed weights, for CPUs; see packing.py.

With a few rows the time is that of reading the weights, of which there are half as many bytes with 8 bits as with 16,
and little more than a quarter with 4. With many rows it is that of products of bytes or bfloat16, and the next weights
are fetched meanwhile.

An element's sum is taken in an order that its depth alone decides, with 8 and 4 bits exactly, in whole numbers. So a
row's result does not change with the rows beside it nor with the number of threads, to the last bit.
"""

import functools
from typing import Any, TypeAlias

import numba
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paged_kernels import compiled
from paged_kernels.compiled import TYPES, array_at, set_num_threads
from paged_kernels.native import address_of, call
from paged_kernels.packing import LEAST_COLUMNS, PackedWeight
from paged_kernels.quads import STEP, add_packed, largest_bits, rotate_64, round_to_bytes
from paged_kernels.vector import LANES, WIDTH, copy_from_float32, copy_to_float32, from_float32, to_float32

_BYTE = np.empty(0, np.int8)
_VALUES = {16: TYPES[torch.bfloat16], 8: np.empty(0, np.uint8), 4: _BYTE}  # see quads.py
SERIAL_COST = {16: 200_000, 8: 400_000, 4: 400_000}  # about 10 µs: a product below is not worth other threads
_MOST_ROWS = 256  # that stay in the L2 cache
# As many sums as fit in the registers: of so many blocks, of one of these numbers of rows, whichever is next below.
_BLOCKS_AT_ONCE = 4 if WIDTH >= LANES else 2
_MANY_ROWS, _SOME_ROWS = (6, 4) if WIDTH >= LANES else (3, 2)
_TOTALS = _BLOCKS_AT_ONCE * LANES
_STEPS_AT_ONCE = 96  # of these blocks, beside some rows, fit in the L1 cache
_NOT_FINITE = np.int32(0x7F800000)

_Sizes: TypeAlias = tuple[int, int, int, int, int]  # columns, depth, depth padded, groups, steps of a block
_Rounding: TypeAlias = tuple[int, int] | None  # size of the rotation, offset of the weights
Matrix: TypeAlias = tuple[int, int, int, _Sizes, _Rounding]  # addresses of weights, scales and bias
Types: TypeAlias = tuple[NDArray[Any], NDArray[Any], NDArray[Any], NDArray[Any]]
_Rows: TypeAlias = tuple[NDArray[Any], NDArray[np.float32], NDArray[np.int32]]  # numbers, scales, offsets
_Columns: TypeAlias = tuple[NDArray[Any], NDArray[Any]]  # weights, scales

_compile = functools.partial(compiled.compile_kernel, fast_math=frozenset())


def packed_linear(x: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> Tensor:
    """See `reference.packed_linear`."""
    num_rows, (num_columns, depth) = x.shape[0], weight.shape
    assert x.shape[1] == depth and (weight.bits != 16 or x.dtype == torch.bfloat16)
    if x.stride(1) != 1:
        x = x.contiguous()
    out = x.new_empty(num_rows, num_columns)
    if out.numel() > 0:
        bias = None if bias is None else bias.float().contiguous()
        num_threads = 1 if num_rows * num_columns * depth < SERIAL_COST[weight.bits] else set_num_threads()
        matrix = matrix_of(weight, bias)
        types = types_of(x, weight)
        part = part_kernel(types, matrix)
        multiply(part, types, x.data_ptr(), x.stride(0), matrix, out.data_ptr(), num_rows, num_threads)
    return out


def matrix_of(weight: PackedWeight, bias: Tensor | None) -> Matrix:
    """Where a matrix and its bias, contiguous float32, are, and what they are like; it keeps neither alive."""
    (num_columns, depth), num_steps = weight.shape, weight.values.shape[1]
    addresses = (weight.values.data_ptr(), weight.scales.data_ptr(), 0 if bias is None else bias.data_ptr())
    sizes = (num_columns, depth, weight.padded_depth, weight.num_groups, num_steps)
    return *addresses, sizes, None if weight.bits == 16 else (weight.rotation, weight.offset)


def part_kernel(types: Types, matrix: Matrix) -> int:
    """The address of the kernel that `multiply` has the threads run, for these types."""
    return _part_kernel(matrix[-1] is not None, *(like.dtype for like in types))


@functools.cache
def _part_kernel(is_rounded: bool, *dtypes: np.dtype[Any]) -> int:
    types = tuple(np.empty(0, dtype) for dtype in dtypes)
    sizes, rounding = (0, 0, 0, 0, 0), (0, 0) if is_rounded else None
    return address_of(_multiply, types, 0, 0, 0, 0, 0, sizes, rounding, 0, 0, 0, 0)


def types_of(x: Tensor, weight: PackedWeight) -> Types:
    """Of inputs, weights, scales and inputs that have been prepared."""
    bits = weight.bits
    return TYPES[x.dtype], _VALUES[bits], TYPES[weight.scales.dtype], _VALUES[16] if bits == 16 else _BYTE


@functools.partial(_compile, parallel=True)
def multiply(
    part: int, types: Types, x: int, stride: int, matrix: Matrix, out: int, num_rows: int, num_threads: int
) -> None:
    """Rows that are `stride` numbers apart times a matrix. Each thread takes some of the columns, and prepares all rows
    for itself."""
    values, scales, bias, sizes, rounding = matrix
    num_blocks = max(LEAST_COLUMNS, sizes[0] + LANES - 1) // LANES
    for thread in numba.prange(num_threads):
        block, end_block = num_blocks * thread // num_threads, num_blocks * (thread + 1) // num_threads
        call(part, (types, x, stride, values, scales, bias, sizes, rounding, out, num_rows, block, end_block))


@_compile
def _multiply(
    types: Types,
    x: int,
    stride: int,
    values: int,
    scales: int,
    bias: int,
    sizes: _Sizes,
    rounding: _Rounding,
    out: int,
    num_rows: int,
    block: int,
    end_block: int,
) -> None:
    """The output's columns within these blocks of LANES."""
    x_like, values_like, scales_like, row_like = types
    num_columns, depth, padded_depth, num_groups, num_steps = sizes
    num_blocks = max(LEAST_COLUMNS, num_columns + LANES - 1) // LANES
    columns = (
        array_at(values, 0, num_blocks * num_steps * STEP // values_like.itemsize, values_like),
        array_at(scales, 0, num_blocks * num_groups * LANES, scales_like),
    )
    height = min(num_rows, _MOST_ROWS)
    num_scales = max(2, num_groups)
    rows = _aligned(height * padded_depth + LANES, row_like)
    row_scales, row_offsets = np.empty((height, num_scales), np.float32), np.empty((height, num_scales), np.int32)
    numbers = np.zeros(padded_depth + LANES, np.float32)
    for first in range(0, num_rows, _MOST_ROWS):
        count = min(_MOST_ROWS, num_rows - first)
        for r in range(count):
            source = array_at(x, (first + r) * stride, depth, x_like)
            row = rows[r * padded_depth :]
            if rounding is None:
                row[:depth] = source
                row[depth:padded_depth] = 0
            else:
                _rotate(source, rounding[0], numbers)
                _quantize(numbers, padded_depth, num_groups, rounding[1], row, row_scales[r], row_offsets[r])
        target = array_at(out, first * num_columns, count * num_columns, x_like)
        prepared = (rows, row_scales.reshape(-1), row_offsets.reshape(-1))
        _multiply_rows(prepared, count, columns, bias, target, sizes, block, end_block)


@_compile
def _rotate(source: NDArray[Any], rotation: int, numbers: NDArray[np.float32]) -> None:
    """See `packing.rotate`."""
    depth = len(source)
    whole = depth // LANES * LANES
    copy_to_float32(source, 0, numbers, 0, whole)
    for i in range(whole, depth):
        numbers[i] = to_float32(source[i])
    if rotation == 64:
        rotate_64(numbers, depth)
        return
    half, factor = rotation // 2, np.float32(1 / np.sqrt(np.float64(rotation)))
    while half > 0:
        for start in range(0, depth, 2 * half):
            for i in range(start, start + half):
                a, b = numbers[i], numbers[i + half]
                numbers[i] = a + b
                numbers[i + half] = a - b
        half //= 2
    for i in range(depth):
        numbers[i] *= factor


@_compile
def _quantize(
    numbers: NDArray[np.float32],
    depth: int,
    num_groups: int,
    offset: int,
    row: NDArray[np.int8],
    scales: NDArray[np.float32],
    offsets: NDArray[np.int32],
) -> None:
    """See `packing.quantize_rows`; `offsets` take back what the weights' offset adds to the sums.

    If there is one group, there are two scales and offsets, since its sum is taken in parts: for the first of them, and
    for the others, which need no offset.
    """
    size = depth // num_groups
    whole = -(-size // LANES) * LANES  # what is past the end are zeros, where there is room or the next row to come
    for g in range(num_groups):
        bits = largest_bits(numbers, g * size, whole)
        total = np.int32(0)
        if bits == 0 or bits >= _NOT_FINITE:
            row[g * size : (g + 1) * size] = 0
            scales[g] = np.float32(0) if bits == 0 else np.float32(np.nan)
        else:
            largest = np.int32(bits).view(np.float32)
            total = round_to_bytes(numbers, g * size, whole, np.float32(127) / largest, row, g * size)
            scales[g] = largest / np.float32(127)
        offsets[g] = -total * np.int32(offset)
    if num_groups == 1:
        scales[1], offsets[1] = scales[0], 0


@_compile
def _multiply_rows(
    rows: _Rows,
    num_rows: int,
    columns: _Columns,
    bias: int,
    out: NDArray[Any],
    sizes: _Sizes,
    block: int,
    end_block: int,
) -> None:
    """Some blocks of columns at once, of them some steps at once, for all rows one after the other."""
    num_columns, num_steps = sizes[0], sizes[4]
    totals = _aligned(num_rows * _TOTALS, np.empty(0, np.float32))
    num_segments = -(-num_steps // _STEPS_AT_ONCE)
    while block < end_block:
        # If these would be too few, some are computed again: to the same bits, be it by another thread.
        block = max(0, min(block, end_block - _BLOCKS_AT_ONCE))
        _reset(totals, num_rows, bias, block * LANES, num_columns)
        for segment in range(num_segments):
            _add_segment(rows, num_rows, columns, (block, segment, num_segments), sizes, totals)
        _round(totals, num_rows, out, block * LANES, num_columns)
        block += _BLOCKS_AT_ONCE


@_compile
def _add_segment(
    rows: _Rows,
    num_rows: int,
    columns: _Columns,
    which: tuple[int, int, int],
    sizes: _Sizes,
    totals: NDArray[np.float32],
) -> None:
    """Add the products of some steps of some blocks: of whole groups, or else of a part of the only one."""
    block, segment, num_segments = which
    num_groups, num_steps = sizes[3], sizes[4]
    num_units = num_groups if num_groups > 1 else num_steps
    begin, end = num_units * segment // num_segments, num_units * (segment + 1) // num_segments
    unit = num_steps // num_units
    # Meanwhile what is next is fetched: these blocks' next steps, or the next blocks' first.
    ahead, stride = (end - begin) * unit * STEP, num_steps * STEP
    if segment == num_segments - 1:
        ahead = _BLOCKS_AT_ONCE * stride - begin * unit * STEP
    first, part = 0, 0
    while first < num_rows:
        rest = num_rows - first
        height = _MANY_ROWS if rest >= _MANY_ROWS else _SOME_ROWS if rest >= _SOME_ROWS else min(rest, 2)
        fetched, fetched_stride = 0, 0
        if num_rows < _BLOCKS_AT_ONCE * _MANY_ROWS:  # all at once, since the time is that of reading them anyhow
            fetched, fetched_stride = (ahead, stride) if part == 0 else (0, 0)
        elif part < _BLOCKS_AT_ONCE:
            fetched = ahead + part * stride
        if num_groups == 1:
            where = (first, height, block, begin, end - begin, min(segment, 1), 0)
            _add_part(rows, columns, where, sizes, totals, fetched, fetched_stride)
        else:
            for g in range(begin, end):
                where = (first, height, block, g * unit, unit, g, g)
                _add_part(rows, columns, where, sizes, totals, fetched, fetched_stride)
        first, part = first + height, part + 1


@_compile
def _add_part(
    rows: _Rows,
    columns: _Columns,
    where: tuple[int, int, int, int, int, int, int],
    sizes: _Sizes,
    totals: NDArray[np.float32],
    ahead: int,
    ahead_stride: int,
) -> None:
    first, height, block, step, count, row_scale, group = where
    _, _, depth, num_groups, num_steps = sizes
    numbers_of_step, numbers_of_block = depth // num_steps, STEP // columns[0].itemsize
    places = (
        *(first * depth + step * numbers_of_step, depth),
        *(first * max(2, num_groups) + row_scale, max(2, num_groups)),
        *((block * num_steps + step) * numbers_of_block, num_steps * numbers_of_block),
        *((block * num_groups + group) * LANES, num_groups * LANES),
        *(first * _TOTALS, _TOTALS),
        *(count, ahead, ahead_stride),
    )
    if height == 1:
        add_packed(rows, columns, totals, places, 1, _BLOCKS_AT_ONCE)
    elif height == 2:
        add_packed(rows, columns, totals, places, 2, _BLOCKS_AT_ONCE)
    elif height == _SOME_ROWS:
        add_packed(rows, columns, totals, places, _SOME_ROWS, _BLOCKS_AT_ONCE)
    else:
        add_packed(rows, columns, totals, places, _MANY_ROWS, _BLOCKS_AT_ONCE)


@_compile
def _reset(totals: NDArray[np.float32], num_rows: int, bias: int, column: int, num_columns: int) -> None:
    """Begin the sums, with the bias if there is one."""
    totals[:] = 0
    if bias != 0:
        count = min(_TOTALS, num_columns - column)
        numbers = array_at(bias, column, count, totals)
        for r in range(num_rows):
            for c in range(count):
                totals[r * _TOTALS + c] = numbers[c]


@_compile
def _round(totals: NDArray[np.float32], num_rows: int, out: NDArray[Any], column: int, num_columns: int) -> None:
    count = min(_TOTALS, num_columns - column)
    whole = count // LANES * LANES
    for r in range(num_rows):
        source, target = r * _TOTALS, r * num_columns + column
        copy_from_float32(totals, source, out, target, whole)
        for c in range(whole, count):
            out[target + c] = from_float32(totals[source + c], out)


@_compile
def _aligned(size: int, like: NDArray[Any]) -> NDArray[Any]:
    """Memory that begins at a multiple of 64 bytes."""
    memory = np.empty(size + 64 // like.itemsize, like.dtype)
    first = (-memory.ctypes.data % 64) // like.itemsize
    return memory[first : first + size]
