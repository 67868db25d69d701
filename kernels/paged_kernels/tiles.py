"""The inner loops of attention, written as LLVM vectors; see vector.py.

Where the processor multiplies bfloat16 at full rate, products of tiles take pairs of bfloat16 as 32-bit integers: a
pair along the depth of the product in each.
"""

from typing import Any

from llvmlite import binding, ir
from numba import types
from numba.core import cgutils

from paged_kernels.vector import (
    _F32,
    _I32,
    LANES,
    WIDTH,
    _accumulate,
    _address,
    _from_float32,
    _int,
    _intrinsic,
    _load,
    _prefetch,
    _splat,
    _store,
    _sum_lanes,
    _to_float32,
    _Typed,
)

# Intel's instruction of this name is half as fast, so that nothing is gained there.
BF16_PAIRS = bool(binding.get_host_cpu_features().get("avx512bf16")) and binding.get_host_cpu_name().startswith("znver")

TILE_ROWS = 6  # of a product; with TILE_VECTORS registers of columns, the sums of a tile fill most registers
TILE_VECTORS = 2 if WIDTH == 8 else 4


class _BFloat(ir.Type):
    """LLVM's bfloat, which llvmlite does not have."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


@_intrinsic
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
) -> _Typed:
    """totals[r, c] += the sum over k < depth of rows[r, k] * columns[k, c], or = if the literal `from_zero` is 1.

    For TILE_ROWS rows and `num_vectors` (a literal) times WIDTH columns. Numbers are float32, or pairs of bfloat16 as
    int32. A total is summed in the order of k, whatever the literals.
    """

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        in_pairs = signature.args[3].dtype == types.int32
        element = _I32 if in_pairs else _F32
        vector = ir.VectorType(_F32, WIDTH)
        row = [
            builder.gep(
                _address(context, builder, signature.args[0], args[0], args[1]), [_int(args[2], r, builder.mul)]
            )
            for r in range(TILE_ROWS)
        ]
        first = _address(context, builder, signature.args[3], args[3], args[4])
        total = _address(context, builder, signature.args[7], args[7], args[8])
        places = [
            [
                builder.gep(total, [builder.add(_int(args[9], r, builder.mul), ir.IntType(64)(WIDTH * c))])
                for c in range(num_vectors.literal_value)
            ]
            for r in range(TILE_ROWS)
        ]
        zero = ir.Constant(vector, [0.0] * WIDTH)
        sums = [
            [
                cgutils.alloca_once_value(builder, zero if from_zero.literal_value else _load(builder, p, lanes=WIDTH))
                for p in row_places
            ]
            for row_places in places
        ]
        with cgutils.for_range(builder, args[6]) as loop:
            column = builder.gep(first, [builder.mul(loop.index, args[5])])
            values = [
                _load(builder, builder.gep(column, [_I32(WIDTH * c)]), element, WIDTH)
                for c in range(num_vectors.literal_value)
            ]
            for r in range(TILE_ROWS):
                number = builder.load(builder.gep(row[r], [loop.index]))
                same = builder.insert_element(ir.Constant(ir.VectorType(element, WIDTH), ir.Undefined), number, _I32(0))
                zeros = ir.Constant(ir.VectorType(_I32, WIDTH), [0] * WIDTH)
                same = builder.shuffle_vector(same, same, zeros)
                for place, value in zip(sums[r], values, strict=True):
                    if in_pairs:
                        builder.store(_dot_pairs(builder, builder.load(place), same, value), place)
                    else:
                        _accumulate(builder, place, same, value)
        for row_sums, row_places in zip(sums, places, strict=True):
            for partial, place in zip(row_sums, row_places, strict=True):
                _store(builder, builder.load(partial), place)
        return context.get_dummy_value()

    integer = types.int64
    flat = (rows, integer, integer, columns, integer, integer, integer, totals, integer, integer)
    return types.void(*flat, num_vectors, from_zero), emit


def _dot_pairs(builder: Any, total: Any, x: Any, y: Any) -> Any:
    """total + x[2i] * y[2i] + x[2i + 1] * y[2i + 1]"""
    pairs = ir.VectorType(_BFloat(), 2 * WIDTH)
    kind = ir.FunctionType(total.type, [total.type, pairs, pairs])
    name = f"llvm.x86.avx512bf16.dpbf16ps.{32 * WIDTH}"
    function = builder.module.globals.get(name) or ir.Function(builder.module, kind, name)
    return builder.call(function, [total, builder.bitcast(x, pairs), builder.bitcast(y, pairs)])


@_intrinsic
def copy_numbers(typing_context: Any, source: Any, start: Any, target: Any, target_start: Any, length: Any) -> _Typed:
    """Copy `length` numbers, a multiple of LANES, each rounded to the target's type if that is another one."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind, target_kind = signature.args[0].dtype, signature.args[2].dtype
        read = _address(context, builder, signature.args[0], args[0], args[1])
        write = _address(context, builder, signature.args[2], args[2], args[3])
        with cgutils.for_range(builder, _int(args[4], LANES, builder.sdiv)) as loop:
            offset = _int(loop.index, LANES, builder.mul)
            value = _load(builder, builder.gep(read, [offset]), context.get_data_type(kind))
            if kind != target_kind:
                value = _round(builder, target_kind, _to_float32(builder, kind, value))
            _store(builder, value, builder.gep(write, [offset]))
        return context.get_dummy_value()

    return types.void(source, types.int64, target, types.int64, types.int64), emit


