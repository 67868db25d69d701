"""What a decoder layer does between its matrix products, for CPUs: one pass over memory each, compiled by Numba.

Numbers are widened to float32 where they are read and rounded where they are written, nowhere between unless the
definition says so. A row is computed by one thread, in the same way whatever its batch.

Tensors go into the kernels as addresses, each with an empty array that tells their type: wrapping them as arrays would
take longer than the work on a few tokens. So views need no copy, and none of them compiles a second kernel.
"""

import functools
import math
from typing import Any, TypeAlias

import numba
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paged_kernels.compiled import LOG2_E, TYPES, array_at, compile_kernel, exp2, set_num_threads
from paged_kernels.vector import LANES, from_float32, rotate_halves, to_float32

SERIAL_COST = 60_000  # numbers, about 20 µs: a batch below is not worth other threads

# x * sigmoid(x * (a + b * x²)) is silu, or gelu's approximation by tanh, since 1 + tanh(z) = 2 * sigmoid(2 * z).
GATES = {"silu": (1.0, 0.0), "gelu_tanh": (math.sqrt(8 / math.pi), math.sqrt(8 / math.pi) * 0.044715)}
_Heads: TypeAlias = tuple[int, int, int, int]  # address, strides of tokens and of heads, number of heads
_LARGE = np.float32(1e20)  # squares are capped here, lest 0 * infinity make a NaN


