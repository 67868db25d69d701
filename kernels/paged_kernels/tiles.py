"""The inner loops of attention, written as LLVM vectors; see vector.py.

Where the processor multiplies bfloat16 at full rate, products of tiles take pairs of bfloat16 as 32-bit integers: a
pair along the depth of the product in each.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from paged_kernels.vector import (
    FLAGS,
    FLOAT32,
    FUSED,
    INT32,
    LANES,
    WIDTH,
    Typed,
    accumulate,
    add_pair_products,
    address_at,
    define_intrinsic,
    emit_from_float32,
    emit_prefetch,
    emit_shuffle,
    emit_splat,
    emit_to_float32,
    load_vector,
    store_vector,
    sum_lanes,
    with_constant,
)

KEY_TILE = 64
_LINE = 64  # bytes of the caches' lines
LOWEST = -1e30
_EXP2 = [math.log(2) ** i / math.factorial(i) for i in range(8)]

TILE_ROWS = 6  # of a product; with TILE_VECTORS registers of columns, the sums of a tile fill most registers
TILE_VECTORS = 2 if WIDTH == 8 else 4


@define_intrinsic
def add_product(
    typing_context: Any,
    rows: Any,
    rows_start: Any,
    rows_stride: Any,
    columns: Any,
    columns_start: Any,
    columns_stride: Any,
    depth: Any,
    totals: Any,
    totals_start: Any,
    totals_stride: Any,
    num_vectors: Any,
    from_zero: Any,
) -> Typed:
    """totals[r, c] += the sum over k < depth of rows[r, k] * columns[k, c], or = if the literal `from_zero` is 1.

    For TILE_ROWS rows and `num_vectors` (a literal) times WIDTH columns. Numbers are float32, or pairs of bfloat16 as
    int32. A total is summed in the order of k, whatever the literals.
    """

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        in_pairs = signature.args[3].dtype == types.int32
        element = INT32 if in_pairs else FLOAT32
        vector = ir.VectorType(FLOAT32, WIDTH)
        row = [
            builder.gep(
                address_at(context, builder, signature.args[0], args[0], args[1]),
                [with_constant(args[2], r, builder.mul)],
            )
            for r in range(TILE_ROWS)
        ]
        first = address_at(context, builder, signature.args[3], args[3], args[4])
        total = address_at(context, builder, signature.args[7], args[7], args[8])
        places = [
            [
                builder.gep(total, [builder.add(with_constant(args[9], r, builder.mul), ir.IntType(64)(WIDTH * c))])
                for c in range(num_vectors.literal_value)
            ]
            for r in range(TILE_ROWS)
        ]
        zero = ir.Constant(vector, [0.0] * WIDTH)
        sums = [
            [
                cgutils.alloca_once_value(
                    builder, zero if from_zero.literal_value else load_vector(builder, p, lanes=WIDTH)
                )
                for p in row_places
            ]
            for row_places in places
        ]
        with cgutils.for_range(builder, args[6]) as loop:
            column = builder.gep(first, [builder.mul(loop.index, args[5])])
            values = [
                load_vector(builder, builder.gep(column, [INT32(WIDTH * c)]), element, WIDTH)
                for c in range(num_vectors.literal_value)
            ]
            for r in range(TILE_ROWS):
                number = builder.load(builder.gep(row[r], [loop.index]))
                same = builder.insert_element(
                    ir.Constant(ir.VectorType(element, WIDTH), ir.Undefined), number, INT32(0)
                )
                zeros = ir.Constant(ir.VectorType(INT32, WIDTH), [0] * WIDTH)
                same = builder.shuffle_vector(same, same, zeros)
                for place, value in zip(sums[r], values, strict=True):
                    if in_pairs:
                        builder.store(add_pair_products(builder, builder.load(place), same, value), place)
                    else:
                        accumulate(builder, place, same, value)
        for row_sums, row_places in zip(sums, places, strict=True):
            for partial, place in zip(row_sums, row_places, strict=True):
                store_vector(builder, builder.load(partial), place)
        return context.get_dummy_value()

    integer = types.int64
    flat = (rows, integer, integer, columns, integer, integer, integer, totals, integer, integer)
    return types.void(*flat, num_vectors, from_zero), emit


@define_intrinsic
def copy_numbers(typing_context: Any, source: Any, start: Any, target: Any, target_start: Any, length: Any) -> Typed:
    """Copy `length` numbers, a multiple of LANES, each rounded to the target's type if that is another one."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind, target_kind = signature.args[0].dtype, signature.args[2].dtype
        read = address_at(context, builder, signature.args[0], args[0], args[1])
        write = address_at(context, builder, signature.args[2], args[2], args[3])
        with cgutils.for_range(builder, with_constant(args[4], LANES, builder.sdiv)) as loop:
            offset = with_constant(loop.index, LANES, builder.mul)
            value = load_vector(builder, builder.gep(read, [offset]), context.get_data_type(kind))
            if kind != target_kind:
                value = emit_from_float32(builder, target_kind, emit_to_float32(builder, kind, value))
            store_vector(builder, value, builder.gep(write, [offset]))
        return context.get_dummy_value()

    return types.void(source, types.int64, target, types.int64, types.int64), emit


