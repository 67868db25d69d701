"""All layers of a decoder built like Llama, as one compiled function that calls the other kernels by their addresses.

See stack.py. Buffers and weights are addresses as well; the arrays that are named `likes` are empty, and tell types.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray

from paged_kernels import cpu, fused
from paged_kernels.compiled import SERIAL_PRODUCT, array_at, compile_kernel
from paged_kernels.native import call
from paged_kernels.vector import pointer

# The table has a row for each layer, of addresses and of the last three.
_ATTENTION_NORM, _Q_NORM, _K_NORM, _MLP_NORM, _KEYS, _VALUES, _KEY_SCALES, _VALUE_SCALES = range(8)
_QKV, _OUTPUT, _GATE_UP, _DOWN = range(8, 24, 4)  # weights, scales, factors, bias
_WINDOW, _CHUNK, _GROUP = 24, 25, 26


class Kernels(NamedTuple):
    """Their addresses."""

    norm: int
    norm_many: int
    rotate: int
    rotate_many: int
    gate: int
    gate_many: int
    store: int
    attend: int
    attend_items: tuple[int, int, int]
    multiply: int
    multiply_parts: Any


class Likes(NamedTuple):
    """Empty arrays, for their types."""

    x: NDArray[Any]
    norm: NDArray[Any]
    angle: NDArray[Any]
    cache: NDArray[Any]
    numbers: NDArray[Any]
    units: NDArray[Any]


class Sizes(NamedTuple):
    hidden: int
    token: int
    """Of its queries, keys and values."""
    num_heads: int
    num_kv_heads: int
    head: int
    value_head: int
    blocks: tuple[int, int, int]
    """Of the KV cache, heads in a block, slots in a head."""
    scale_blocks: tuple[int, int, int]
    """Likewise, of its scales; zeros if there are none."""


class Options(NamedTuple):
    eps: float
    gate_a: float
    gate_b: float
    num_threads: int


class Operation(NamedTuple):
    """A product with one of the matrices."""

    sizes: Any
    rounding: Any


class Buffers(NamedTuple):
    """Addresses of what is computed: T rows each, of those kept R."""

    residual: int
    normed: int
    qkv: int
    heads: int
    hidden: int
    gate_up: int
    gated: int
    kept_heads: int
    kept_residual: int


@compile_kernel
def run_layers(
    kernels: Kernels,
    types: Any,
    likes: Likes,
    scales_like: NDArray[Any] | None,
    sizes: Sizes,
    operations: tuple[Operation, ...],
    options: Options,
    table: NDArray[np.int64],
    factors: NDArray[np.float64],
    buffers: Buffers,
    others: tuple[int, int, int],
    places: tuple[NDArray[Any], ...],
    keep: NDArray[np.int64],
) -> None:
    qkv, output, gate_up, down = operations
    cos, sin, last_norm = others
    residual, num_rows = buffers.residual, places[0].shape[1]
    for i in range(len(table)):
        layer = table[i]
        _norm(kernels, likes, sizes, options, residual, buffers, layer[_ATTENTION_NORM], i > 0, num_rows)
        _multiply(kernels, types, options, buffers.normed, layer, _QKV, qkv, buffers.qkv, num_rows)
        _norm_heads(kernels, likes, sizes, options, buffers.qkv, layer, num_rows)
        _rotate(kernels, likes, sizes, options, buffers.qkv, cos, sin, num_rows)
        _store(kernels, likes, scales_like, sizes, buffers.qkv, layer, places[0][layer[_GROUP]])
        _attend(kernels, likes, sizes, options, buffers, layer, factors[i], places)
        heads = buffers.heads
        if i == len(table) - 1:
            _keep(likes.x, heads, buffers.kept_heads, sizes.num_heads * sizes.value_head, keep)
            _keep(likes.x, residual, buffers.kept_residual, sizes.hidden, keep)
            heads, residual, num_rows = buffers.kept_heads, buffers.kept_residual, len(keep)
        _multiply(kernels, types, options, heads, layer, _OUTPUT, output, buffers.hidden, num_rows)
        _norm(kernels, likes, sizes, options, residual, buffers, layer[_MLP_NORM], True, num_rows)
        _multiply(kernels, types, options, buffers.normed, layer, _GATE_UP, gate_up, buffers.gate_up, num_rows)
        _gate(kernels, likes, options, buffers, down.sizes[1], num_rows)
        _multiply(kernels, types, options, buffers.gated, layer, _DOWN, down, buffers.hidden, num_rows)
    _norm(kernels, likes, sizes, options, residual, buffers, last_norm, True, num_rows)


@compile_kernel
def _norm(
    kernels: Kernels,
    likes: Likes,
    sizes: Sizes,
    options: Options,
    residual: int,
    buffers: Buffers,
    weight: int,
    adds: bool,
    num_rows: int,
) -> None:
    rows = (likes.x, buffers.hidden, residual, buffers.normed)
    args = (*rows, likes.norm, weight, sizes.hidden, options.eps, 0.0, adds)
    if num_rows * sizes.hidden < fused.SERIAL_COST:
        call(kernels.norm, (*args, 0, num_rows))
    else:
        call(kernels.norm_many, (*args, num_rows, options.num_threads))


@compile_kernel
def _multiply(
    kernels: Kernels,
    types: Any,
    options: Options,
    x: int,
    layer: NDArray[np.int64],
    column: int,
    operation: Operation,
    out: int,
    num_rows: int,
) -> None:
    sizes = operation.sizes
    work = num_rows * sizes[0] * sizes[1]
    num_threads = 1 if work < SERIAL_PRODUCT else options.num_threads
    addresses = (layer[column], layer[column + 1], layer[column + 2], layer[column + 3])
    matrix = (*addresses, sizes, operation.rounding)
    call(kernels.multiply, (kernels.multiply_parts, types, x, sizes[1], matrix, out, num_rows, num_threads))


@compile_kernel
def _norm_heads(
    kernels: Kernels,
    likes: Likes,
    sizes: Sizes,
    options: Options,
    qkv: int,
    layer: NDArray[np.int64],
    num_tokens: int,
) -> None:
    """Each head of queries and keys, in place, in models that do so."""
    for column, first, num_heads in ((_Q_NORM, 0, sizes.num_heads), (_K_NORM, sizes.num_heads, sizes.num_kv_heads)):
        if layer[column] != 0:
            for t in range(num_tokens):
                rows = qkv + (t * sizes.token + first * sizes.head) * likes.x.itemsize
                like_and_rows = (likes.x, rows, rows, rows)
                args = (*like_and_rows, likes.norm, layer[column], sizes.head, options.eps, 0.0, False)
                call(kernels.norm, (*args, 0, num_heads))


@compile_kernel
def _rotate(
    kernels: Kernels,
    likes: Likes,
    sizes: Sizes,
    options: Options,
    qkv: int,
    cos: int,
    sin: int,
    num_tokens: int,
) -> None:
    num_heads, num_kv_heads, size = sizes.num_heads, sizes.num_kv_heads, sizes.head
    query = (qkv, sizes.token, size, num_heads)
    key = (qkv + num_heads * size * likes.x.itemsize, sizes.token, size, num_kv_heads)
    args = (likes.x, query, key, likes.angle, (cos, sin, size), False)
    if num_tokens * (num_heads + num_kv_heads) * size < fused.SERIAL_COST:
        call(kernels.rotate, (*args, 0, num_tokens))
    else:
        call(kernels.rotate_many, (*args, num_tokens, options.num_threads))


@compile_kernel
def _store(
    kernels: Kernels,
    likes: Likes,
    scales_like: NDArray[Any] | None,
    sizes: Sizes,
    qkv: int,
    layer: NDArray[np.int64],
    slots: NDArray[np.int64],
) -> None:
    length = (len(slots) - 1) * sizes.token
    first = sizes.num_heads * sizes.head
    for is_value in range(2):
        size = sizes.value_head if is_value else sizes.head
        rows = array_at(qkv, first, length + sizes.num_kv_heads * size, likes.x)
        cache = numba.carray(pointer(layer[_KEYS + is_value], likes.cache), (*sizes.blocks, size))
        if scales_like is None:
            call(kernels.store, (rows, sizes.token, size, cache, slots))
        else:
            scales = numba.carray(pointer(layer[_KEY_SCALES + is_value], scales_like), sizes.scale_blocks)
            call(kernels.store, (rows, sizes.token, size, cache, scales, slots))
        first += sizes.num_kv_heads * sizes.head


@compile_kernel
def _attend(
    kernels: Kernels,
    likes: Likes,
    sizes: Sizes,
    options: Options,
    buffers: Buffers,
    layer: NDArray[np.int64],
    factors: NDArray[np.float64],
    places: tuple[NDArray[Any], ...],
) -> None:
    slots, tables, starts, lengths = places
    num_tokens, size, table = slots.shape[1], sizes.head, tables[layer[_GROUP]]
    query = array_at(buffers.qkv, 0, (num_tokens - 1) * sizes.token + sizes.num_heads * size, likes.x)
    keys = numba.carray(pointer(layer[_KEYS], likes.cache), (*sizes.blocks, size))
    values = numba.carray(pointer(layer[_VALUES], likes.cache), (*sizes.blocks, sizes.value_head))
    key_scales = numba.carray(pointer(layer[_KEY_SCALES], cpu.NO_SCALES), sizes.scale_blocks)
    value_scales = numba.carray(pointer(layer[_VALUE_SCALES], cpu.NO_SCALES), sizes.scale_blocks)
    out = numba.carray(pointer(buffers.heads, likes.x), (num_tokens, sizes.num_heads, sizes.value_head))
    batch = (query, sizes.token, size, keys, values, key_scales, value_scales, table, starts, lengths, out)
    likes_of_tiles = (likes.numbers, likes.units)
    visible = (factors[0], layer[_WINDOW], layer[_CHUNK], factors[1])
    nothing = (cpu.NO_HEADS, cpu.NO_HEADS)
    call(kernels.attend, (kernels.attend_items, *batch, *likes_of_tiles, *visible, *nothing, options.num_threads))


@compile_kernel
def _gate(kernels: Kernels, likes: Likes, options: Options, buffers: Buffers, width: int, num_rows: int) -> None:
    args = (likes.x, buffers.gate_up, buffers.gated, width, options.gate_a, options.gate_b)
    if 2 * num_rows * width < fused.SERIAL_COST:
        call(kernels.gate, (*args, 0, num_rows))
    else:
        call(kernels.gate_many, (*args, num_rows, options.num_threads))


@compile_kernel
def _keep(like: NDArray[Any], source: int, target: int, width: int, rows: NDArray[np.int64]) -> None:
    for i in range(len(rows)):
        read, written = array_at(source, rows[i] * width, width, like), array_at(target, i * width, width, like)
        for j in range(np.uint64(width)):  # an assignment of all of it takes a second longer to compile
            written[j] = read[j]
