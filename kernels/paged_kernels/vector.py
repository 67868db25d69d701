"""The inner loops of the CPU kernels, written as LLVM vectors.

LLVM's own vectoriser guards such loops with alias checks and tails, which at the length of a head cost more than the
loop. Here rows of float32 are a whole number of `LANES` long, padded with zeros, and loads run over nothing else.

Numba has no 16-bit floats: arrays of uint16 hold the bits of bfloat16, arrays of int16 those of float16.

Numba's disk cache does not notice a change of this file: after one, touch cpu.py.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

LANES = 16

_F32 = ir.FloatType()
_I32 = ir.IntType(32)
_FLAGS = ("reassoc", "contract", "nsz")

_Typed: TypeAlias = tuple[Any, Callable[..., Any]]  # a Numba signature and the function that emits its code


def _intrinsic(define: Callable[..., _Typed]) -> Any:
    return intrinsic(prefer_literal=True)(define)


@_intrinsic
def to_float32(typing_context: Any, number: Any) -> _Typed:
    """The value of a number as it is stored in an array of its type."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _to_float32(builder, signature.args[0], args[0])

    return types.float32(number), emit


@_intrinsic
def from_float32(typing_context: Any, number: Any, array: Any) -> _Typed:
    """A float32 as it is stored in this array, rounded to nearest, ties to even."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _from_float32(builder, signature.return_type, args[0])

    return array.dtype(types.float32, array), emit


@_intrinsic
def copy_to_float32(
    typing_context: Any, source: Any, start: Any, target: Any, target_start: Any, length: Any
) -> _Typed:
    """Copy `length` numbers, a multiple of LANES, from one flat position to another."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        length = args[4]
        read = _address(context, builder, signature.args[0], args[0], args[1])
        write = _address(context, builder, signature.args[2], args[2], args[3])
        with cgutils.for_range(builder, _int(length, LANES, builder.sdiv)) as loop:
            offset = _int(loop.index, LANES, builder.mul)
            stored = _load(builder, builder.gep(read, [offset]), context.get_data_type(signature.args[0].dtype))
            value = _to_float32(builder, signature.args[0].dtype, stored)
            _store(builder, value, builder.gep(write, [offset]))
        return context.get_dummy_value()

    return types.void(source, types.int64, target, types.int64, types.int64), emit


@_intrinsic
def dot4(
    typing_context: Any,
    row: Any,
    start: Any,
    rows: Any,
    rows_start: Any,
    width: Any,
    products: Any,
    products_start: Any,
) -> _Typed:
    """Dot products of one row with four that follow one another, `width` numbers each."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        width = args[4]
        one = _address(context, builder, signature.args[0], args[0], args[1])
        first = _address(context, builder, signature.args[2], args[2], args[3])
        four = [builder.gep(first, [_int(width, i, builder.mul)]) for i in range(4)]
        sums = [
            cgutils.alloca_once_value(builder, ir.Constant(ir.VectorType(_F32, LANES), [0.0] * LANES)) for _ in four
        ]
        with cgutils.for_range(builder, _int(width, LANES, builder.sdiv)) as loop:
            offset = _int(loop.index, LANES, builder.mul)
            x = _load(builder, builder.gep(one, [offset]))
            for other, total in zip(four, sums, strict=True):
                _accumulate(builder, total, x, _load(builder, builder.gep(other, [offset])))
        total = _sum_lanes(builder, [builder.load(total) for total in sums])
        _store(builder, total, _address(context, builder, signature.args[5], args[5], args[6]))
        return context.get_dummy_value()

    integer = types.int64
    return types.void(row, integer, rows, integer, integer, products, integer), emit


@_intrinsic
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
) -> _Typed:
    """Add rows, each times its weight, to a total: `num_vectors` LANES (a literal) of rows that are `width` apart."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        width = args[5]
        offsets = [ir.Constant(width.type, LANES * i) for i in range(num_vectors.literal_value)]
        weight = _address(context, builder, signature.args[0], args[0], args[1])
        first = _address(context, builder, signature.args[2], args[2], args[3])
        target = _address(context, builder, signature.args[6], args[6], args[7])
        sums = [cgutils.alloca_once_value(builder, _load(builder, builder.gep(target, [o]))) for o in offsets]
        with cgutils.for_range(builder, args[4]) as loop:
            factor = _splat(builder, builder.load(builder.gep(weight, [loop.index])))
            row = builder.gep(first, [builder.mul(loop.index, width)])
            for offset, partial in zip(offsets, sums, strict=True):
                _accumulate(builder, partial, factor, _load(builder, builder.gep(row, [offset])))
        for offset, partial in zip(offsets, sums, strict=True):
            _store(builder, builder.load(partial), builder.gep(target, [offset]))
        return context.get_dummy_value()

    integer = types.int64
    return types.void(weights, integer, rows, integer, integer, integer, total, integer, num_vectors), emit


