"""The inner loops of the CPU kernels, written as LLVM vectors.

LLVM's own vectoriser guards such loops with alias checks and tails, which at the length of a head cost more than the
loop. Here rows of float32 are a whole number of `LANES` long, padded with zeros, and loads run over nothing else.

Numba has no 16-bit floats: arrays of uint16 hold the bits of bfloat16, arrays of int16 those of float16.

Numba's disk cache does not notice a change of this file: after one, touch the files that import it.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from llvmlite import binding, ir
from numba import types
from numba.core import cgutils, config
from numba.extending import intrinsic

LANES = 16


def _features() -> Mapping[str, bool]:
    """What the CPU has that Numba compiles for: this one, unless NUMBA_CPU_FEATURES names another."""
    if config.CPU_FEATURES is None:
        features: Mapping[str, bool] = binding.get_host_cpu_features()
        return features
    return {name[1:]: name[0] == "+" for name in config.CPU_FEATURES.split(",") if name}


_FEATURES = _features()
DOTS_BFLOAT16 = bool(_FEATURES.get("avx512bf16"))
BFLOAT16_IS_FAST = DOTS_BFLOAT16 and (config.CPU_NAME or binding.get_host_cpu_name()).startswith("znver")
"""Whether products of bfloat16 run at twice the rate of float32's, and not at half of it as on Intel's CPUs."""
WIDTH = 16 if _FEATURES.get("avx512f") else 8 if _FEATURES.get("avx2") else 4  # float32 numbers in a register
DOTS_QUADS = bool(_FEATURES.get("avx512vnni" if WIDTH == 16 else "avxvnni"))
"""Whether one instruction adds four products of bytes."""
DOTS_NIBBLES = bool(_FEATURES.get("avx2"))
"""Whether two instructions do, of weights of 4 bits."""
NUM_SUMS = 12 if WIDTH == 8 else 24  # how many registers can hold sums while others hold what is multiplied
PAIR = 2 * WIDTH

FLOAT32 = ir.FloatType()
INT32 = ir.IntType(32)
FLAGS = ("reassoc", "contract", "nsz")
FUSED = ("contract",)

Typed: TypeAlias = tuple[Any, Callable[..., Any]]  # a Numba signature and the function that emits its code


def define_intrinsic(define: Callable[..., Typed]) -> Any:
    return intrinsic(prefer_literal=True)(define)


@define_intrinsic
def to_float32(typing_context: Any, number: Any) -> Typed:
    """The value of a number as it is stored in an array of its type."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return emit_to_float32(builder, signature.args[0], args[0])

    return types.float32(number), emit


@define_intrinsic
def from_float32(typing_context: Any, number: Any, array: Any) -> Typed:
    """A float32 as it is stored in this array, rounded to nearest, ties to even."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return emit_from_float32(builder, signature.return_type, args[0])

    return array.dtype(types.float32, array), emit


@define_intrinsic
def pointer(typing_context: Any, address: Any, like: Any) -> Typed:
    """The address of a number as a pointer to numbers of this array's type, for `numba.carray`."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

    return types.CPointer(like.dtype)(types.int64, like), emit


