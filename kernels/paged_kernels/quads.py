"""Inner loops over packed weights: products of a few numbers that follow one another, for LANES columns at once.

Four bytes or two bfloat16 of a column make 32 bits, and so do those of a row that they are multiplied with. One
instruction adds their products to a 32-bit sum: of an unsigned and a signed byte each, or of bfloat16. Where a CPU
lacks it, bfloat16 is widened to float32, and numbers of 8 bits to 16: of a row when it is prepared, of a column in two
halves, the even ones and the odd ones, so that LLVM finds instructions for the products of pairs.

Arrays of uint16 hold bfloat16, arrays of uint8 a weight per byte, arrays of int8 two weights of 4 bits per byte.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numpy.typing import NDArray

from paged_kernels import assembly
from paged_kernels.vector import (
    DOTS_BFLOAT16,
    DOTS_NIBBLES,
    DOTS_QUADS,
    FLOAT32,
    INT32,
    LANES,
    WIDTH,
    Typed,
    address_at,
    define_intrinsic,
    emit_prefetch,
    emit_shuffle,
    emit_to_float32,
    load_vector,
    store_vector,
    with_constant,
)

STEP = 4 * LANES  # bytes of a step: 32 bits of each of LANES columns

_SUMS = ir.VectorType(INT32, LANES)
_NUMBERS = ir.VectorType(FLOAT32, LANES)


@define_intrinsic
def add_packed(
    typing_context: Any,
    rows: Any,
    columns: Any,
    totals: Any,
    places: Any,
    num_rows: Any,
    num_blocks: Any,
    num_fetched: Any,
) -> Typed:
    """Add to totals[r, c] (offsets[r] + the products of numbers[r] and column c) * row_scales[r] * column_scales[c].

    With bfloat16 there are no offsets and no scales. Numbers are as `row_like` has them. `rows` are (numbers,
    row_scales, offsets), `columns` are (weights, column_scales); `places` says where in them the rows and columns are:
    their start and stride in numbers, in row_scales and offsets, in weights, in column_scales and in totals. Columns
    come in blocks of LANES; the next place is how many STEPs one of them has. Meanwhile memory is fetched: for i below
    `num_fetched` what is `ahead + i * ahead_stride` bytes, the last two places, from the first block. If that is one
    place, what comes from there is for the nearest cache; if there are more, it is for the next one, since the nearest
    has no room for it.

    `num_rows`, `num_blocks` and `num_fetched` are literals. A total does not depend on them.
    """

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        (numbers, row_scales, offsets), (weights, column_scales) = (
            [(array_type, builder.extract_value(args[i], j)) for j, array_type in enumerate(signature.args[i].types)]
            for i in range(2)
        )
        place = [builder.extract_value(args[3], i) for i in range(len(signature.args[3]))]

        def addresses(array: tuple[Any, Any], i: int, count: int) -> list[Any]:
            first = address_at(context, builder, *array, place[i])
            return [builder.gep(first, [with_constant(place[i + 1], j, builder.mul)]) for j in range(count)]

        height, width = num_rows.literal_value, num_blocks.literal_value
        xs = addresses(numbers, 0, height)
        scales, starts = addresses(row_scales, 2, height), addresses(offsets, 2, height)
        ws = addresses(weights, 4, width)
        column_factors = addresses(column_scales, 6, width)
        ts = addresses((signature.args[2], args[2]), 8, height)
        num_steps, ahead, ahead_stride = place[10:]
        block_stride = with_constant(place[5], weights[0].dtype.bitwidth // 8, builder.mul)
        stored_type = weights[0].dtype
        is_wide = stored_type == types.uint16
        bytes_of_block = [builder.bitcast(w, ir.IntType(8).as_pointer()) for w in ws]
        fetched = builder.gep(bytes_of_block[0], [ahead])
        row_type = signature.args[0].types[0].dtype
        bases = [builder.ptrtoint(address, ir.IntType(64)) for address in (bytes_of_block[0], xs[0], fetched)]
        row_stride = with_constant(place[1], row_type.bitwidth // 8, builder.mul)
        if row_type == types.uint16:
            strides = [block_stride, ahead_stride, row_stride]
            assembly.add_pair_products(
                builder, ts[0], height, width, num_fetched.literal_value, [*bases, num_steps, *strides]
            )
            return context.get_dummy_value()
        zeros = [ir.Constant(_NUMBERS, [0.0] * LANES) if is_wide else _splat(builder, builder.load(o)) for o in starts]
        sums = [[cgutils.alloca_once_value(builder, zero) for _ in ws] for zero in zeros]
        if WIDTH == 8 and row_type != types.int8 and height > 2:  # with fewer LLVM keeps the sums in registers as well
            assert width == 1
            places_of_sums = [row_sums[0] for row_sums in sums]
            assembly.add_halves(builder, places_of_sums, [*bases, num_steps, row_stride], of_bytes=not is_wide)
        else:
            ahead_of = [
                builder.gep(fetched, [with_constant(ahead_stride, i, builder.mul)])
                for i in range(num_fetched.literal_value)
            ]
            _add_products(builder, row_type, stored_type, xs, bytes_of_block, sums, ahead_of, num_steps)
        if is_wide:
            for t, row_sums in zip(ts, sums, strict=True):
                for i, total in enumerate(row_sums):
                    address = builder.gep(t, [ir.IntType(64)(i * LANES)])
                    store_vector(builder, builder.fadd(load_vector(builder, address), builder.load(total)), address)
            return context.get_dummy_value()
        scale_type = column_scales[0].dtype
        element = context.get_data_type(scale_type)
        factors = [
            emit_to_float32(builder, scale_type, load_vector(builder, address, element)) for address in column_factors
        ]
        for t, scale, row_sums in zip(ts, scales, sums, strict=True):
            row_factor = _splat(builder, builder.load(scale))
            for i, (factor, total) in enumerate(zip(factors, row_sums, strict=True)):
                address = builder.gep(t, [ir.IntType(64)(i * LANES)])
                value = builder.fmul(builder.sitofp(builder.load(total), _NUMBERS), row_factor)
                product = builder.fmul(value, factor, flags=("contract",))
                store_vector(
                    builder, builder.fadd(load_vector(builder, address), product, flags=("contract",)), address
                )
        return context.get_dummy_value()

    assert len(places) == 13
    return types.void(rows, columns, totals, places, num_rows, num_blocks, num_fetched), emit


@define_intrinsic
def rotate_64(typing_context: Any, numbers: Any, length: Any) -> Typed:
    """Multiply each 64 of `length` float32, a multiple of 64, by the Hadamard matrix of that size, in place."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        first = address_at(context, builder, signature.args[0], args[0], ir.Constant(args[1].type, 0))
        with cgutils.for_range(builder, with_constant(args[1], 64, builder.sdiv)) as loop:
            start = builder.gep(first, [with_constant(loop.index, 64, builder.mul)])
            places = [builder.gep(start, [ir.IntType(64)(i)]) for i in range(0, 64, LANES)]
            vectors = [_rotated(builder, load_vector(builder, place)) for place in places]
            for distance in (1, 2):
                vectors = [
                    builder.fsub(vectors[i - distance], vector) if i & distance else builder.fadd(vector, other)
                    for i, vector in enumerate(vectors)
                    for other in [vectors[i ^ distance]]
                ]
            eighth = ir.Constant(_NUMBERS, [0.125] * LANES)
            for place, vector in zip(places, vectors, strict=True):
                store_vector(builder, builder.fmul(vector, eighth), place)
        return context.get_dummy_value()

    return types.void(numbers, types.int64), emit