def _round(builder: Any, kind: Any, value: Any) -> Any:
    """`vector._from_float32` in one instruction, where bfloat16 has any."""
    if kind != types.uint16 or not BF16_PAIRS:
        return _from_float32(builder, kind, value)
    rounded = builder.fptrunc(value, ir.VectorType(_BFloat(), value.type.count))
    return builder.bitcast(rounded, ir.VectorType(ir.IntType(16), value.type.count))


@_intrinsic
def copy_row_of_units(
    typing_context: Any, source: Any, start: Any, stride: Any, target: Any, target_start: Any, length: Any
) -> _Typed:
    """Copy `length` numbers, a multiple of LANES; if the target holds pairs, each with its like in the next row."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = context.get_data_type(signature.args[0].dtype)
        read = _address(context, builder, signature.args[0], args[0], args[1])
        write = _address(context, builder, signature.args[3], args[3], args[4])
        with cgutils.for_range(builder, _int(args[5], LANES, builder.sdiv)) as loop:
            offset = _int(loop.index, LANES, builder.mul)
            unit = _load(builder, builder.gep(read, [offset]), kind)
            if signature.args[3].dtype == types.int32:
                second = _load(builder, builder.gep(read, [builder.add(offset, args[2])]), kind)
                low, high = (builder.zext(half, ir.VectorType(_I32, LANES)) for half in (unit, second))
                unit = builder.or_(low, builder.shl(high, ir.Constant(high.type, [16] * LANES)))
            _store(builder, unit, builder.gep(write, [offset]))
        return context.get_dummy_value()

    integer = types.int64
    return types.void(source, integer, integer, target, integer, integer), emit


@_intrinsic
def transpose16(
    typing_context: Any, source: Any, start: Any, stride: Any, target: Any, target_start: Any, target_stride: Any
) -> _Typed:
    """Turn 16 rows of 16 numbers of 32 bits into columns."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        element = context.get_data_type(signature.args[0].dtype)
        read = _address(context, builder, signature.args[0], args[0], args[1])
        write = _address(context, builder, signature.args[3], args[3], args[4])
        rows = [_load(builder, builder.gep(read, [_int(args[2], r, builder.mul)]), element, 16) for r in range(16)]
        for distance in (8, 4, 2, 1):  # swap the off-diagonal quarters of ever smaller squares
            for r in range(16):
                if r & distance:
                    continue
                a, b = rows[r], rows[r + distance]
                low = [i if not i & distance else 16 + i - distance for i in range(16)]
                high = [i + distance if not i & distance else 16 + i for i in range(16)]
                rows[r], rows[r + distance] = _mix(builder, a, b, low), _mix(builder, a, b, high)
        for r, row in enumerate(rows):
            _store(builder, row, builder.gep(write, [_int(args[5], r, builder.mul)]))
        return context.get_dummy_value()

    integer = types.int64
    return types.void(source, integer, integer, target, integer, integer), emit


def _mix(builder: Any, a: Any, b: Any, indices: Any) -> Any:
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(_I32, len(indices)), indices))