def add_rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, *, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """See `reference.add_rms_norm`."""
    x, weight = x.contiguous(), weight.contiguous()
    total = x if residual is None else residual
    assert total.is_contiguous() and total.dtype == x.dtype and total.shape == x.shape
    normed = torch.empty_like(x)
    width, size = weight.numel(), x.numel()
    rows = (x.data_ptr(), total.data_ptr(), normed.data_ptr())
    scaling = (TYPES[weight.dtype], weight.data_ptr(), width)
    args = (TYPES[x.dtype], *rows, *scaling, eps, float(offset), residual is not None)
    num_threads = _num_threads(size)
    if num_threads == 1:
        norm_rows(*args, 0, size // width)
    else:
        norm_all_rows(*args, size // width, num_threads)
    return normed, total


def rotary(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> None:
    """See `reference.rotary`."""
    cos, sin = cos.contiguous(), sin.contiguous()
    num_tokens, width = cos.shape
    assert query.stride(2) == key.stride(2) == 1 and query.dtype == key.dtype and cos.dtype == sin.dtype
    num_heads, num_kv_heads = query.shape[1], key.shape[1]
    query_heads = (query.data_ptr(), query.stride(0), query.stride(1), num_heads)
    key_heads = (key.data_ptr(), key.stride(0), key.stride(1), num_kv_heads)
    angles = (cos.data_ptr(), sin.data_ptr(), width)
    args = (TYPES[query.dtype], query_heads, key_heads, TYPES[cos.dtype], angles, interleaved)
    num_threads = _num_threads(num_tokens * (num_heads + num_kv_heads) * width)
    if num_threads == 1:
        rotate_tokens(*args, 0, num_tokens)
    else:
        rotate_all_tokens(*args, num_tokens, num_threads)


def silu_and_mul(gate_up: Tensor, *, activation: str = "silu") -> Tensor:
    """See `reference.silu_and_mul`."""
    gate_up = gate_up.contiguous()
    num_rows, width = gate_up.shape
    out = gate_up.new_empty(num_rows, width // 2)
    args = (TYPES[out.dtype], gate_up.data_ptr(), out.data_ptr(), width // 2, *GATES[activation])
    num_threads = _num_threads(num_rows * width)
    if num_threads == 1:
        gate_rows(*args, 0, num_rows)
    else:
        gate_all_rows(*args, num_rows, num_threads)
    return out


def _num_threads(cost: int) -> int:
    return 1 if cost < SERIAL_COST else set_num_threads()


@compile_kernel
def norm_rows(
    like: NDArray[Any],
    x: int,
    total: int,
    normed: int,
    weight_like: NDArray[Any],
    weight: int,
    width: int,
    eps: float,
    offset: float,
    adds: bool,
    begin: int,
    end: int,
) -> None:
    weights = array_at(weight, 0, width, weight_like)
    shift = np.float32(offset)
    for row in range(begin, end):
        source = array_at(x, row * width, width, like)
        target = array_at(total, row * width, width, like)
        out = array_at(normed, row * width, width, like)
        squares = np.float32(0)
        if adds:
            for i in range(width):
                stored = from_float32(to_float32(source[i]) + to_float32(target[i]), target)
                target[i] = stored
                squares += to_float32(stored) * to_float32(stored)
        else:
            for i in range(width):
                squares += to_float32(target[i]) * to_float32(target[i])
        scale = np.float32(1 / math.sqrt(np.float64(squares) / width + eps))
        if offset == 0:
            for i in range(width):
                rounded = to_float32(from_float32(to_float32(target[i]) * scale, out))
                out[i] = from_float32(rounded * to_float32(weights[i]), out)
        else:
            for i in range(width):
                out[i] = from_float32(to_float32(target[i]) * scale * (shift + to_float32(weights[i])), out)


@functools.partial(compile_kernel, parallel=True)
def norm_all_rows(
    like: NDArray[Any],
    x: int,
    total: int,
    normed: int,
    weight_like: NDArray[Any],
    weight: int,
    width: int,
    eps: float,
    offset: float,
    adds: bool,
    num_rows: int,
    num_threads: int,
) -> None:
    for thread in numba.prange(num_threads):
        begin, end = num_rows * thread // num_threads, num_rows * (thread + 1) // num_threads
        norm_rows(like, x, total, normed, weight_like, weight, width, eps, offset, adds, begin, end)


@compile_kernel
def rotate_tokens(
    like: NDArray[Any],
    query: _Heads,
    key: _Heads,
    angle_like: NDArray[Any],
    angles: tuple[int, int, int],
    interleaved: bool,
    begin: int,
    end: int,
) -> None:
    cos, sin, width = angles
    cosines, sines = np.empty(width, np.float32), np.empty(width, np.float32)
    for t in range(begin, end):
        stored_cosines = array_at(cos, t * width, width, angle_like)
        stored_sines = array_at(sin, t * width, width, angle_like)
        for i in range(width):
            cosines[i] = to_float32(stored_cosines[i])
            sines[i] = to_float32(stored_sines[i])
        for address, token_stride, head_stride, num_heads in (query, key):
            heads = array_at(address, t * token_stride, (num_heads - 1) * head_stride + width, like)
            _rotate_heads(heads, head_stride, num_heads, cosines, sines, interleaved)


@compile_kernel
def _rotate_heads(
    heads: NDArray[Any],
    stride: int,
    num_heads: int,
    cos: NDArray[np.float32],
    sin: NDArray[np.float32],
    interleaved: bool,
) -> None:
    half = len(cos) // 2
    for start in range(0, num_heads * stride, stride):
        if not interleaved and half % LANES == 0:
            rotate_halves(heads, start, cos, sin, half)
            continue
        head = heads[start : start + 2 * half]
        for i in range(half):
            x, y = (2 * i, 2 * i + 1) if interleaved else (i, half + i)
            value_x, value_y = to_float32(head[x]), to_float32(head[y])
            head[x] = from_float32(value_x * cos[x] - value_y * sin[x], head)
            head[y] = from_float32(value_y * cos[y] + value_x * sin[y], head)


@functools.partial(compile_kernel, parallel=True)
def rotate_all_tokens(
    like: NDArray[Any],
    query: _Heads,
    key: _Heads,
    angle_like: NDArray[Any],
    angles: tuple[int, int, int],
    interleaved: bool,
    num_tokens: int,
    num_threads: int,
) -> None:
    for thread in numba.prange(num_threads):
        begin, end = num_tokens * thread // num_threads, num_tokens * (thread + 1) // num_threads
        rotate_tokens(like, query, key, angle_like, angles, interleaved, begin, end)


@compile_kernel
def gate_rows(like: NDArray[Any], gate_up: int, out: int, width: int, a: float, b: float, begin: int, end: int) -> None:
    linear, cubic = np.float32(a) * LOG2_E, np.float32(b) * LOG2_E
    for row in range(begin, end):
        gate = array_at(gate_up, 2 * row * width, width, like)
        up = array_at(gate_up, (2 * row + 1) * width, width, like)
        target = array_at(out, row * width, width, like)
        for i in range(width):
            x = to_float32(gate[i])
            square = x * x if x * x < _LARGE else _LARGE
            exponent = x * (linear + cubic * square)
            small = exp2(-abs(exponent))
            sigmoid = (np.float32(1) if exponent >= 0 else small) / (np.float32(1) + small)
            target[i] = from_float32(x * sigmoid * to_float32(up[i]), target)


@functools.partial(compile_kernel, parallel=True)
def gate_all_rows(
    like: NDArray[Any], gate_up: int, out: int, width: int, a: float, b: float, num_rows: int, num_threads: int
) -> None:
    for thread in numba.prange(num_threads):
        begin, end = num_rows * thread // num_threads, num_rows * (thread + 1) // num_threads
        gate_rows(like, gate_up, out, width, a, b, begin, end)