def _to_float32(builder: Any, stored_type: Any, stored: Any) -> Any:
    """Code for a number or a vector of them."""
    if stored_type == types.float32:
        return stored
    if stored_type == types.int16:
        return builder.fpext(builder.bitcast(stored, _like(stored, ir.HalfType())), _like(stored, _F32))
    bits = builder.zext(stored, _like(stored, _I32))
    return builder.bitcast(builder.shl(bits, _constant(bits, 16)), _like(stored, _F32))


def _from_float32(builder: Any, stored_type: Any, value: Any) -> Any:
    """Code for a number."""
    if stored_type == types.float32:
        return value
    if stored_type == types.int16:
        return builder.bitcast(builder.fptrunc(value, ir.HalfType()), ir.IntType(16))
    bits = builder.bitcast(value, _I32)
    is_odd = builder.and_(builder.lshr(bits, _I32(16)), _I32(1))
    rounded = builder.add(builder.add(bits, _I32(0x7FFF)), is_odd)
    is_nan = builder.fcmp_unordered("uno", value, value)
    return builder.trunc(builder.lshr(builder.select(is_nan, _I32(0x7FC00000), rounded), _I32(16)), ir.IntType(16))


def _like(value: Any, element: Any) -> Any:
    """This element type, as a vector if the value is one."""
    return ir.VectorType(element, value.type.count) if isinstance(value.type, ir.VectorType) else element


def _constant(value: Any, number: int) -> Any:
    return ir.Constant(value.type, [number] * LANES if isinstance(value.type, ir.VectorType) else number)


def _int(value: Any, number: int, operation: Callable[[Any, Any], Any]) -> Any:
    return operation(value, ir.Constant(value.type, number))


def _address(context: Any, builder: Any, array_type: Any, array: Any, position: Any) -> Any:
    """Address of a flat position in a C-contiguous array."""
    return builder.gep(context.make_array(array_type)(context, builder, array).data, [position])


def _load(builder: Any, address: Any, element: Any = _F32) -> Any:
    vector = ir.VectorType(element, LANES)
    return builder.load(builder.bitcast(address, vector.as_pointer()), align=2 if element == ir.IntType(16) else 4)


def _store(builder: Any, value: Any, address: Any) -> None:
    builder.store(value, builder.bitcast(address, value.type.as_pointer()), align=4)


def _accumulate(builder: Any, total: Any, x: Any, y: Any) -> None:
    """total += x * y"""
    product = builder.fmul(x, y, flags=_FLAGS)
    builder.store(builder.fadd(product, builder.load(total), flags=_FLAGS), total)


def _splat(builder: Any, scalar: Any) -> Any:
    vector = ir.Constant(ir.VectorType(_F32, LANES), ir.Undefined)
    vector = builder.insert_element(vector, scalar, _I32(0))
    return _shuffle(builder, vector, vector, [0] * LANES)


def _shuffle(builder: Any, a: Any, b: Any, indices: Sequence[int]) -> Any:
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(_I32, len(indices)), list(indices)))


def _sum_lanes(builder: Any, vectors: Sequence[Any]) -> Any:
    """The sums over the lanes of four vectors, as a vector of four: 13 instructions where one by one takes 32."""

    def add(x: Any, y: Any, low: Sequence[int], high: Sequence[int]) -> Any:
        return builder.fadd(_shuffle(builder, x, y, low), _shuffle(builder, x, y, high), flags=_FLAGS)

    def add_in_quarters(x: Any, y: Any, low: Sequence[int], high: Sequence[int]) -> Any:
        quarters = range(0, LANES, 4)
        return add(x, y, [q + i for q in quarters for i in low], [q + i for q in quarters for i in high])

    a, b, c, d = vectors
    ab = add_in_quarters(a, b, (0, LANES, 1, LANES + 1), (2, LANES + 2, 3, LANES + 3))
    cd = add_in_quarters(c, d, (0, LANES, 1, LANES + 1), (2, LANES + 2, 3, LANES + 3))
    total = add_in_quarters(ab, cd, (0, 1, LANES, LANES + 1), (2, 3, LANES + 2, LANES + 3))
    total = add(total, total, range(8), range(8, 16))
    return add(total, total, range(4), range(4, 8))