@_intrinsic
def dot_keys(
    typing_context: Any,
    rows: Any,
    rows_start: Any,
    keys: Any,
    keys_start: Any,
    ahead: Any,
    width: Any,
    products: Any,
    products_start: Any,
    products_stride: Any,
    num_rows: Any,
) -> _Typed:
    """Dot products of `num_rows` (a literal) float32 rows with four keys that follow one another, in their own type.

    `width` is a multiple of LANES. The keys that are `ahead` numbers further are brought into the cache meanwhile.
    """

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        width, stored_type = args[5], signature.args[2].dtype
        row = _address(context, builder, signature.args[0], args[0], args[1])
        key = _address(context, builder, signature.args[2], args[2], args[3])
        element = context.get_data_type(stored_type)
        zero = ir.Constant(ir.VectorType(_F32, LANES), [0.0] * LANES)
        sums = [[cgutils.alloca_once_value(builder, zero) for _ in range(4)] for _ in range(num_rows.literal_value)]
        with cgutils.for_range(builder, _int(width, LANES, builder.sdiv)) as loop:
            offset = _int(loop.index, LANES, builder.mul)
            values = []
            for k in range(4):
                place = builder.gep(key, [builder.add(offset, _int(width, k, builder.mul))])
                _prefetch(builder, builder.gep(place, [args[4]]))
                values.append(_to_float32(builder, stored_type, _load(builder, place, element)))
            for r, row_sums in enumerate(sums):
                x = _load(builder, builder.gep(row, [builder.add(offset, _int(width, r, builder.mul))]))
                for place, value in zip(row_sums, values, strict=True):
                    _accumulate(builder, place, x, value)
        for r, row_sums in enumerate(sums):
            dots = _sum_lanes(builder, [builder.load(place) for place in row_sums])
            target = builder.add(args[7], _int(args[8], r, builder.mul))
            _store(builder, dots, _address(context, builder, signature.args[6], args[6], target))
        return context.get_dummy_value()

    integer = types.int64
    return types.void(rows, integer, keys, integer, integer, integer, products, integer, integer, num_rows), emit


@_intrinsic
def add_values(
    typing_context: Any,
    weights: Any,
    weights_start: Any,
    weights_stride: Any,
    values: Any,
    values_start: Any,
    ahead: Any,
    num_values: Any,
    width: Any,
    totals: Any,
    totals_start: Any,
    num_rows: Any,
    num_vectors: Any,
) -> _Typed:
    """Add to each of `num_rows` totals the values, which follow one another, each times the row's weight for it.

    Of rows that are `width` apart, `num_vectors` times LANES numbers are added; both are literals.
    """

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        width, stored_type = args[7], signature.args[3].dtype
        element = context.get_data_type(stored_type)
        weight = _address(context, builder, signature.args[0], args[0], args[1])
        first = _address(context, builder, signature.args[3], args[3], args[4])
        total = _address(context, builder, signature.args[8], args[8], args[9])
        offsets = [ir.IntType(64)(LANES * i) for i in range(num_vectors.literal_value)]
        places = [
            [builder.gep(total, [builder.add(_int(width, r, builder.mul), offset)]) for offset in offsets]
            for r in range(num_rows.literal_value)
        ]
        sums = [[cgutils.alloca_once_value(builder, _load(builder, place)) for place in row] for row in places]
        with cgutils.for_range(builder, args[6]) as loop:
            value = builder.gep(first, [builder.mul(loop.index, width)])
            loaded = []
            for offset in offsets:
                place = builder.gep(value, [offset])
                _prefetch(builder, builder.gep(place, [args[5]]))
                loaded.append(_to_float32(builder, stored_type, _load(builder, place, element)))
            for r, row_sums in enumerate(sums):
                place = builder.gep(weight, [builder.add(loop.index, _int(args[2], r, builder.mul))])
                factor = _splat(builder, builder.load(place))
                for partial, vector in zip(row_sums, loaded, strict=True):
                    _accumulate(builder, partial, factor, vector)
        for row_sums, row_places in zip(sums, places, strict=True):
            for partial, place in zip(row_sums, row_places, strict=True):
                _store(builder, builder.load(partial), place)
        return context.get_dummy_value()

    integer = types.int64
    flat = (weights, integer, integer, values, integer, integer, integer, integer, totals, integer)
    return types.void(*flat, num_rows, num_vectors), emit
