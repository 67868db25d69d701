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
from paged_kernels.compiled import SERIAL_PRODUCT, TYPES, array_at, set_num_threads
from paged_kernels.native import address_of, call
from paged_kernels.packing import BITS, LEAST_COLUMNS, PackedWeight
from paged_kernels.quads import STEP, add_packed, largest_bits, rotate_64, round_to_integers, row_like
from paged_kernels.vector import LANES, WIDTH, copy_from_float32, copy_to_float32, from_float32, to_float32

_VALUES = {16: TYPES[torch.bfloat16], 8: np.empty(0, np.uint8), 4: np.empty(0, np.int8)}  # see quads.py
_PREPARED = {bits: row_like(bits) for bits in BITS}
_MOST_ROWS = 256  # that stay in the L2 cache
_BLOCKS_AT_ONCE = 4 if WIDTH >= LANES else 2  # whose steps fit in the L1 cache
# As many sums as fit in the registers: of one of these numbers of rows, whichever is next below, and so many blocks.
_MANY_ROWS, _SOME_ROWS = 6, 4
_BLOCKS_OF_MANY, _BLOCKS_OF_FEW = (4, 4) if WIDTH >= LANES else (1, 2)
_FEW_ROWS = _BLOCKS_OF_MANY * _MANY_ROWS  # below, the time is that of reading the weights
_TOTALS = _BLOCKS_AT_ONCE * LANES
_STEPS_AT_ONCE = 144  # of these blocks, beside some rows, fit in the L1 cache
_NOT_FINITE = np.int32(0x7F800000)

_Sizes: TypeAlias = tuple[int, int, int, int, int]  # columns, depth, depth padded, groups, steps of a block
_Rounding: TypeAlias = tuple[int, int] | None  # size of the rotation, offset of the weights
_Piece: TypeAlias = tuple[int, int, int, int]  # of the output: rows from, to; columns from, to, in blocks of LANES
Matrix: TypeAlias = tuple[int, int, int, int, _Sizes, _Rounding]  # addresses: weights, scales, factors, bias
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
        num_threads = 1 if num_rows * num_columns * depth < SERIAL_PRODUCT else set_num_threads()
        matrix = matrix_of(weight, bias)
        types = types_of(x, weight)
        parts = part_kernels(types, matrix)
        multiply(parts, types, x.data_ptr(), x.stride(0), matrix, out.data_ptr(), num_rows, num_threads)
    return out


def matrix_of(weight: PackedWeight, bias: Tensor | None) -> Matrix:
    """Where a matrix and its bias, contiguous float32, are, and what they are like; it keeps neither alive."""
    (num_columns, depth), num_steps = weight.shape, weight.values.shape[1]
    addresses = (weight.values.data_ptr(), weight.scales.data_ptr(), _address(weight.input_factors), _address(bias))
    sizes = (num_columns, depth, weight.padded_depth, weight.num_groups, num_steps)
    return *addresses, sizes, None if weight.bits == 16 else (weight.rotation, weight.offset)


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def part_kernels(types: Types, matrix: Matrix) -> tuple[int, int]:
    """The addresses of the kernels that `multiply` has the threads run, for these types."""
    return _part_kernels(matrix[-1] is not None, *(like.dtype for like in types))


@functools.cache
def _part_kernels(is_rounded: bool, *dtypes: np.dtype[Any]) -> tuple[int, int]:
    types = tuple(np.empty(0, dtype) for dtype in dtypes)
    sizes, rounding = (0, 0, 0, 0, 0), (0, 0) if is_rounded else None
    rows = types[3], np.empty(0, np.float32), np.empty(0, np.int32)
    prepare = address_of(_prepare, types, 0, 0, 0, sizes, rounding, rows, 0, 0)
    return prepare, address_of(_multiply, types, rows, 0, 0, 0, 0, sizes, 0, (0, 0, 0, 0))


def types_of(x: Tensor, weight: PackedWeight) -> Types:
    """Of inputs, weights, scales and inputs that have been prepared."""
    bits = weight.bits
    return TYPES[x.dtype], _VALUES[bits], TYPES[weight.scales.dtype], _PREPARED[bits]