@define_intrinsic
def largest_bits(typing_context: Any, numbers: Any, start: Any, length: Any) -> Typed:
    """The bits, as an integer, of the largest magnitude of some float32, a multiple of LANES.

    Integers are in the order of the magnitudes whose bits they are; infinity and NaN are above all numbers.
    """

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        first = address_at(context, builder, signature.args[0], args[0], args[1])
        most = cgutils.alloca_once_value(builder, ir.Constant(_SUMS, [0] * LANES))
        with cgutils.for_range(builder, with_constant(args[2], LANES, builder.sdiv)) as loop:
            address = builder.gep(first, [with_constant(loop.index, LANES, builder.mul)])
            bits = builder.bitcast(load_vector(builder, address), _SUMS)
            magnitude = builder.and_(bits, ir.Constant(_SUMS, [0x7FFFFFFF] * LANES))
            builder.store(_call(builder, "llvm.smax.v16i32", _SUMS, builder.load(most), magnitude), most)
        return _call(builder, "llvm.vector.reduce.smax.v16i32", INT32, builder.load(most))

    return types.int32(numbers, types.int64, types.int64), emit


def row_like(bits: int) -> NDArray[Any]:
    """An empty array like those that hold prepared rows for weights of so many bits: bfloat16 or float32; bytes, or
    16-bit numbers of which each four are in the order 0, 2, 1, 3."""
    if bits == 16:
        return np.empty(0, np.uint16 if DOTS_BFLOAT16 else np.float32)
    return np.empty(0, np.int8 if DOTS_QUADS or (bits == 4 and DOTS_NIBBLES) else np.int16)