@define_intrinsic
def copy_to_float32(typing_context: Any, source: Any, start: Any, target: Any, target_start: Any, length: Any) -> Typed:
    """Copy `length` numbers, a multiple of LANES, from one flat position to another."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        length = args[4]
        read = address_at(context, builder, signature.args[0], args[0], args[1])
        write = address_at(context, builder, signature.args[2], args[2], args[3])
        with cgutils.for_range(builder, with_constant(length, LANES, builder.sdiv)) as loop:
            offset = with_constant(loop.index, LANES, builder.mul)
            stored = load_vector(builder, builder.gep(read, [offset]), context.get_data_type(signature.args[0].dtype))
            value = emit_to_float32(builder, signature.args[0].dtype, stored)
            store_vector(builder, value, builder.gep(write, [offset]))
        return context.get_dummy_value()

    return types.void(source, types.int64, target, types.int64, types.int64), emit


@define_intrinsic
def rotate_halves(typing_context: Any, numbers: Any, start: Any, cos: Any, sin: Any, half: Any) -> Typed:
    """Turn each of `half` numbers, a multiple of LANES, with its like of the `half` that follow, in place.

    cos and sin are float32 and have an entry for every number.
    """

    def multiply(builder: Any, x: Any, y: Any) -> Any:
        return builder.fmul(x, y, flags=FLAGS)

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        stored_type, half, zero = signature.args[0].dtype, args[4], ir.Constant(args[1].type, 0)
        starts = {0: args[1], 2: zero, 3: zero}
        arrays = [address_at(context, builder, signature.args[i], args[i], start) for i, start in starts.items()]
        with cgutils.for_range(builder, with_constant(half, LANES, builder.sdiv)) as loop:
            first = with_constant(loop.index, LANES, builder.mul)
            places = [[builder.gep(array, [i]) for i in (first, builder.add(first, half))] for array in arrays]
            element = context.get_data_type(stored_type)
            x, y = (emit_to_float32(builder, stored_type, load_vector(builder, place, element)) for place in places[0])
            (cos_x, cos_y), (sin_x, sin_y) = ([load_vector(builder, place) for place in row] for row in places[1:])
            turned_x = builder.fsub(multiply(builder, x, cos_x), multiply(builder, y, sin_x), flags=FLAGS)
            turned_y = builder.fadd(multiply(builder, y, cos_y), multiply(builder, x, sin_y), flags=FLAGS)
            for turned, place in zip((turned_x, turned_y), places[0], strict=True):
                store_vector(builder, emit_from_float32(builder, stored_type, turned), place)
        return context.get_dummy_value()

    return types.void(numbers, types.int64, cos, sin, types.int64), emit


@define_intrinsic
def dot4(
    typing_context: Any,
    row: Any,
    start: Any,
    rows: Any,
    rows_start: Any,
    width: Any,
    products: Any,
    products_start: Any,
) -> Typed:
    """Dot products of one row with four that follow one another, `width` numbers each."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        width = args[4]
        one = address_at(context, builder, signature.args[0], args[0], args[1])
        first = address_at(context, builder, signature.args[2], args[2], args[3])
        four = [builder.gep(first, [with_constant(width, i, builder.mul)]) for i in range(4)]
        sums = [
            cgutils.alloca_once_value(builder, ir.Constant(ir.VectorType(FLOAT32, LANES), [0.0] * LANES)) for _ in four
        ]
        with cgutils.for_range(builder, with_constant(width, LANES, builder.sdiv)) as loop:
            offset = with_constant(loop.index, LANES, builder.mul)
            x = load_vector(builder, builder.gep(one, [offset]))
            for other, total in zip(four, sums, strict=True):
                accumulate(builder, total, x, load_vector(builder, builder.gep(other, [offset])))
        total = sum_lanes(builder, [builder.load(total) for total in sums])
        store_vector(builder, total, address_at(context, builder, signature.args[5], args[5], args[6]))
        return context.get_dummy_value()

    integer = types.int64
    return types.void(row, integer, rows, integer, integer, products, integer), emit


@define_intrinsic
def add_weighted(
    typing_context: Any,
    weights: Any,
    weights_start: Any,
    rows: Any,
    rows_start: Any,
    num_rows: Any,
    width: Any,
    total: Any,
    total_start: Any,
    num_vectors: Any,
) -> Typed:
    """Add rows, each times its weight, to a total: `num_vectors` LANES (a literal) of rows that are `width` apart."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        width = args[5]
        offsets = [ir.Constant(width.type, LANES * i) for i in range(num_vectors.literal_value)]
        weight = address_at(context, builder, signature.args[0], args[0], args[1])
        first = address_at(context, builder, signature.args[2], args[2], args[3])
        target = address_at(context, builder, signature.args[6], args[6], args[7])
        sums = [cgutils.alloca_once_value(builder, load_vector(builder, builder.gep(target, [o]))) for o in offsets]
        with cgutils.for_range(builder, args[4]) as loop:
            factor = emit_splat(builder, builder.load(builder.gep(weight, [loop.index])))
            row = builder.gep(first, [builder.mul(loop.index, width)])
            for offset, partial in zip(offsets, sums, strict=True):
                accumulate(builder, partial, factor, load_vector(builder, builder.gep(row, [offset])))
        for offset, partial in zip(offsets, sums, strict=True):
            store_vector(builder, builder.load(partial), builder.gep(target, [offset]))
        return context.get_dummy_value()

    integer = types.int64
    return types.void(weights, integer, rows, integer, integer, integer, total, integer, num_vectors), emit


@define_intrinsic
def copy_from_float32(
    typing_context: Any, source: Any, start: Any, target: Any, target_start: Any, length: Any
) -> Typed:
    """The way back: copy `length` numbers, a multiple of LANES, rounded as `from_float32` does."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        read = address_at(context, builder, signature.args[0], args[0], args[1])
        write = address_at(context, builder, signature.args[2], args[2], args[3])
        with cgutils.for_range(builder, with_constant(args[4], LANES, builder.sdiv)) as loop:
            offset = with_constant(loop.index, LANES, builder.mul)
            value = load_vector(builder, builder.gep(read, [offset]))
            stored = emit_from_float32(builder, signature.args[2].dtype, value)
            store_vector(builder, stored, builder.gep(write, [offset]))
        return context.get_dummy_value()

    return types.void(source, types.int64, target, types.int64, types.int64), emit