@define_intrinsic
def copy_row_of_units(
    typing_context: Any, source: Any, start: Any, stride: Any, target: Any, target_start: Any, length: Any
) -> Typed:
    """Copy `length` numbers, a multiple of LANES; if the target holds pairs, each with its like in the next row."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = context.get_data_type(signature.args[0].dtype)
        read = address_at(context, builder, signature.args[0], args[0], args[1])
        write = address_at(context, builder, signature.args[3], args[3], args[4])
        with cgutils.for_range(builder, with_constant(args[5], LANES, builder.sdiv)) as loop:
            offset = with_constant(loop.index, LANES, builder.mul)
            unit = load_vector(builder, builder.gep(read, [offset]), kind)
            if signature.args[3].dtype == types.int32:
                second = load_vector(builder, builder.gep(read, [builder.add(offset, args[2])]), kind)
                low, high = (builder.zext(half, ir.VectorType(INT32, LANES)) for half in (unit, second))
                unit = builder.or_(low, builder.shl(high, ir.Constant(high.type, [16] * LANES)))
            store_vector(builder, unit, builder.gep(write, [offset]))
        return context.get_dummy_value()

    integer = types.int64
    return types.void(source, integer, integer, target, integer, integer), emit


@define_intrinsic
def transpose16(
    typing_context: Any, source: Any, start: Any, stride: Any, target: Any, target_start: Any, target_stride: Any
) -> Typed:
    """Turn 16 rows of 16 numbers of 32 bits into columns."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        element = context.get_data_type(signature.args[0].dtype)
        read = address_at(context, builder, signature.args[0], args[0], args[1])
        write = address_at(context, builder, signature.args[3], args[3], args[4])
        rows = [
            load_vector(builder, builder.gep(read, [with_constant(args[2], r, builder.mul)]), element, 16)
            for r in range(16)
        ]
        for distance in (8, 4, 2, 1):  # swap the off-diagonal quarters of ever smaller squares
            for r in range(16):
                if r & distance:
                    continue
                a, b = rows[r], rows[r + distance]
                low = [i if not i & distance else 16 + i - distance for i in range(16)]
                high = [i + distance if not i & distance else 16 + i for i in range(16)]
                rows[r], rows[r + distance] = emit_shuffle(builder, a, b, low), emit_shuffle(builder, a, b, high)
        for r, row in enumerate(rows):
            store_vector(builder, row, builder.gep(write, [with_constant(args[5], r, builder.mul)]))
        return context.get_dummy_value()

    integer = types.int64
    return types.void(source, integer, integer, target, integer, integer), emit