@functools.partial(_compile, parallel=True)
def multiply(
    parts: tuple[int, int], types: Types, x: int, stride: int, matrix: Matrix, out: int, num_rows: int, num_threads: int
) -> None:
    """Rows that are `stride` numbers apart times a matrix. Each thread takes some of the columns; with many rows two of
    them may share columns that are multiplied at once."""
    prepare, part = parts
    values, scales, factors, bias, sizes, rounding = matrix
    _, depth, padded_depth, num_groups, _ = sizes
    is_few = num_rows < _FEW_ROWS
    is_ready = rounding is None and types[0].itemsize == types[3].itemsize and depth == padded_depth
    num_shared = 0 if is_few or is_ready else num_rows
    shared = _buffers(num_shared, padded_depth, num_groups, types[3])
    if is_ready:
        shared = (array_at(x, 0, (num_rows - 1) * stride + depth, types[3]), shared[1], shared[2])
    elif not is_few:
        for thread in numba.prange(num_threads):
            first, end = num_rows * thread // num_threads, num_rows * (thread + 1) // num_threads
            call(prepare, (types, x, stride, factors, sizes, rounding, shared, first, end))
    width = stride if is_ready else _row_size(padded_depth)
    num_blocks = max(LEAST_COLUMNS, sizes[0] + LANES - 1) // LANES
    for thread in numba.prange(num_threads):
        rows = shared
        if is_few and not is_ready:  # each for itself: to read what another core just wrote takes longer
            rows = _buffers(num_rows, padded_depth, num_groups, types[3])
            call(prepare, (types, x, stride, factors, sizes, rounding, rows, 0, num_rows))
        pieces, num_pieces = _pieces(num_rows, num_blocks, thread, num_threads)
        for i in range(num_pieces):
            call(part, (types, rows, width, values, scales, bias, sizes, out, pieces[i]))


@_compile
def _buffers(num_rows: int, padded_depth: int, num_groups: int, row_like: NDArray[Any]) -> _Rows:
    """For rows that are prepared."""
    size = num_rows * max(2, num_groups)
    rows = _aligned(num_rows * _row_size(padded_depth), row_like)
    return rows, np.empty(size, np.float32), np.empty(size, np.int32)