@define_intrinsic
def copy_in_pairs(typing_context: Any, source: Any, start: Any, target: Any, target_start: Any, length: Any) -> Typed:
    """`copy_to_float32` that changes the order of every `PAIR` numbers: the even-numbered first, then the others.

    That is the order in which bfloat16 widens best: one instruction for each half of a vector of pairs. From bfloat16
    to bfloat16 it is a plain copy.
    """

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        read = address_at(context, builder, signature.args[0], args[0], args[1])
        write = address_at(context, builder, signature.args[2], args[2], args[3])
        with cgutils.for_range(builder, with_constant(args[4], PAIR, builder.sdiv)) as loop:
            offset = with_constant(loop.index, PAIR, builder.mul)
            stored_type, source_address = signature.args[0].dtype, builder.gep(read, [offset])
            element = context.get_data_type(stored_type)
            if signature.args[2].dtype == types.uint16:
                assert stored_type == types.uint16
                store_vector(builder, load_vector(builder, source_address, element, PAIR), builder.gep(write, [offset]))
            else:
                for i, half in enumerate(_load_pairs(builder, stored_type, element, source_address)):
                    store_vector(builder, half, builder.gep(write, [with_constant(offset, i * WIDTH, builder.add)]))
        return context.get_dummy_value()

    return types.void(source, types.int64, target, types.int64, types.int64), emit


@define_intrinsic
def add_dots(
    typing_context: Any,
    rows: Any,
    rows_start: Any,
    rows_stride: Any,
    columns: Any,
    columns_start: Any,
    columns_stride: Any,
    width: Any,
    totals: Any,
    totals_start: Any,
    totals_stride: Any,
    ahead: Any,
    num_rows: Any,
    num_columns: Any,
) -> Typed:
    """Add to totals[r, c] the dot product of rows[r] with columns[c], `width` (a multiple of PAIR) numbers each.

    Rows are float32 in the order of `copy_in_pairs`; so are columns, unless they are 16-bit floats in plain order.
    Where BFLOAT16_IS_FAST, both may be bfloat16 in plain order. `num_rows` and `num_columns`, a multiple of four, are
    literals. A total does not depend on them, to the last bit: every lane sums in order, without rounding products, and
    the lanes are always summed in the same way. Meanwhile the 16-bit columns that are `ahead` of these in memory, by so
    many numbers, are fetched into the caches.
    """

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        def addresses(i: int, count: int) -> list[Any]:
            first = address_at(context, builder, signature.args[i], args[i], args[i + 1])
            return [builder.gep(first, [with_constant(args[i + 2], j, builder.mul)]) for j in range(count)]

        multiplies_pairs = signature.args[0].dtype == types.uint16

        def prefetch(address: Any) -> None:
            emit_prefetch(builder, builder.gep(address, [args[10]]))

        def load_pair(address: Any) -> Callable[[int], Any]:
            stored_type = signature.args[3].dtype
            if stored_type == types.float32:
                return lambda i: load_vector(builder, builder.gep(address, [INT32(i * WIDTH)]), lanes=WIDTH)
            prefetch(address)
            return _load_pairs(builder, stored_type, context.get_data_type(stored_type), address).__getitem__

        xs = addresses(0, num_rows.literal_value)
        ws = addresses(3, num_columns.literal_value)
        ts = addresses(7, num_rows.literal_value)
        order = [(r, c) for r in range(len(xs)) for c in range(len(ws))]
        if len(xs) < len(ws):  # LLVM keeps close to this order; so registers hold the fewer ones and pass by the others
            order.sort(key=lambda pair: pair[1])
        zero = ir.Constant(ir.VectorType(FLOAT32, WIDTH), [0.0] * WIDTH)
        sums = [[cgutils.alloca_once_value(builder, zero) for _ in ws] for _ in xs]
        with cgutils.for_range(builder, with_constant(args[6], PAIR, builder.sdiv)) as loop:
            offset = with_constant(loop.index, PAIR, builder.mul)
            if multiplies_pairs:
                addresses_of_step = [[builder.gep(one, [offset]) for one in arrays] for arrays in (xs, ws)]
                for address in addresses_of_step[1]:
                    prefetch(address)
                half = ir.IntType(16)
                row_values, column_values = (
                    [load_vector(builder, address, half, PAIR) for address in step] for step in addresses_of_step
                )
                for r, c in order:
                    total = add_pair_products(builder, builder.load(sums[r][c]), row_values[r], column_values[c])
                    builder.store(total, sums[r][c])
            else:
                pairs = [load_pair(builder.gep(w, [offset])) for w in ws]
                for i in range(2):
                    place = with_constant(offset, i * WIDTH, builder.add)
                    row_values = [load_vector(builder, builder.gep(x, [place]), lanes=WIDTH) for x in xs]
                    column_values = [pair(i) for pair in pairs]
                    for r, c in order:
                        product = builder.fmul(row_values[r], column_values[c], flags=FUSED)
                        builder.store(builder.fadd(product, builder.load(sums[r][c]), flags=FUSED), sums[r][c])
        for t, row_sums in zip(ts, sums, strict=True):
            for c in range(0, len(ws), 4):
                address = builder.gep(t, [ir.IntType(64)(c)])
                dots = sum_lanes(builder, [builder.load(total) for total in row_sums[c : c + 4]], FUSED)
                store_vector(builder, builder.fadd(load_vector(builder, address, lanes=4), dots, flags=FUSED), address)
        return context.get_dummy_value()

    integer = types.int64
    flat = (rows, integer, integer, columns, integer, integer, integer, totals, integer, integer, integer)
    return types.void(*flat, num_rows, num_columns), emit


