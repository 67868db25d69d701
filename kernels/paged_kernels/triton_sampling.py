"""Draws from rows of logits and their log-probabilities on GPUs: a row is read a few times and never sorted.

A program has a row. While it reads it, each lane keeps the largest logit that it saw. The k-th largest of these bounds
the k-th largest logit from below, so that few tokens are left to choose from; they are written down, and places among
them are found by bisection. A token's place is one integer: falling logits and then rising ids are falling places.

Weights are integers, multiples of 2^-40 of the best token's, so that sums do not depend on their order: what a row
gives depends on nothing but the row. A token of less than half of that is never drawn.

Nothing waits for the device, and grids follow from shapes.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from paged_kernels import reference, triton_draw
from paged_kernels.triton_device import current_device
from paged_kernels.triton_rows import (
    LOG2_E,
    LOWEST_KEY,
    STAGES,
    UNITS,
    id_of,
    key_of,
    largest,
    note_down,
    read,
    read_places,
    survey,
    value_of,
    weigh,
)

_BLOCK = 4096
_CAPACITY = 16384
"""Notes of a row; if more tokens are left, the row itself is read."""
_NUM_WARPS = 8
_MOST_BEST = 64
"""Best tokens that are found one after the other; for more of them the rows are sorted."""
_TOKENS = 256
"""That a program penalises."""


def draw(logits: Tensor, temperatures: Tensor, min_p: Tensor, top_k: Tensor, top_p: Tensor, shares: Tensor) -> Tensor:
    """See `reference.draw`."""
    num_rows, vocab_size = logits.shape
    tokens = logits.new_empty(num_rows, dtype=torch.int64)
    notes = tokens.new_empty(num_rows, triton_draw.HEADER + _CAPACITY)
    options = {**_row_options(vocab_size), "FIRST": triton_draw.HEADER}
    if num_rows:
        rows = (logits, _row_stride(logits), vocab_size, temperatures)
        triton_draw.begin_draws[(num_rows,)](
            *(*rows, min_p, top_k, top_p, shares, tokens, notes), **options | {"num_warps": _num_warps_to_begin()}
        )
        triton_draw.finish_draws[(num_rows,)](*rows, top_k, top_p, shares, tokens, notes, **options)
    return tokens


def best_logits(logits: Tensor, chosen: Tensor, num: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `reference.best_logits`."""
    num_rows, vocab_size = logits.shape
    if num > _MOST_BEST or not num_rows:
        return reference.best_logits(logits, chosen, num)
    normalisers = logits.new_empty(num_rows, dtype=torch.float64)
    ranks, num_left = torch.empty_like(chosen), torch.empty_like(chosen)
    values = logits.new_empty(num_rows, num, dtype=torch.float32)
    ids, notes = chosen.new_empty(num_rows, num), chosen.new_empty(num_rows, _CAPACITY)
    rows = (logits, _row_stride(logits), vocab_size)
    options = _row_options(vocab_size)
    describe_rows[(num_rows,)](*rows, chosen, num, normalisers, ranks, num_left, notes, **options)
    if num:
        list_best[(num_rows,)](*rows, num, values, ids, num_left, notes, **options)
    return normalisers, ranks, values, ids


def mask_logits(logits: Tensor, rows: Tensor, bitmask: Tensor) -> None:
    """See `reference.mask_logits`."""
    vocab_size = logits.shape[1]
    assert bitmask.shape[1] * 32 >= vocab_size and bitmask.stride(1) == 1
    rows, bitmask = (part.to(logits.device, non_blocking=True) for part in (rows, bitmask))
    if len(rows):
        mask_rows[(len(rows), triton.cdiv(vocab_size, _BLOCK))](
            *(logits, _row_stride(logits), vocab_size, rows, bitmask, bitmask.stride(0)), BLOCK=_BLOCK
        )


def penalise(logits: Tensor, rows: Tensor, ids: Tensor, repetition: Tensor, subtracted: Tensor) -> None:
    """See `reference.penalise`."""
    if len(rows):
        penalise_tokens[(triton.cdiv(len(rows), _TOKENS),)](
            *(logits, _row_stride(logits), rows, ids, repetition, subtracted, len(rows)), BLOCK=_TOKENS
        )


def _row_stride(logits: Tensor) -> int:
    assert logits.stride(1) == 1
    return logits.stride(0)