@_compile
def _row_size(padded_depth: int) -> int:
    """What is rounded is written LANES numbers at a time."""
    return -(-padded_depth // LANES) * LANES


@_compile
def _prepare(
    types: Types,
    x: int,
    stride: int,
    factors: int,
    sizes: _Sizes,
    rounding: _Rounding,
    prepared: _Rows,
    first: int,
    end: int,
) -> None:
    """Write these rows as the products take them."""
    rows, row_scales, offsets = prepared
    _, depth, padded_depth, num_groups, _ = sizes
    width, num_scales = _row_size(padded_depth), max(2, num_groups)
    numbers = np.zeros(padded_depth + LANES, np.float32)
    for r in range(first, end):
        source = array_at(x, r * stride, depth, types[0])
        row = rows[r * width : (r + 1) * width]
        if rounding is None:
            if source.itemsize == rows.itemsize:
                row[:depth] = source
            else:
                _widen(source, row)
            row[depth:] = 0
        else:
            scales = slice(r * num_scales, (r + 1) * num_scales)
            _widen(source, numbers)
            if factors != 0:
                _scale(numbers, array_at(factors, 0, depth, numbers))
            _rotate(numbers, depth, rounding[0])
            _quantize(numbers, padded_depth, num_groups, rounding[1], row, row_scales[scales], offsets[scales])


@_compile
def _pieces(num_rows: int, num_blocks: int, thread: int, num_threads: int) -> tuple[tuple[_Piece, _Piece, _Piece], int]:
    """A thread's share: the rest of some columns that are multiplied at once, others, and the beginning of some."""
    if num_rows < _FEW_ROWS:
        only = (0, num_rows, num_blocks * thread // num_threads, num_blocks * (thread + 1) // num_threads)
        return (only, only, only), 1
    num_groups = -(-num_blocks // _BLOCKS_AT_ONCE)
    group, row = _place(num_rows, num_groups, thread, num_threads)
    end_group, end_row = _place(num_rows, num_groups, thread + 1, num_threads)
    if group == end_group:
        only = _piece(row, end_row, group, group + 1, num_blocks)
        return (only, only, only), 1
    first, last = (
        _piece(row, num_rows, group, group + 1, num_blocks),
        _piece(0, end_row, end_group, end_group + 1, num_blocks),
    )
    others = _piece(0, num_rows, group + 1, end_group, num_blocks)
    return (first, others, last), 3


@_compile
def _place(num_rows: int, num_groups: int, thread: int, num_threads: int) -> tuple[int, int]:
    """Where a thread's share begins: the group of columns, and the row there."""
    place = num_groups * num_rows * thread // num_threads
    return place // num_rows, place % num_rows // _MANY_ROWS * _MANY_ROWS


@_compile
def _piece(row: int, end_row: int, group: int, end_group: int, num_blocks: int) -> _Piece:
    return row, end_row, group * _BLOCKS_AT_ONCE, min(end_group * _BLOCKS_AT_ONCE, num_blocks)


@_compile
def _multiply(
    types: Types,
    prepared: _Rows,
    stride: int,
    values: int,
    scales: int,
    bias: int,
    sizes: _Sizes,
    out: int,
    piece: _Piece,
) -> None:
    """One piece of the output, of rows that are `stride` numbers apart."""
    x_like, values_like, scales_like, _ = types
    num_columns, _, _, num_groups, num_steps = sizes
    begin_row, end_row, block, end_block = piece
    if begin_row >= end_row or block >= end_block:
        return
    num_blocks = max(LEAST_COLUMNS, num_columns + LANES - 1) // LANES
    num_scales = max(2, num_groups)
    columns = (
        array_at(values, 0, num_blocks * num_steps * STEP // values_like.itemsize, values_like),
        array_at(scales, 0, num_blocks * num_groups * LANES, scales_like),
    )
    for first in range(begin_row, end_row, _MOST_ROWS):
        count = min(_MOST_ROWS, end_row - first)
        rows = (
            _view(prepared[0], first * stride),
            _view(prepared[1], first * num_scales),
            _view(prepared[2], first * num_scales),
        )
        target = array_at(out, first * num_columns, count * num_columns, x_like)
        _multiply_rows(rows, stride, count, columns, bias, target, sizes, block, end_block)


@_compile
def _view(array: NDArray[Any], start: int) -> NDArray[Any]:
    """The rest of an array, without the count of its users, over which threads would wait for each other."""
    return array_at(np.int64(array.ctypes.data), start, len(array) - start, array)


@_compile
def _widen(source: NDArray[Any], numbers: NDArray[np.float32]) -> None:
    whole = len(source) // LANES * LANES
    copy_to_float32(source, 0, numbers, 0, whole)
    for i in range(whole, len(source)):
        numbers[i] = to_float32(source[i])


@_compile
def _scale(numbers: NDArray[np.float32], factors: NDArray[np.float32]) -> None:
    for i in range(len(factors)):
        numbers[i] *= factors[i]


@_compile
def _rotate(numbers: NDArray[np.float32], depth: int, rotation: int) -> None:
    """See `packing.rotate`."""
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
    row: NDArray[Any],
    scales: NDArray[np.float32],
    offsets: NDArray[np.int32],
) -> None:
    """See `packing.quantize_rows`; `offsets` take back what the weights' offset adds to the sums.

    If there is one group, there are two scales and offsets, since its sum is taken in parts: for the first of them, and
    for the others, which need no offset.
    """
    size = depth // num_groups
    whole = -(-size // LANES) * LANES  # what is past the end are zeros, for which there is room
    for g in range(num_groups):
        bits = largest_bits(numbers, g * size, whole)
        total = np.int32(0)
        if bits == 0 or bits >= _NOT_FINITE:
            row[g * size : (g + 1) * size] = 0
            scales[g] = np.float32(0) if bits == 0 else np.float32(np.nan)
        else:
            largest = np.int32(bits).view(np.float32)
            total = round_to_integers(numbers, g * size, whole, np.float32(127) / largest, row, g * size)
            scales[g] = largest / np.float32(127)
        offsets[g] = -total * np.int32(offset)
    if num_groups == 1:
        scales[1], offsets[1] = scales[0], 0


@_compile
def _multiply_rows(
    rows: _Rows,
    stride: int,
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
            _add_segment(rows, stride, num_rows, columns, (block, segment, num_segments), sizes, totals)
        _round(totals, num_rows, out, block * LANES, num_columns)
        block += _BLOCKS_AT_ONCE


@_compile
def _add_segment(
    rows: _Rows,
    stride: int,
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
    ahead, block_bytes = (end - begin) * unit * STEP, num_steps * STEP
    if segment == num_segments - 1:
        ahead = _BLOCKS_AT_ONCE * block_bytes - begin * unit * STEP
    first, part = 0, 0
    while first < num_rows:
        rest = num_rows - first
        height = _MANY_ROWS if rest >= _MANY_ROWS else _SOME_ROWS if rest >= _SOME_ROWS else min(rest, 2)
        fetches_all = num_rows < _FEW_ROWS  # since the time is that of reading them anyhow
        fetched = ahead if fetches_all or part >= _BLOCKS_AT_ONCE else ahead + part * block_bytes
        fetched_stride = block_bytes
        if part >= (1 if fetches_all else _BLOCKS_AT_ONCE):
            fetched, fetched_stride = 0, 0
        if num_groups == 1:
            where = (first, height, block, begin, end - begin, min(segment, 1), 0)
            _add_part(rows, stride, columns, where, sizes, totals, fetched, fetched_stride, fetches_all)
        else:
            for g in range(begin, end):
                where = (first, height, block, g * unit, unit, g, g)
                _add_part(rows, stride, columns, where, sizes, totals, fetched, fetched_stride, fetches_all)
        first, part = first + height, part + 1


@_compile
def _add_part(
    rows: _Rows,
    stride: int,
    columns: _Columns,
    where: tuple[int, int, int, int, int, int, int],
    sizes: _Sizes,
    totals: NDArray[np.float32],
    ahead: int,
    ahead_stride: int,
    fetches_all: bool,
) -> None:
    first, height, block, step, count, row_scale, group = where
    _, _, depth, num_groups, num_steps = sizes
    numbers_of_step, numbers_of_block = depth // num_steps, STEP // columns[0].itemsize
    width = _BLOCKS_OF_FEW if height <= 2 else _BLOCKS_OF_MANY
    for i in range(0, _BLOCKS_AT_ONCE, width):
        places = (
            *(first * stride + step * numbers_of_step, stride),
            *(first * max(2, num_groups) + row_scale, max(2, num_groups)),
            *(((block + i) * num_steps + step) * numbers_of_block, num_steps * numbers_of_block),
            *(((block + i) * num_groups + group) * LANES, num_groups * LANES),
            *(first * _TOTALS + i * LANES, _TOTALS),
            *(count, ahead, ahead_stride),
        )
        if fetches_all:
            if height == 1:
                add_packed(rows, columns, totals, places, 1, _BLOCKS_OF_FEW, _BLOCKS_OF_FEW)
            elif height == 2:
                add_packed(rows, columns, totals, places, 2, _BLOCKS_OF_FEW, _BLOCKS_OF_FEW)
            elif height == _SOME_ROWS:
                add_packed(rows, columns, totals, places, _SOME_ROWS, _BLOCKS_OF_MANY, _BLOCKS_OF_MANY)
            else:
                add_packed(rows, columns, totals, places, _MANY_ROWS, _BLOCKS_OF_MANY, _BLOCKS_OF_MANY)
            continue
        if height == 1:
            add_packed(rows, columns, totals, places, 1, _BLOCKS_OF_FEW, 1)
        elif height == 2:
            add_packed(rows, columns, totals, places, 2, _BLOCKS_OF_FEW, 1)
        elif height == _SOME_ROWS:
            add_packed(rows, columns, totals, places, _SOME_ROWS, _BLOCKS_OF_MANY, 1)
        else:
            add_packed(rows, columns, totals, places, _MANY_ROWS, _BLOCKS_OF_MANY, 1)
        ahead, ahead_stride = 0, 0  # it has been fetched


@_compile
def _reset(totals: NDArray[np.float32], num_rows: int, bias: int, column: int, num_columns: int) -> None:
    """Begin the sums, with the bias if there is one."""
    totals[:] = 0
    if bias != 0:
        count = max(0, min(_TOTALS, num_columns - column))
        numbers = array_at(bias, column, count, totals)
        for r in range(num_rows):
            for c in range(count):
                totals[r * _TOTALS + c] = numbers[c]


@_compile
def _round(totals: NDArray[np.float32], num_rows: int, out: NDArray[Any], column: int, num_columns: int) -> None:
    count = max(0, min(_TOTALS, num_columns - column))
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