def _load_pairs(builder: Any, stored_type: Any, element: Any, address: Any) -> Sequence[Any]:
    """The even-numbered of the next PAIR numbers and the others, as float32."""
    stored = load_vector(builder, address, element, PAIR)
    if stored_type != types.uint16:
        evens_and_odds = [emit_shuffle(builder, stored, stored, range(i, PAIR, 2)) for i in range(2)]
        return [emit_to_float32(builder, stored_type, half) for half in evens_and_odds]
    bits = builder.bitcast(stored, ir.VectorType(INT32, WIDTH))
    halves = builder.shl(bits, _constant(bits, 16)), builder.and_(bits, _constant(bits, 0xFFFF0000))
    return [builder.bitcast(half, ir.VectorType(FLOAT32, WIDTH)) for half in halves]


def emit_to_float32(builder: Any, stored_type: Any, stored: Any) -> Any:
    """Code for a number or a vector of them."""
    if stored_type == types.float32:
        return stored
    if stored_type == types.int16:
        return builder.fpext(builder.bitcast(stored, _like(stored, ir.HalfType())), _like(stored, FLOAT32))
    if stored_type == types.int8:
        return builder.sitofp(stored, _like(stored, FLOAT32))
    bits = builder.zext(stored, _like(stored, INT32))
    return builder.bitcast(builder.shl(bits, _constant(bits, 16)), _like(stored, FLOAT32))


def emit_from_float32(builder: Any, stored_type: Any, value: Any) -> Any:
    """Code for a number or a vector of them."""
    if stored_type == types.float32:
        return value
    half = _like(value, ir.IntType(16))
    if stored_type == types.int16 or DOTS_BFLOAT16:
        kind = ir.HalfType() if stored_type == types.int16 else BFloat16()
        return builder.bitcast(builder.fptrunc(value, _like(value, kind)), half)
    bits = builder.bitcast(value, _like(value, INT32))
    sixteen = _constant(bits, 16)
    is_odd = builder.and_(builder.lshr(bits, sixteen), _constant(bits, 1))
    rounded = builder.add(builder.add(bits, _constant(bits, 0x7FFF)), is_odd)
    is_nan = builder.fcmp_unordered("uno", value, value)
    return builder.trunc(builder.lshr(builder.select(is_nan, _constant(bits, 0x7FC00000), rounded), sixteen), half)


class BFloat16(ir.Type):  # type: ignore[misc]
    """LLVM's bfloat, which llvmlite does not know."""

    def __str__(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BFloat16)

    def __hash__(self) -> int:
        return hash(BFloat16)


