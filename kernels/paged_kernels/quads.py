"""Inner loops over packed weights: products of a few numbers that follow one another, for LANES columns at once.

Four bytes or two bfloat16 of a column make 32 bits, and so do those of a row that they are multiplied with. One
instruction adds their products to a 32-bit sum: of an unsigned and a signed byte each, or of bfloat16. Where a CPU
lacks it, the same is written so that LLVM finds instructions for pairs of 16-bit numbers, or widens to float32.

Arrays of uint16 hold bfloat16, arrays of uint8 a weight per byte, arrays of int8 two weights of 4 bits per byte.
"""

from collections.abc import Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from paged_kernels import avx512
from paged_kernels.vector import (
    DOTS_BFLOAT16,
    DOTS_QUADS,
    FLOAT32,
    INT32,
    LANES,
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

    With bfloat16 there are no offsets and no scales. `rows` are (numbers, row_scales, offsets), `columns` are (weights,
    column_scales); `places` says where in them the rows and columns are: their start and stride in numbers, in
    row_scales and offsets, in weights, in column_scales and in totals. Columns come in blocks of LANES; the next place
    is how many STEPs one of them has. Meanwhile memory is fetched: for i below `num_fetched` what is
    `ahead + i * ahead_stride` bytes, the last two places, from the first block. If that is one place, what comes from
    there is for the nearest cache; if there are more, it is for the next one, since the nearest has no room for it.

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
        stored_type = weights[0].dtype
        is_wide = stored_type == types.uint16
        bytes_of_block = [builder.bitcast(w, ir.IntType(8).as_pointer()) for w in ws]
        fetched = builder.gep(bytes_of_block[0], [ahead])
        if is_wide and DOTS_BFLOAT16:
            strides = [with_constant(place[i], 2, builder.mul) for i in (5, 1)]
            bases = [builder.ptrtoint(address, ir.IntType(64)) for address in (ws[0], xs[0], fetched)]
            avx512.add_pair_products(
                builder, ts[0], height, width, num_fetched.literal_value, [*bases, *strides, ahead_stride, num_steps]
            )
            return context.get_dummy_value()
        sums = [
            [
                cgutils.alloca_once_value(builder, _splat(builder, FLOAT32(0) if is_wide else builder.load(offset)))
                for _ in ws
            ]
            for offset in starts
        ]
        ahead_of = [
            builder.gep(fetched, [with_constant(ahead_stride, i, builder.mul)])
            for i in range(num_fetched.literal_value)
        ]
        _add_products(builder, stored_type, xs, bytes_of_block, sums, ahead_of, num_steps)
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


@define_intrinsic
def round_to_bytes(
    typing_context: Any, numbers: Any, start: Any, length: Any, factor: Any, target: Any, target_start: Any
) -> Typed:
    """Write some float32, a multiple of LANES, times a factor, as bytes; return their sum. All have to be in range."""

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
            bytes_ = builder.trunc(whole, ir.VectorType(ir.IntType(8), LANES))
            address = builder.bitcast(builder.gep(write, [offset]), bytes_.type.as_pointer())
            builder.store(bytes_, address, align=1)
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
    stored_type: Any,
    rows: Sequence[Any],
    blocks: Sequence[Any],
    sums: Sequence[Sequence[Any]],
    fetched: Sequence[Any],
    num_steps: Any,
) -> None:
    """As `avx512.add_pair_products`, for any CPU and also for bytes; all are addresses."""
    is_wide, num_parts = stored_type == types.uint16, 2 if stored_type == types.int8 else 1
    with cgutils.for_range(builder, num_steps) as loop:
        w_offset = with_constant(loop.index, STEP, builder.mul)
        x_offset = with_constant(loop.index, 2 if is_wide else 4 * num_parts, builder.mul)
        stored = [load_vector(builder, builder.gep(block, [w_offset]), INT32, LANES) for block in blocks]
        for address in fetched:
            emit_prefetch(builder, builder.gep(address, [w_offset]), is_near=len(fetched) == 1)
        for part in range(num_parts):
            words = stored if num_parts == 1 else [_nibbles(builder, vector, part) for vector in stored]
            for x, row_sums in zip(rows, sums, strict=True):
                address = builder.gep(x, [with_constant(x_offset, 4 * part, builder.add)])
                word = _splat(builder, builder.load(builder.bitcast(address, INT32.as_pointer()), align=4))
                for weight, total in zip(words, row_sums, strict=True):
                    add = _add_pair if is_wide else _add_quad
                    builder.store(add(builder, builder.load(total), weight, word), total)
                _keep_order(builder)


def _keep_order(builder: Any) -> None:
    """What is loaded later stays later: with all rows' numbers loaded first, registers would not hold the sums."""
    builder.asm(ir.FunctionType(ir.VoidType(), []), "", "~{memory}", [], side_effect=True)


def _nibbles(builder: Any, stored: Any, part: int) -> Any:
    """The lower or the upper half of each byte."""
    shifted = builder.lshr(stored, ir.Constant(stored.type, [4] * LANES)) if part else stored
    return builder.and_(shifted, ir.Constant(stored.type, [0x0F0F0F0F] * LANES))


def _add_quad(builder: Any, total: Any, weights: Any, numbers: Any) -> Any:
    """Each lane of `total` plus the products of its four unsigned weights with its four signed numbers."""
    if DOTS_QUADS:
        return _call(builder, "llvm.x86.avx512.vpdpbusd.512", _SUMS, total, weights, numbers)
    pairs = ir.VectorType(ir.IntType(16), 2 * LANES)
    low = ir.Constant(_SUMS, [0x00FF00FF] * LANES)
    eight, byte = ir.Constant(pairs, [8] * 2 * LANES), ir.Constant(_SUMS, [8] * LANES)
    even_weights = builder.bitcast(builder.and_(weights, low), pairs)
    odd_weights = builder.bitcast(builder.and_(builder.lshr(weights, byte), low), pairs)
    signed = builder.bitcast(numbers, pairs)
    even_numbers = builder.ashr(builder.shl(signed, eight), eight)
    odd_numbers = builder.ashr(signed, eight)
    total = builder.add(total, _dot_pairs(builder, even_weights, even_numbers))
    return builder.add(total, _dot_pairs(builder, odd_weights, odd_numbers))


def _add_pair(builder: Any, total: Any, weights: Any, numbers: Any) -> Any:
    """Each lane of `total` plus the products of its two bfloat16 weights with its two numbers."""
    for is_upper in (False, True):
        x, y = (_widened(builder, vector, is_upper) for vector in (weights, numbers))
        total = builder.fadd(builder.fmul(x, y, flags=("contract",)), total, flags=("contract",))
    return total


def _widened(builder: Any, words: Any, is_upper: bool) -> Any:
    """The lower or the upper bfloat16 of each word, as float32."""
    if is_upper:
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