@define_intrinsic
def round_to_integers(
    typing_context: Any, numbers: Any, start: Any, length: Any, factor: Any, target: Any, target_start: Any
) -> Typed:
    """Write some float32, a multiple of LANES, times a factor, as `row_like` has them; return their sum. All have to be
    in the range of a byte."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        read = address_at(context, builder, signature.args[0], args[0], args[1])
        write = address_at(context, builder, signature.args[4], args[4], args[5])
        total = cgutils.alloca_once_value(builder, ir.Constant(_SUMS, [0] * LANES))
        factors = _splat(builder, args[3])
        with cgutils.for_range(builder, with_constant(args[2], LANES, builder.sdiv)) as loop:
            offset = with_constant(loop.index, LANES, builder.mul)
            scaled = builder.fmul(load_vector(builder, builder.gep(read, [offset])), factors)
            whole = builder.fptosi(_call(builder, "llvm.rint.v16f32", _NUMBERS, scaled), _SUMS)
            builder.store(builder.add(builder.load(total), whole), total)
            if signature.args[4].dtype == types.int16:
                whole = emit_shuffle(
                    builder, whole, whole, [4 * i + j for i in range(LANES // 4) for j in (0, 2, 1, 3)]
                )
            narrow = builder.trunc(whole, ir.VectorType(context.get_data_type(signature.args[4].dtype), LANES))
            address = builder.bitcast(builder.gep(write, [offset]), narrow.type.as_pointer())
            builder.store(narrow, address, align=1)
        return _call(builder, "llvm.vector.reduce.add.v16i32", INT32, builder.load(total))

    return types.int32(numbers, types.int64, types.int64, types.float32, target, types.int64), emit


def _rotated(builder: Any, vector: Any) -> Any:
    """LANES numbers times the Hadamard matrix of that size."""
    for distance in (1, 2, 4, 8):
        other = emit_shuffle(builder, vector, vector, [i ^ distance for i in range(LANES)])
        signs = ir.Constant(_NUMBERS, [-1.0 if i & distance else 1.0 for i in range(LANES)])
        vector = builder.fadd(builder.fmul(vector, signs, flags=("contract",)), other, flags=("contract",))
    return vector


def _add_products(
    builder: Any,
    row_type: Any,
    stored_type: Any,
    rows: Sequence[Any],
    blocks: Sequence[Any],
    sums: Sequence[Sequence[Any]],
    fetched: Sequence[Any],
    num_steps: Any,
) -> None:
    """As the loops of assembly.py, for any CPU; all are addresses."""
    parts = _parts(builder, row_type, stored_type)
    words_of_rows = [builder.bitcast(row, INT32.as_pointer()) for row in rows]
    with cgutils.for_range(builder, num_steps) as loop:
        w_offset = with_constant(loop.index, STEP, builder.mul)
        x_offset = with_constant(loop.index, len(parts), builder.mul)
        stored = [load_vector(builder, builder.gep(block, [w_offset]), INT32, LANES) for block in blocks]
        for address in fetched:
            emit_prefetch(builder, builder.gep(address, [w_offset]), is_near=len(fetched) == 1)
        for i, part in enumerate(parts):
            words = [part(vector) for vector in stored]
            for x, row_sums in zip(words_of_rows, sums, strict=True):
                address = builder.gep(x, [builder.add(x_offset, x_offset.type(i))])
                word = _splat(builder, builder.load(address, align=4))
                for weight, total in zip(words, row_sums, strict=True):
                    builder.store(_ADD[row_type](builder, builder.load(total), weight, word), total)
                _keep_order(builder)


def _parts(builder: Any, row_type: Any, stored_type: Any) -> list[Callable[[Any], Any]]:
    """What of a word of weights is multiplied with the first 32 bits of a row, with the next, and so on."""
    if stored_type == types.uint16:
        return _halves(builder, _widened, _whole)
    quads: list[Callable[[Any], Any]] = [_whole]
    if stored_type == types.int8:
        quads = _halves(builder, _nibbles, _whole)
    return quads if row_type == types.int8 else [half for quad in quads for half in _halves(builder, _bytes, quad)]


def _halves(builder: Any, half: Callable[[Any, Any, int], Any], of: Callable[[Any], Any]) -> list[Callable[[Any], Any]]:
    return [lambda word: half(builder, of(word), 0), lambda word: half(builder, of(word), 1)]


def _whole(word: Any) -> Any:
    return word


def _keep_order(builder: Any) -> None:
    """What is loaded later stays later: with all rows' numbers loaded first, registers would not hold the sums."""
    builder.asm(ir.FunctionType(ir.VoidType(), []), "", "~{memory}", [], side_effect=True)


