"""Device code that reads rows of logits: as numbers, as weights, and as places in the order of falling logits."""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
UNITS = tl.constexpr(2.0**40)
"""What the best token of a row weighs."""
LOWEST_POWER = tl.constexpr(-41.0)
"""Of 2, below which a weight rounds to 0."""
STAGES = tl.constexpr(2)
"""Of loops over a row: blocks that are on their way."""
LOWEST_KEY = tl.constexpr(-(2**31))
KEY_OF_MINUS_INFINITY = tl.constexpr(-2139095041)


@triton.jit
def read(logits_ptr, vocab_size, start, BLOCK: tl.constexpr):
    """A block of the row in float32; no NaN, no negative zero, and minus infinity behind its end."""
    ids = start + tl.arange(0, BLOCK)
    values = tl.load(logits_ptr + ids, mask=ids < vocab_size, other=float("-inf")).to(tl.float32)
    values = tl.where(values == 0.0, 0.0, values)
    return tl.where(values == values, values, float("-inf"))


@triton.jit
def survey(logits_ptr, vocab_size, BLOCK: tl.constexpr):
    """The largest logit, the lowest id that has it, and the largest logit that each lane sees."""
    lanes = tl.arange(0, BLOCK)
    ids = lanes
    maxima = tl.full([BLOCK], float("-inf"), tl.float32)
    for start in tl.range(0, vocab_size, BLOCK, num_stages=STAGES):
        values = read(logits_ptr, vocab_size, start, BLOCK)
        ids = tl.where(values > maxima, start + lanes, ids)
        maxima = tl.maximum(maxima, values)
    best = tl.max(maxima, 0)
    return best, tl.min(tl.where(maxima == best, ids, vocab_size), 0), maxima


@triton.jit
def weigh(values, best, scale):
    """How likely each is, in units of 2^-40 of how likely the best one is; int64."""
    power = (values - best) * scale
    weights = tl.exp2(power) * UNITS + 0.5
    return tl.where(power > LOWEST_POWER, weights, 0.0).to(tl.int64)


@triton.jit
def weigh_row(logits_ptr, vocab_size, floor, best, scale, BLOCK: tl.constexpr):
    """What those weigh together whose keys are not below the floor."""
    totals = tl.full([BLOCK], 0, tl.int64)  # of each lane, so that loads need not wait for sums
    for start in tl.range(0, vocab_size, BLOCK, num_stages=STAGES):
        values = read(logits_ptr, vocab_size, start, BLOCK)
        totals += tl.where(key_of(values) >= floor, weigh(values, best, scale), 0)
    return tl.sum(totals, 0)


@triton.jit
def key_of(values):
    """Integers in the same order."""
    bits = values.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def value_of(key):
    bits = key.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def place_of(keys, ids, ID_BITS: tl.constexpr):
    """Of equal keys, lower ids are in higher places."""
    return (keys.to(tl.int64) << ID_BITS) + ((1 << ID_BITS) - 1 - ids)


@triton.jit
def id_of(place, ID_BITS: tl.constexpr):
    return ((1 << ID_BITS) - 1 - (place & ((1 << ID_BITS) - 1))).to(tl.int32)


@triton.jit
def largest(keys, k):
    """The k-th largest key, or LOWEST_KEY if there are fewer."""
    low = tl.full((), LOWEST_KEY, tl.int64)
    step = tl.full((), 1 << 31, tl.int64)
    for _ in range(32):
        middle = low + step
        low = tl.where(tl.sum((keys >= middle).to(tl.int32), 0) >= k, middle, low)
        step >>= 1
    return low


@triton.jit
def note_down(
    logits_ptr, vocab_size, floor, notes_ptr, ID_BITS: tl.constexpr, BLOCK: tl.constexpr, CAPACITY: tl.constexpr
):
    """Write the places of tokens down whose keys are not below the floor, as many as there is room for; how many they
    are."""
    num = tl.full((), 0, tl.int32)
    for start in range(0, vocab_size, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        keys = key_of(read(logits_ptr, vocab_size, start, BLOCK))
        is_left = (keys >= floor) & (ids < vocab_size)
        lines = num + tl.cumsum(is_left.to(tl.int32), 0) - 1
        tl.store(notes_ptr + lines, place_of(keys, ids, ID_BITS), mask=is_left & (lines < CAPACITY))
        num += tl.sum(is_left.to(tl.int32), 0)
    return num


@triton.jit
def read_places(logits_ptr, notes_ptr, is_noted, size, start, ID_BITS: tl.constexpr, BLOCK: tl.constexpr):
    """A block of those that are noted, or else of all in the row; behind the end, the lowest of minus infinity."""
    i = start + tl.arange(0, BLOCK)
    if is_noted:
        places = tl.load(notes_ptr + i, mask=i < size, other=0)
    else:
        places = place_of(key_of(read(logits_ptr, size, start, BLOCK)), i, ID_BITS)
    nothing = tl.full([BLOCK], KEY_OF_MINUS_INFINITY, tl.int64) << ID_BITS
    return tl.where(i < size, places, nothing)