@define_intrinsic
def dot_keys(
    typing_context: Any,
    rows: Any,
    num_rows: Any,
    keys: Any,
    keys_start: Any,
    num_keys: Any,
    width: Any,
    products: Any,
    products_start: Any,
    products_stride: Any,
) -> Typed:
    """Dot products of rows with keys that follow one another, in their own type; four keys at a time.

    Rows are float32; or bfloat16 if keys are, where the processor multiplies pairs of them.

    `width` is a multiple of LANES. If `num_keys` is no multiple of four, up to three more keys are read, and their
    products written.
    """

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        width, stored_type = args[5], signature.args[2].dtype
        in_pairs = signature.args[0].dtype == types.uint16
        first_row = address_at(context, builder, signature.args[0], args[0], ir.IntType(64)(0))
        first_key = address_at(context, builder, signature.args[2], args[2], args[3])
        product = address_at(context, builder, signature.args[6], args[6], args[7])
        element = context.get_data_type(stored_type)
        zero = ir.Constant(ir.VectorType(FLOAT32, LANES), [0.0] * LANES)

        def load(address: Any, kind: Any, count: int) -> Any:
            """LANES numbers as float32, or pairs of them, of which those past `count` are zeros."""
            if in_pairs:
                return _with_zeros(builder, load_vector(builder, address, element, count), 2 * LANES)
            return emit_to_float32(builder, kind, load_vector(builder, address, context.get_data_type(kind)))

        def multiply(column: Any, row: Any, num_rows: int) -> None:
            key = builder.gep(first_key, [builder.mul(column, width)])
            begin = builder.gep(first_row, [builder.mul(row, width)])
            sums = [[cgutils.alloca_once_value(builder, zero) for _ in range(4)] for _ in range(num_rows)]

            def add(offset: Any, count: int) -> None:
                places = [builder.add(offset, with_constant(width, k, builder.mul)) for k in range(4)]
                values = [load(builder.gep(key, [place]), stored_type, count) for place in places]
                for row_sums, place in zip(sums, places, strict=False):
                    x = load(builder.gep(begin, [place]), signature.args[0].dtype, count)
                    for total, value in zip(row_sums, values, strict=True):
                        if in_pairs:
                            builder.store(add_pair_products(builder, builder.load(total), x, value), total)
                        else:
                            accumulate(builder, total, x, value)

            step = 2 * LANES if in_pairs else LANES
            whole = builder.sub(width, with_constant(width, step, builder.srem))
            with _steps(builder, whole, step) as offset:
                add(offset, step)
            if in_pairs:
                with builder.if_then(builder.icmp_signed("<", whole, width)):
                    add(whole, LANES)
            for r, row_sums in enumerate(sums):
                dots = sum_lanes(builder, [builder.load(place) for place in row_sums])
                target = builder.add(column, builder.mul(with_constant(row, r, builder.add), args[8]))
                store_vector(builder, dots, builder.gep(product, [target]))

        with _steps(builder, args[4], 4) as column:
            _for_rows(builder, args[1], lambda row, num_rows: multiply(column, row, num_rows))
        return context.get_dummy_value()

    integer = types.int64
    flat = (rows, integer, keys, integer, integer, integer, products, integer, integer)
    return types.void(*flat), emit