def add_pair_products(builder: Any, total: Any, x: Any, y: Any) -> Any:
    """total + x * y of PAIR bfloat16 numbers each, where lane i sums the products 2 * i and 2 * i + 1."""
    pairs = ir.VectorType(BFloat16(), PAIR)
    function = cgutils.get_or_insert_function(
        builder.module,
        ir.FunctionType(total.type, [total.type, pairs, pairs]),
        f"llvm.x86.avx512bf16.dpbf16ps.{32 * WIDTH}",
    )
    return builder.call(function, [total, builder.bitcast(x, pairs), builder.bitcast(y, pairs)])


def _like(value: Any, element: Any) -> Any:
    """This element type, as a vector if the value is one."""
    return ir.VectorType(element, value.type.count) if isinstance(value.type, ir.VectorType) else element


def _constant(value: Any, number: int) -> Any:
    return ir.Constant(value.type, [number] * value.type.count if isinstance(value.type, ir.VectorType) else number)


def with_constant(value: Any, number: int, operation: Callable[[Any, Any], Any]) -> Any:
    return operation(value, ir.Constant(value.type, number))


def address_at(context: Any, builder: Any, array_type: Any, array: Any, position: Any) -> Any:
    """Address of a flat position in a C-contiguous array."""
    return builder.gep(context.make_array(array_type)(context, builder, array).data, [position])


def load_vector(builder: Any, address: Any, element: Any = FLOAT32, lanes: int = LANES) -> Any:
    vector = ir.VectorType(element, lanes)
    return builder.load(builder.bitcast(address, vector.as_pointer()), align=2 if element == ir.IntType(16) else 4)


def store_vector(builder: Any, value: Any, address: Any) -> None:
    align = 2 if value.type.element == ir.IntType(16) else 4
    builder.store(value, builder.bitcast(address, value.type.as_pointer()), align=align)


def accumulate(builder: Any, total: Any, x: Any, y: Any) -> None:
    """total += x * y"""
    product = builder.fmul(x, y, flags=FLAGS)
    builder.store(builder.fadd(product, builder.load(total), flags=FLAGS), total)


def emit_prefetch(builder: Any, address: Any, *, is_near: bool = True) -> None:
    """Bring what is, or would be, at this address into the caches, for reading: all of them, or all but the nearest."""
    pointer = ir.IntType(8).as_pointer()
    function = builder.module.declare_intrinsic(
        "llvm.prefetch", [pointer], ir.FunctionType(ir.VoidType(), [pointer, *[INT32] * 3])
    )
    read, keep, data = INT32(0), INT32(3 if is_near else 2), INT32(1)
    builder.call(function, [builder.bitcast(address, pointer), read, keep, data])


def emit_splat(builder: Any, scalar: Any) -> Any:
    vector = ir.Constant(ir.VectorType(scalar.type, LANES), ir.Undefined)
    vector = builder.insert_element(vector, scalar, INT32(0))
    return emit_shuffle(builder, vector, vector, [0] * LANES)


def emit_shuffle(builder: Any, a: Any, b: Any, indices: Sequence[int]) -> Any:
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(INT32, len(indices)), list(indices)))


def sum_lanes(builder: Any, vectors: Sequence[Any], flags: Sequence[str] = FLAGS) -> Any:
    """The sums over the lanes of four vectors, as a vector of four: 13 instructions where one by one takes 32."""
    a, b, c, d = vectors
    lanes = a.type.count

    def add(x: Any, y: Any, low: Sequence[int], high: Sequence[int]) -> Any:
        return builder.fadd(emit_shuffle(builder, x, y, low), emit_shuffle(builder, x, y, high), flags=flags)

    def add_in_quarters(x: Any, y: Any, low: Sequence[int], high: Sequence[int]) -> Any:
        quarters = range(0, lanes, 4)
        return add(x, y, [q + i for q in quarters for i in low], [q + i for q in quarters for i in high])

    ab = add_in_quarters(a, b, (0, lanes, 1, lanes + 1), (2, lanes + 2, 3, lanes + 3))
    cd = add_in_quarters(c, d, (0, lanes, 1, lanes + 1), (2, lanes + 2, 3, lanes + 3))
    total = add_in_quarters(ab, cd, (0, 1, lanes, lanes + 1), (2, 3, lanes + 2, lanes + 3))
    while lanes > 4:
        lanes //= 2
        total = add(total, total, range(lanes), range(lanes, 2 * lanes))
    return total