def _nibbles(builder: Any, stored: Any, part: int) -> Any:
    """The lower or the upper half of each byte."""
    shifted = builder.lshr(stored, ir.Constant(stored.type, [4] * LANES)) if part else stored
    return builder.and_(shifted, ir.Constant(stored.type, [0x0F0F0F0F] * LANES))


def _bytes(builder: Any, stored: Any, part: int) -> Any:
    """The even-numbered or the odd-numbered bytes of each word, as pairs of 16-bit numbers."""
    shifted = builder.lshr(stored, ir.Constant(stored.type, [8] * LANES)) if part else stored
    return builder.and_(shifted, ir.Constant(stored.type, [0x00FF00FF] * LANES))


def _add_quad(builder: Any, total: Any, weights: Any, numbers: Any) -> Any:
    """Each lane of `total` plus the products of its four unsigned weights with its four signed numbers. Without
    DOTS_QUADS, weights have to be below 64, so that 16 bits hold the sum of two products."""
    if DOTS_QUADS:
        return _in_parts(builder, WIDTH, functools.partial(_dot_quads, builder), total, weights, numbers)
    return _in_parts(builder, 8, functools.partial(_add_nibbles, builder), total, weights, numbers)


def _dot_quads(builder: Any, total: Any, weights: Any, numbers: Any) -> Any:
    return _call(builder, f"llvm.x86.avx512.vpdpbusd.{32 * WIDTH}", total.type, total, weights, numbers)


def _add_nibbles(builder: Any, total: Any, weights: Any, numbers: Any) -> Any:
    """The same for 8 lanes, with AVX2."""
    bytes_, pairs = ir.VectorType(ir.IntType(8), 32), ir.VectorType(ir.IntType(16), 16)
    factors = [builder.bitcast(vector, bytes_) for vector in (weights, numbers)]
    products = _call(builder, "llvm.x86.avx2.pmadd.ub.sw", pairs, *factors)
    ones = ir.Constant(pairs, [1] * 16)
    return builder.add(total, _call(builder, "llvm.x86.avx2.pmadd.wd", total.type, products, ones))


def _in_parts(builder: Any, size: int, compute: Callable[..., Any], *vectors: Any) -> Any:
    """What `compute` gives for so many lanes at a time, all or half of them."""
    starts = range(0, LANES, size)
    parts = [compute(*(emit_shuffle(builder, v, v, range(i, i + size)) for v in vectors)) for i in starts]
    return parts[0] if len(parts) == 1 else emit_shuffle(builder, parts[0], parts[1], range(LANES))


def _add_wide_pair(builder: Any, total: Any, weights: Any, numbers: Any) -> Any:
    """Each lane of `total` plus the products of its two 16-bit weights with its two numbers."""
    pairs = ir.VectorType(ir.IntType(16), 2 * LANES)
    return builder.add(total, _dot_pairs(builder, builder.bitcast(weights, pairs), builder.bitcast(numbers, pairs)))


def _add_product(builder: Any, total: Any, weights: Any, numbers: Any) -> Any:
    """Each lane of `total` plus the product of its float32."""
    product = builder.fmul(weights, builder.bitcast(numbers, _NUMBERS), flags=("contract",))
    return builder.fadd(product, total, flags=("contract",))


_ADD = {types.int8: _add_quad, types.int16: _add_wide_pair, types.float32: _add_product}  # by the type of rows


def _widened(builder: Any, words: Any, part: int) -> Any:
    """The lower or the upper bfloat16 of each word, as float32."""
    if part:
        bits = builder.and_(words, ir.Constant(_SUMS, [0xFFFF0000] * LANES))
    else:
        bits = builder.shl(words, ir.Constant(_SUMS, [16] * LANES))
    return builder.bitcast(bits, _NUMBERS)


def _dot_pairs(builder: Any, x: Any, y: Any) -> Any:
    """Sums of two neighbouring products; LLVM has one instruction for this pattern on many CPUs."""
    wide = ir.VectorType(INT32, 2 * LANES)
    products = builder.mul(builder.sext(x, wide), builder.sext(y, wide))
    halves: Sequence[Any] = [emit_shuffle(builder, products, products, range(i, 2 * LANES, 2)) for i in range(2)]
    return builder.add(*halves)


def _splat(builder: Any, scalar: Any) -> Any:
    vector_type = ir.VectorType(scalar.type, LANES)
    vector = builder.insert_element(ir.Constant(vector_type, ir.Undefined), scalar, INT32(0))
    return emit_shuffle(builder, vector, vector, [0] * LANES)


def _call(builder: Any, name: str, result: Any, *args: Any) -> Any:
    """A call of one of LLVM's own functions."""
    function_type = ir.FunctionType(result, [arg.type for arg in args])
    return builder.call(cgutils.get_or_insert_function(builder.module, function_type, name), args)