@define_intrinsic
def add_values(
    typing_context: Any,
    weights: Any,
    weights_start: Any,
    weights_stride: Any,
    num_rows: Any,
    values: Any,
    values_start: Any,
    values_stride: Any,
    num_values: Any,
    width: Any,
    totals: Any,
) -> Typed:
    """Add to each row's total the values, which are `values_stride` numbers apart, each times the row's weight for it.

    Values and totals are `width` numbers, a multiple of LANES.
    """

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        width, stored_type = args[8], signature.args[4].dtype
        in_pairs = signature.args[0].dtype == types.uint16
        element = context.get_data_type(stored_type)
        first_weight = address_at(context, builder, signature.args[0], args[0], args[1])
        first_value = address_at(context, builder, signature.args[4], args[4], args[5])
        first_total = address_at(context, builder, signature.args[9], args[9], ir.IntType(64)(0))

        def add(column: Any, num_vectors: int, row: Any, num_rows: int) -> None:
            weight = builder.gep(first_weight, [builder.mul(row, args[2])])
            offsets = [with_constant(column, LANES * i, builder.add) for i in range(num_vectors)]
            places = [
                [
                    builder.gep(
                        first_total, [builder.add(builder.mul(with_constant(row, r, builder.add), width), offset)]
                    )
                    for offset in offsets
                ]
                for r in range(num_rows)
            ]
            sums = [
                [cgutils.alloca_once_value(builder, load_vector(builder, place)) for place in each] for each in places
            ]

            def add_value(index: Any) -> None:
                value = builder.gep(first_value, [builder.mul(index, args[6])])
                loaded = [load_vector(builder, builder.gep(value, [offset]), element) for offset in offsets]
                vectors = [emit_to_float32(builder, stored_type, vector) for vector in loaded]
                for r, row_sums in enumerate(sums):
                    place = builder.gep(weight, [builder.add(index, with_constant(args[2], r, builder.mul))])
                    factor = emit_splat(builder, emit_to_float32(builder, signature.args[0].dtype, builder.load(place)))
                    for partial, vector in zip(row_sums, vectors, strict=True):
                        accumulate(builder, partial, factor, vector)

            def add_pair(index: Any) -> None:
                value = builder.gep(first_value, [builder.mul(index, args[6])])
                order = [i // 2 + i % 2 * LANES for i in range(2 * LANES)]
                pairs = []
                for offset in offsets:
                    first, second = (
                        load_vector(builder, builder.gep(value, [place]), element)
                        for place in (offset, builder.add(offset, args[6]))
                    )
                    pairs.append(emit_shuffle(builder, first, second, order))
                for r, row_sums in enumerate(sums):
                    place = builder.gep(weight, [builder.add(index, with_constant(args[2], r, builder.mul))])
                    both = builder.load(builder.bitcast(place, INT32.as_pointer()), align=2)
                    factors = emit_splat(builder, both)
                    for partial, pair in zip(row_sums, pairs, strict=True):
                        builder.store(add_pair_products(builder, builder.load(partial), factors, pair), partial)

            if in_pairs:
                whole = builder.and_(args[7], ir.IntType(64)(-2))
                with _steps(builder, whole, 2) as index:
                    add_pair(index)
                with builder.if_then(builder.icmp_signed("<", whole, args[7])):
                    add_value(whole)
            else:
                with cgutils.for_range(builder, args[7]) as loop:
                    add_value(loop.index)
            for row_sums, row_places in zip(sums, places, strict=True):
                for partial, place in zip(row_sums, row_places, strict=True):
                    store_vector(builder, builder.load(partial), place)

        at_once = 4 if WIDTH == 16 else 1
        whole = builder.sub(width, with_constant(width, at_once * LANES, builder.srem))
        with _steps(builder, whole, at_once * LANES) as column:
            _for_rows(builder, args[3], lambda row, num_rows: add(column, at_once, row, num_rows))
        if at_once > 1:
            with _steps(builder, width, LANES, whole) as column:
                _for_rows(builder, args[3], lambda row, num_rows: add(column, 1, row, num_rows))
        return context.get_dummy_value()

    integer = types.int64
    flat = (weights, integer, integer, integer, values, *[integer] * 4, totals)
    return types.void(*flat), emit


@define_intrinsic
def fetch_numbers(typing_context: Any, source: Any, start: Any, length: Any) -> Typed:
    """Bring so many numbers into the caches, but for the nearest one, which is left to what is used at once."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        read = address_at(context, builder, signature.args[0], args[0], args[1])
        per_line = _LINE // (context.get_data_type(signature.args[0].dtype).get_abi_size(context.target_data))
        with _steps(builder, args[2], per_line) as offset:
            emit_prefetch(builder, builder.gep(read, [offset]), is_near=False)
        return context.get_dummy_value()

    return types.void(source, types.int64, types.int64), emit


@define_intrinsic
def weigh_row(
    typing_context: Any,
    cache: Any,
    logits: Any,
    start: Any,
    low: Any,
    high: Any,
    scale: Any,
    k_scales: Any,
    v_scales: Any,
    highest: Any,
    totals: Any,
    row: Any,
    sums: Any,
    width: Any,
    weights: Any,
    weights_start: Any,
) -> Typed:
    """One step of a row's softmax: from the products with a tile of KEY_TILE keys to the weights of their values.

    Keys from `low` up to `high` are seen, at least one; others get weight 0. Products, times `scale`, are logits in
    base 2. `highest[row]` is the logit of weight 1, `totals[row]` the sum of weights and `sums[row]`, `width` numbers,
    that of values; all three are brought to the new scale if a logit is higher. If the cache holds integers, products
    and weights are multiplied by the keys' and the values' scales.
    """

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        has_scales = signature.args[0].dtype == types.int8
        vector, number_type = ir.VectorType(FLOAT32, WIDTH), signature.args[13].dtype
        offsets = range(0, KEY_TILE, WIDTH)
        logit, k_scale, v_scale, sum_, weight = (
            address_at(context, builder, signature.args[i], args[i], at)
            for i, at in (
                (1, args[2]),
                (6, ir.IntType(64)(0)),
                (7, ir.IntType(64)(0)),
                (11, builder.mul(args[10], args[12])),
                (13, args[14]),
            )
        )
        highest, total = (address_at(context, builder, signature.args[i], args[i], args[10]) for i in (8, 9))
        low, count = (builder.trunc(x, INT32) for x in (args[3], builder.sub(args[4], args[3])))
        lowest = ir.Constant(vector, [LOWEST] * WIDTH)
        factor = _splat_wide(builder, args[5])
        xs, seen = [], []
        for offset in offsets:
            x = builder.fmul(
                load_vector(builder, builder.gep(logit, [INT32(offset)]), lanes=WIDTH), factor, flags=FLAGS
            )
            if has_scales:
                x = builder.fmul(
                    x, load_vector(builder, builder.gep(k_scale, [INT32(offset)]), lanes=WIDTH), flags=FLAGS
                )
            places = ir.Constant(ir.VectorType(INT32, WIDTH), list(range(offset, offset + WIDTH)))
            mask = builder.icmp_unsigned(
                "<", builder.sub(places, _splat_wide(builder, low)), _splat_wide(builder, count)
            )
            seen.append(mask)
            xs.append(builder.select(mask, x, lowest))
        best = functools.reduce(lambda a, b: _larger(builder, a, b), xs)
        lanes = WIDTH
        while lanes > 1:
            lanes //= 2
            best = _larger(builder, *(emit_shuffle(builder, best, best, part) for part in _halves(lanes)))
        before = builder.load(highest)
        after = _larger(builder, before, builder.extract_element(best, INT32(0)))
        after_wide = _splat_wide(builder, after)
        degree = 5 if number_type == types.uint16 else 7
        zero = ir.Constant(vector, [0.0] * WIDTH)
        added = zero
        for offset, x, mask in zip(offsets, xs, seen, strict=True):
            value = builder.select(mask, _exp2(builder, builder.fsub(x, after_wide), degree), zero)
            added = builder.fadd(added, value, flags=FLAGS)
            if has_scales:
                place = builder.gep(v_scale, [INT32(offset)])
                value = builder.fmul(value, load_vector(builder, place, lanes=WIDTH), flags=FLAGS)
            store_vector(builder, emit_from_float32(builder, number_type, value), builder.gep(weight, [INT32(offset)]))
        lanes = WIDTH
        while lanes > 1:
            lanes //= 2
            added = builder.fadd(*(emit_shuffle(builder, added, added, part) for part in _halves(lanes)), flags=FLAGS)
        decay = _exp2(builder, builder.fsub(_splat_wide(builder, before), after_wide), 7)
        old = builder.fmul(builder.load(total), builder.extract_element(decay, INT32(0)))
        builder.store(builder.fadd(old, builder.extract_element(added, INT32(0))), total)
        with builder.if_then(builder.fcmp_unordered("!=", before, after)):
            builder.store(after, highest)
            with _steps(builder, args[12], WIDTH) as d:
                place = builder.gep(sum_, [d])
                store_vector(builder, builder.fmul(load_vector(builder, place, lanes=WIDTH), decay, flags=FLAGS), place)
        return context.get_dummy_value()

    integer = types.int64
    flat = (cache, logits, integer, integer, integer, types.float32, k_scales, v_scales, highest, totals, integer)
    return types.void(*flat, sums, integer, weights, integer), emit


def _with_zeros(builder: Any, vector: Any, count: int) -> Any:
    """As many numbers, the rest of them zeros."""
    if vector.type.count == count:
        return vector
    zeros = ir.Constant(vector.type, [0] * vector.type.count)
    return emit_shuffle(builder, vector, zeros, range(count))


def _halves(lanes: int) -> tuple[range, range]:
    return range(lanes), range(lanes, 2 * lanes)


def _larger(builder: Any, a: Any, b: Any) -> Any:
    """The second where either is NaN."""
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


def _splat_wide(builder: Any, scalar: Any) -> Any:
    kind = ir.VectorType(scalar.type, WIDTH)
    vector = builder.insert_element(ir.Constant(kind, ir.Undefined), scalar, INT32(0))
    return builder.shuffle_vector(vector, vector, ir.Constant(ir.VectorType(INT32, WIDTH), [0] * WIDTH))


def _exp2(builder: Any, x: Any, degree: int) -> Any:
    """2 ** x for vectors of x <= 0, and 2 ** -126 below that: the Taylor series around the nearest integer."""

    def constant(value: float) -> Any:
        return ir.Constant(x.type, [value] * x.type.count)

    integers = ir.VectorType(INT32, x.type.count)
    x = builder.select(builder.fcmp_ordered("<", x, constant(-126.0)), constant(-126.0), x)
    exponent = builder.fptosi(builder.fsub(x, constant(0.5)), integers)
    rest = builder.fsub(x, builder.sitofp(exponent, x.type))
    result = constant(_EXP2[degree])
    for coefficient in _EXP2[degree - 1 :: -1]:
        result = builder.fadd(builder.fmul(result, rest, flags=FUSED), constant(coefficient), flags=FUSED)
    bits = builder.shl(builder.add(exponent, ir.Constant(integers, [127] * x.type.count)), _twenty_three(integers))
    return builder.fmul(result, builder.bitcast(bits, x.type))


def _twenty_three(integers: Any) -> Any:
    return ir.Constant(integers, [23] * integers.count)


@contextlib.contextmanager
def _steps(builder: Any, end: Any, step: int, begin: Any = None) -> Iterator[Any]:
    """A loop over begin, begin + step, ... below the end."""
    integer = ir.IntType(64)
    start = integer(0) if begin is None else begin
    with cgutils.for_range_slice(builder, start, end, integer(step), integer) as (index, _):
        yield index


def _for_rows(builder: Any, num_rows: Any, emit: Callable[[Any, int], None]) -> None:
    """Code for four rows at a time, and then for those that are left."""
    whole = builder.sub(num_rows, with_constant(num_rows, 4, builder.srem))
    with _steps(builder, whole, 4) as row:
        emit(row, 4)
    rest = builder.sub(num_rows, whole)
    for count in (3, 2, 1):
        with builder.if_then(builder.icmp_signed("==", rest, ir.IntType(64)(count))):
            emit(whole, count)
