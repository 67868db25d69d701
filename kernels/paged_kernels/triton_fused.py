"""What a decoder layer does between its matrix products, for GPUs: one launch and one pass over memory each.

Numbers are widened to float32 where they are read and rounded where they are written, nowhere between unless the
definition says so. A row is computed in the same way whatever its batch. Nothing waits for the device, and grids follow
from shapes, so that launches can be captured.
"""

import math

import triton
import triton.language as tl
from torch import Tensor

_ROW_NUMBERS = 1024  # of a program that normalises rows: several short ones, or a long one
_GATE_BLOCK = 1024
_PAIRS = 2048  # of a program that turns heads

# x * sigmoid(x * (a + b * x²)) is silu, or gelu's approximation by tanh, since 1 + tanh(z) = 2 * sigmoid(2 * z).
_GATES = {"silu": (1.0, 0.0), "gelu_tanh": (math.sqrt(8 / math.pi), math.sqrt(8 / math.pi) * 0.044715)}


def add_rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, *, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """See `reference.add_rms_norm`."""
    width = weight.numel()
    rows, weight = x.reshape(-1, width), weight.contiguous()
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    assert residual is None or (residual.is_contiguous() and residual.dtype == x.dtype and residual.shape == x.shape)
    normed = x.new_empty(x.shape)
    padded = triton.next_power_of_2(width)
    rows_per_program = max(1, _ROW_NUMBERS // padded)
    if len(rows):
        norm_rows[(triton.cdiv(len(rows), rows_per_program),)](
            *(rows, rows if residual is None else residual, weight, normed),
            *(len(rows), rows.stride(0), eps, offset),
            WIDTH=width,
            PADDED=padded,
            ROWS=rows_per_program,
            ADDS=residual is not None,
            ROUNDS=offset == 0,
            num_warps=min(16, max(4, padded // 1024)),
        )
    return normed, x if residual is None else residual


def rotary(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> None:
    """See `reference.rotary`."""
    num_tokens, width = cos.shape
    cos, sin = cos.contiguous(), sin.contiguous()
    assert query.stride(2) == key.stride(2) == 1
    num_heads, num_kv_heads = query.shape[1], key.shape[1]
    padded = triton.next_power_of_2(width // 2)
    heads = min(triton.next_power_of_2(max(num_heads, num_kv_heads)), max(1, _PAIRS // padded))
    query_programs = triton.cdiv(num_heads, heads)
    if num_tokens:
        turn_heads[(num_tokens, query_programs + triton.cdiv(num_kv_heads, heads))](
            *(query, key, cos, sin),
            *(query.stride(0), query.stride(1), key.stride(0), key.stride(1)),
            NUM_HEADS=num_heads,
            NUM_KV_HEADS=num_kv_heads,
            QUERY_PROGRAMS=query_programs,
            WIDTH=width,
            PAIRS=padded,
            HEADS=heads,
            INTERLEAVED=interleaved,
        )


def silu_and_mul(gate_up: Tensor, *, activation: str = "silu") -> Tensor:
    """See `reference.silu_and_mul`."""
    num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    assert gate_up.stride(1) == 1
    out = gate_up.new_empty(num_rows, width)
    block = min(triton.next_power_of_2(width), _GATE_BLOCK)
    if num_rows:
        gate_rows[(num_rows, triton.cdiv(width, block))](
            *(gate_up, out, width, gate_up.stride(0), *_GATES[activation]), BLOCK=block
        )
    return out


@triton.jit(do_not_specialize=["num_rows"])
def norm_rows(
    x_ptr,
    residual_ptr,
    weight_ptr,
    normed_ptr,
    num_rows,
    x_stride,
    eps,
    offset,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    ADDS: tl.constexpr,
    ROUNDS: tl.constexpr,
):
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    columns = tl.arange(0, PADDED)[None, :]
    kept = (rows < num_rows) & (columns < WIDTH)
    rows = rows.to(tl.int64)
    dense = rows * WIDTH + columns
    total = tl.load(x_ptr + rows * x_stride + columns, mask=kept, other=0.0).to(tl.float32)
    if ADDS:
        total += tl.load(residual_ptr + dense, mask=kept, other=0.0).to(tl.float32)
        rounded = total.to(residual_ptr.dtype.element_ty)
        tl.store(residual_ptr + dense, rounded, mask=kept)
        total = rounded.to(tl.float32)
    quotient = total * tl.rsqrt(tl.sum(total * total, 1) / WIDTH + eps)[:, None]
    if ROUNDS:
        quotient = quotient.to(normed_ptr.dtype.element_ty).to(tl.float32)
    factors = tl.load(weight_ptr + columns, mask=columns < WIDTH, other=0.0).to(tl.float32) + offset
    tl.store(normed_ptr + dense, (quotient * factors).to(normed_ptr.dtype.element_ty), mask=kept)


@triton.jit
def turn_heads(
    query_ptr,
    key_ptr,
    cos_ptr,
    sin_ptr,
    query_stride,
    query_head_stride,
    key_stride,
    key_head_stride,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    QUERY_PROGRAMS: tl.constexpr,
    WIDTH: tl.constexpr,
    PAIRS: tl.constexpr,
    HEADS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    number = tl.program_id(1)
    cos_ptr += token * WIDTH
    sin_ptr += token * WIDTH
    if number < QUERY_PROGRAMS:
        _turn(
            query_ptr + token * query_stride, query_head_stride, cos_ptr, sin_ptr, number * HEADS,
            NUM_HEADS, WIDTH, PAIRS, HEADS, INTERLEAVED,
        )  # fmt: skip
    else:
        _turn(
            key_ptr + token * key_stride, key_head_stride, cos_ptr, sin_ptr, (number - QUERY_PROGRAMS) * HEADS,
            NUM_KV_HEADS, WIDTH, PAIRS, HEADS, INTERLEAVED,
        )  # fmt: skip


@triton.jit
def _turn(
    x_ptr,
    head_stride,
    cos_ptr,
    sin_ptr,
    first,
    NUM_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    PAIRS: tl.constexpr,
    HEADS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """The pairs of some heads of one token. Interleaved ones are read side by side, and taken apart in registers."""
    heads = first + tl.arange(0, HEADS)
    at = x_ptr + heads.to(tl.int64)[:, None] * head_stride
    is_head = (heads < NUM_HEADS)[:, None]
    if INTERLEAVED:
        i = tl.arange(0, 2 * PAIRS)
        is_pair = i < WIDTH
        kept = is_head & is_pair[None, :]
        low, high = tl.split(tl.load(at + i, mask=kept, other=0.0).to(tl.float32).reshape(HEADS, PAIRS, 2))
        cos_low, cos_high = tl.split(tl.load(cos_ptr + i, mask=is_pair, other=0.0).to(tl.float32).reshape(PAIRS, 2))
        sin_low, sin_high = tl.split(tl.load(sin_ptr + i, mask=is_pair, other=0.0).to(tl.float32).reshape(PAIRS, 2))
        turned = tl.join(low * cos_low - high * sin_low, high * cos_high + low * sin_high)
        tl.store(at + i, turned.reshape(HEADS, 2 * PAIRS).to(x_ptr.dtype.element_ty), mask=kept)
    else:
        half: tl.constexpr = WIDTH // 2
        i = tl.arange(0, PAIRS)
        kept = is_head & (i < half)[None, :]
        low, high = _halves(at + i, half, kept)
        cos_low, cos_high = _halves(cos_ptr + i, half, i < half)
        sin_low, sin_high = _halves(sin_ptr + i, half, i < half)
        tl.store(at + i, (low * cos_low - high * sin_low).to(x_ptr.dtype.element_ty), mask=kept)
        tl.store(at + i + half, (high * cos_high + low * sin_high).to(x_ptr.dtype.element_ty), mask=kept)


@triton.jit
def _halves(at, half, kept):
    low = tl.load(at, mask=kept, other=0.0)
    high = tl.load(at + half, mask=kept, other=0.0)
    return low.to(tl.float32), high.to(tl.float32)


@triton.jit
def gate_rows(gate_up_ptr, out_ptr, width, stride, linear, cubic, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    kept = columns < width
    gate = tl.load(gate_up_ptr + row * stride + columns, mask=kept, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * stride + width + columns, mask=kept, other=0.0).to(tl.float32)
    squares = tl.minimum(gate * gate, 1e20)  # capped, lest 0 * infinity make a NaN
    gated = gate * tl.sigmoid(gate * (linear + cubic * squares)) * up
    tl.store(out_ptr + row * width + columns, gated.to(out_ptr.dtype.element_ty), mask=kept)