def _num_warps_to_begin() -> int:
    """On NVIDIA, whose warps are half as wide as AMD's, a program of more threads needs fewer registers in each."""
    return 2 * _NUM_WARPS if current_device().architecture.startswith("sm_") else _NUM_WARPS


def _row_options(vocab_size: int) -> dict[str, Any]:
    return {
        "CAPACITY": _CAPACITY,
        "ID_BITS": (vocab_size - 1).bit_length(),
        "BLOCK": min(_BLOCK, triton.next_power_of_2(vocab_size)),
        "num_warps": _NUM_WARPS,
    }


@triton.jit(do_not_specialize=["num"])
def describe_rows(
    logits_ptr,
    stride,
    vocab_size,
    chosen_ptr,
    num,
    normalisers_ptr,
    ranks_ptr,
    num_left_ptr,
    notes_ptr,
    CAPACITY: tl.constexpr,
    ID_BITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """What is known once the row was read, and the places of its `num` best tokens, with some others."""
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * stride
    best, _best_id, maxima = survey(logits_ptr, vocab_size, BLOCK)
    chosen = tl.load(logits_ptr + tl.load(chosen_ptr + row)).to(tl.float32)
    totals = tl.full([BLOCK], 0, tl.int64)
    nums_above = tl.full([BLOCK], 0, tl.int32)
    for start in tl.range(0, vocab_size, BLOCK, num_stages=STAGES):
        values = read(logits_ptr, vocab_size, start, BLOCK)
        totals += weigh(values, best, LOG2_E)
        nums_above += (values > chosen).to(tl.int32)
    total = tl.sum(totals, 0).to(tl.float64)
    tl.store(normalisers_ptr + row, best.to(tl.float64) + tl.log(total / UNITS))
    tl.store(ranks_ptr + row, 1 + tl.sum(nums_above, 0))
    if num > 0:
        floor = largest(key_of(maxima), num)
        num_left = note_down(logits_ptr, vocab_size, floor, notes_ptr + row * CAPACITY, ID_BITS, BLOCK, CAPACITY)
        tl.store(num_left_ptr + row, num_left)


@triton.jit(do_not_specialize=["num"])
def list_best(
    logits_ptr,
    stride,
    vocab_size,
    num,
    values_ptr,
    ids_ptr,
    num_left_ptr,
    notes_ptr,
    CAPACITY: tl.constexpr,
    ID_BITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * stride
    notes_ptr += row * CAPACITY
    num_left = tl.load(num_left_ptr + row)
    is_noted = num_left <= CAPACITY
    size = tl.where(is_noted, num_left, vocab_size)
    lowest = tl.full((), LOWEST_KEY, tl.int64) << ID_BITS
    place = tl.full((), 1 << 31, tl.int64) << ID_BITS
    for i in range(num):
        below = lowest
        for start in range(0, size, BLOCK):
            places = read_places(logits_ptr, notes_ptr, is_noted, size, start, ID_BITS, BLOCK)
            below = tl.maximum(below, tl.max(tl.where(places < place, places, lowest), 0))
        place = below
        tl.store(values_ptr + row * num + i, value_of(place >> ID_BITS))
        tl.store(ids_ptr + row * num + i, id_of(place, ID_BITS))


@triton.jit
def mask_rows(logits_ptr, stride, vocab_size, rows_ptr, bitmask_ptr, bitmask_stride, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64)
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    words = tl.load(bitmask_ptr + i * bitmask_stride + ids // 32, mask=ids < vocab_size, other=-1)
    is_banned = ((words >> (ids % 32)) & 1) == 0
    tl.store(logits_ptr + tl.load(rows_ptr + i) * stride + ids, float("-inf"), mask=is_banned)


@triton.jit(do_not_specialize=["num"])
def penalise_tokens(logits_ptr, stride, rows_ptr, ids_ptr, repetition_ptr, subtracted_ptr, num, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    kept = i < num
    at = logits_ptr + tl.load(rows_ptr + i, mask=kept, other=0) * stride + tl.load(ids_ptr + i, mask=kept, other=0)
    values = tl.load(at, mask=kept, other=0.0)
    penalties = tl.load(repetition_ptr + i, mask=kept, other=1.0)
    values = tl.where(values < 0, values * penalties, tl.div_rn(values, penalties))
    tl.store(at, values - tl.load(subtracted_ptr + i, mask=kept, other=0.0), mask=kept)
