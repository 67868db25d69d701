"""Device code of draws: `begin_draws` reads a row and writes down what may be drawn, `finish_draws` finds the token.

Between the two, a row of notes begins with what is known of the row. A launch of its own is what makes sure that all
threads see the notes.
"""

import triton
import triton.language as tl

from paged_kernels.triton_rows import (
    LOG2_E,
    LOWEST_KEY,
    id_of,
    key_of,
    largest,
    note_down,
    read,
    read_places,
    survey,
    value_of,
    weigh,
    weigh_row,
)

HEADER = 4
"""Numbers before the notes: how many tokens are left, or -1 if the token is known; the key of the best one; a key below
which none is drawn; the weight of all tokens, or -1 if it is of no interest."""

_EXPECTED = tl.constexpr(256)  # number of tokens that top_p alone keeps


@triton.jit
def begin_draws(
    logits_ptr,
    stride,
    vocab_size,
    temperatures_ptr,
    min_p_ptr,
    top_k_ptr,
    top_p_ptr,
    shares_ptr,
    tokens_ptr,
    notes_ptr,
    FIRST: tl.constexpr,
    CAPACITY: tl.constexpr,
    ID_BITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """FIRST is where notes begin."""
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * stride
    notes_ptr += row * (FIRST + CAPACITY)
    temperature = tl.load(temperatures_ptr + row)
    min_p = tl.load(min_p_ptr + row)
    top_k = tl.load(top_k_ptr + row)
    top_k = tl.where(top_k <= 0, vocab_size, top_k)
    top_p = tl.load(top_p_ptr + row)
    best, token, maxima = survey(logits_ptr, vocab_size, BLOCK)
    num_left = tl.full((), -1, tl.int32)
    if (temperature != 0) & (top_k != 1) & (min_p != 1):
        scale = (1.0 / temperature * LOG2_E).to(tl.float32)
        total = tl.full((), -1, tl.int64)
        if (min_p == 0) & (top_k >= vocab_size):
            total = weigh_row(logits_ptr, vocab_size, LOWEST_KEY, best, scale, BLOCK)
        if (total >= 0) & (top_p >= 1):
            share = tl.load(shares_ptr + row)
            drawn = _draw_by_id(logits_ptr, vocab_size, best, scale, _goal(share, total), BLOCK)
            token = tl.where(total > 0, drawn, token)
        else:
            floor = _lowest_key(min_p, best, temperature)
            if total >= 0:
                floor = _floor_of_share(logits_ptr, vocab_size, top_p, total, best, scale, key_of(maxima), BLOCK)
            elif top_k < vocab_size:
                floor = tl.maximum(floor, largest(key_of(maxima), top_k))
            num_left = note_down(logits_ptr, vocab_size, floor, notes_ptr + FIRST, ID_BITS, BLOCK, CAPACITY)
            tl.store(notes_ptr + 1, key_of(best))
            tl.store(notes_ptr + 2, floor)
            tl.store(notes_ptr + 3, total)
    tl.store(notes_ptr, num_left)
    tl.store(tokens_ptr + row, token)


@triton.jit
def finish_draws(
    logits_ptr,
    stride,
    vocab_size,
    temperatures_ptr,
    top_k_ptr,
    top_p_ptr,
    shares_ptr,
    tokens_ptr,
    notes_ptr,
    FIRST: tl.constexpr,
    CAPACITY: tl.constexpr,
    ID_BITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * stride
    notes_ptr += row * (FIRST + CAPACITY)
    num_left = tl.load(notes_ptr)
    if num_left < 0:
        return
    best_key = tl.load(notes_ptr + 1)
    low = tl.load(notes_ptr + 2) << ID_BITS
    total = tl.load(notes_ptr + 3)
    high = (best_key + 1) << ID_BITS
    best = value_of(best_key)
    scale = (1.0 / tl.load(temperatures_ptr + row) * LOG2_E).to(tl.float32)
    is_noted = num_left <= CAPACITY
    size = tl.where(is_noted, num_left, vocab_size)
    notes_ptr += FIRST

    top_k = tl.load(top_k_ptr + row)
    if (top_k > 0) & (top_k < vocab_size):
        low, reached = _place_reaching(
            top_k, low, high, logits_ptr, notes_ptr, is_noted, size, best, scale, True, ID_BITS, BLOCK
        )
        low = (low >> ID_BITS) << ID_BITS  # and all that tie with it
    held = _amount(low, logits_ptr, notes_ptr, is_noted, size, best, scale, False, ID_BITS, BLOCK)
    total = tl.where(total < 0, held, total)
    top_p = tl.load(top_p_ptr + row)
    if top_p < 1:
        goal = tl.minimum(tl.maximum(_share_of(top_p, total), 1), total)
        low, reached = _place_reaching(
            goal, low, high, logits_ptr, notes_ptr, is_noted, size, best, scale, False, ID_BITS, BLOCK
        )
        held = tl.where(reached > 0, reached, held)
    place, reached = _place_reaching(
        _goal(tl.load(shares_ptr + row), held),
        *(low, high, logits_ptr, notes_ptr, is_noted, size, best, scale, False, ID_BITS, BLOCK),
    )
    if held > 0:  # the best one is finite
        tl.store(tokens_ptr + row, id_of(place, ID_BITS))


@triton.jit
def _draw_by_id(logits_ptr, vocab_size, best, scale, goal, BLOCK: tl.constexpr):
    """The first id up to which tokens weigh as much as the goal."""
    start = tl.full((), 0, tl.int32)
    before = tl.full((), 0, tl.int64)
    weights = weigh(read(logits_ptr, vocab_size, start, BLOCK), best, scale)
    after = tl.sum(weights, 0)
    while after < goal:
        start += BLOCK
        before = after
        weights = weigh(read(logits_ptr, vocab_size, start, BLOCK), best, scale)
        after += tl.sum(weights, 0)
    reaches = before + tl.cumsum(weights, 0) >= goal
    return start + tl.min(tl.where(reaches, tl.arange(0, BLOCK), BLOCK), 0)


@triton.jit
def _goal(share, total):
    """The smallest sum of weights that is more than the share, or else all."""
    return tl.minimum((share * total.to(tl.float64)).to(tl.int64) + 1, total)


@triton.jit
def _share_of(top_p, total):
    """The smallest sum of weights that is not less than the share."""
    return tl.ceil(top_p * total.to(tl.float64)).to(tl.int64)


@triton.jit
def _lowest_key(min_p, best, temperature):
    """The key of the smallest logit that min_p keeps."""
    cut = best.to(tl.float64) + temperature * tl.log(tl.where(min_p > 0, min_p, 1.0))
    rounded = cut.to(tl.float32)
    key = key_of(rounded).to(tl.int64) + (rounded.to(tl.float64) < cut).to(tl.int64)
    return tl.where(min_p > 0, key, LOWEST_KEY)


@triton.jit
def _floor_of_share(logits_ptr, vocab_size, top_p, total, best, scale, keys, BLOCK: tl.constexpr):
    """A key above which tokens weigh the share that top_p keeps, and there are not many more of them."""
    needed = _share_of(top_p, total)
    num = tl.full((), _EXPECTED, tl.int32)
    floor = largest(keys, num)
    while weigh_row(logits_ptr, vocab_size, floor, best, scale, BLOCK) < needed:
        num *= 4
        floor = largest(keys, num)
    return floor


@triton.jit
def _amount(
    lowest, logits_ptr, notes_ptr, is_noted, size, best, scale,
    COUNTS: tl.constexpr, ID_BITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """What tokens weigh whose place is not below the lowest one, or how many they are."""
    amount = tl.full((), 0, tl.int64)
    for start in range(0, size, BLOCK):
        places = read_places(logits_ptr, notes_ptr, is_noted, size, start, ID_BITS, BLOCK)
        if COUNTS:
            amount += tl.sum((places >= lowest).to(tl.int32), 0)
        else:
            weights = weigh(value_of(places >> ID_BITS), best, scale)
            amount += tl.sum(tl.where(places >= lowest, weights, 0), 0)
    return amount


@triton.jit
def _place_reaching(
    goal, low, high, logits_ptr, notes_ptr, is_noted, size, best, scale,
    COUNTS: tl.constexpr, ID_BITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The highest place, below `high`, from which upwards tokens amount to the goal, and that amount; `low` and 0 if
    there is none above `low`."""
    reached = tl.full((), 0, tl.int64)
    while high - low > 1:
        middle = low + ((high - low) >> 1)
        amount = _amount(middle, logits_ptr, notes_ptr, is_noted, size, best, scale, COUNTS, ID_BITS, BLOCK)
        is_enough = amount >= goal
        low = tl.where(is_enough, middle, low)
        high = tl.where(is_enough, high, middle)
        reached = tl.where(is_enough, amount, reached)
    return low, reached
