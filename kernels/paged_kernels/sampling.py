"""Draws from rows of logits, and their log-probabilities, on CPUs: a row is read two or three times and never sorted.

The maxima of groups of tokens are found first. The largest k-th of them bounds the k-th largest logit from below, so
that few groups have to be looked into again, and few tokens are left to choose from. These are put in order one by
one, only as far as they are needed (incremental quicksort, Paredes and Navarro 2006). A token among them is one
integer: falling logits and then rising ids are rising integers.

Rows are divided among the threads; what a row gives depends on nothing but the row.
"""

import functools
import math
from typing import Any

import numba
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paged_kernels import ahead
from paged_kernels.compiled import FAST_MATH_WITHOUT_NAN, LOG2_E, TYPES, array_of, compile_kernel, exp2, set_num_threads
from paged_kernels.native import address_of, call
from paged_kernels.vector import to_float32

_GROUP = 64
_BLOCK = 256  # weights summed in float32 before the rest of a draw over the whole vocabulary is done in float64
_NUM_BEST = 64  # groups looked into before it is known how many tokens top_p keeps
_FEW_ROWS = 4  # not worth other threads

_LOW_HALF = 0xFFFFFFFF


def draw(logits: Tensor, temperatures: Tensor, min_p: Tensor, top_k: Tensor, top_p: Tensor, shares: Tensor) -> Tensor:
    """See `reference.draw`."""
    tokens = torch.empty(len(logits), dtype=torch.int64)
    rows = _rows(logits)
    _draw_rows(
        _draw_kernel(logits.dtype if logits.dtype in TYPES else torch.float32),
        rows,
        temperatures.numpy(),
        min_p.numpy(),
        top_k.numpy(),
        top_p.numpy(),
        shares.numpy(),
        tokens.numpy(),
        _num_threads(len(logits)),
    )
    return tokens


def best_logits(logits: Tensor, chosen: Tensor, num: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `reference.best_logits`."""
    num_rows = len(logits)
    normalisers = torch.empty(num_rows, dtype=torch.float64)
    ranks = torch.empty(num_rows, dtype=torch.int64)
    values, ids = torch.empty(num_rows, num), torch.empty(num_rows, num, dtype=torch.int64)
    results = (normalisers.numpy(), ranks.numpy(), values.numpy(), ids.numpy())
    _best_rows(_rows(logits), chosen.numpy(), *results, _num_threads(num_rows))
    return normalisers, ranks, values, ids


def _rows(logits: Tensor) -> NDArray[Any]:
    return array_of((logits if logits.dtype in TYPES else logits.float()).contiguous())


@functools.cache
def _draw_kernel(dtype: torch.dtype) -> int:
    """The address of `_draw_row`, for rows of this type."""
    ahead.wait_for_draws()
    keys = np.empty(0, np.int64)
    return address_of(_draw_row, TYPES[dtype], (0.0, 0.0, 0, 0.0), 0.0, keys, 0, np.empty(0, np.float32), keys, keys)


def _num_threads(num_rows: int) -> int:
    return 1 if num_rows <= _FEW_ROWS else set_num_threads()


@functools.partial(compile_kernel, parallel=True)
def _draw_rows(
    draw_row: int,
    logits: NDArray[Any],
    temperatures: NDArray[np.float64],
    min_p: NDArray[np.float64],
    top_k: NDArray[np.int64],
    top_p: NDArray[np.float64],
    shares: NDArray[np.float64],
    tokens: NDArray[np.int64],
    num_threads: int,
) -> None:
    num_rows, vocab_size = logits.shape
    for thread in numba.prange(num_threads):
        maxima = np.empty(-(-vocab_size // _GROUP), np.float32)
        keys = np.empty(vocab_size, np.int64)
        pivots = np.empty(vocab_size + 1, np.int64)
        for i in range(num_rows * thread // num_threads, num_rows * (thread + 1) // num_threads):
            filters = (temperatures[i], min_p[i], top_k[i], top_p[i])
            call(draw_row, (logits[i], filters, shares[i], tokens, i, maxima, keys, pivots))


@compile_kernel
def _draw_row(
    row: NDArray[Any],
    filters: tuple[float, float, int, float],
    share: float,
    tokens: NDArray[np.int64],
    i: int,
    maxima: NDArray[np.float32],
    keys: NDArray[np.int64],
    pivots: NDArray[np.int64],
) -> None:
    temperature, min_p, top_k, top_p = filters
    best = np.float32(_find_maxima(row, maxima))
    if temperature == 0 or top_k == 1 or min_p == 1:
        tokens[i] = _first(row, maxima, best)
    elif (top_k <= 0 or top_k >= len(row)) and min_p == 0 and top_p >= 1:
        tokens[i] = _draw_from_all(row, best, temperature, share)
    else:
        tokens[i] = _draw_from_best(row, best, filters, share, maxima, keys, pivots)


@functools.partial(compile_kernel, parallel=True)
def _best_rows(
    logits: NDArray[Any],
    chosen: NDArray[np.int64],
    normalisers: NDArray[np.float64],
    ranks: NDArray[np.int64],
    values: NDArray[np.float32],
    ids: NDArray[np.int64],
    num_threads: int,
) -> None:
    num_rows, vocab_size = logits.shape
    num = values.shape[1]
    for thread in numba.prange(num_threads):
        maxima = np.empty(-(-vocab_size // _GROUP), np.float32)
        keys = np.empty(vocab_size, np.int64)
        pivots = np.empty(vocab_size + 1, np.int64)
        for i in range(num_rows * thread // num_threads, num_rows * (thread + 1) // num_threads):
            row, best = logits[i], np.float32(_find_maxima(logits[i], maxima))
            normalisers[i] = np.float64(best) + math.log(_sum_weights(row, best, LOG2_E))
            ranks[i] = 1 + _count_above(row, to_float32(row[chosen[i]]))
            if num == 0:
                continue
            num_keys = _gather(row, maxima, _kth_largest(maxima, num, keys, pivots), keys)
            pivots[0] = num_keys
            num_pivots = 1
            for j in range(num):
                num_pivots = _settle(keys, j, pivots, num_pivots)
                values[i, j] = _value_of(keys[j])
                ids[i, j] = keys[j] & _LOW_HALF


@functools.partial(compile_kernel, fast_math=FAST_MATH_WITHOUT_NAN)
def _find_maxima(row: NDArray[Any], maxima: NDArray[np.float32]) -> np.float32:
    """The largest number of each group, and of all; with a NaN, anything, which is what lets LLVM use vectors."""
    highest = np.float32(-np.inf)
    for group in range(len(maxima)):
        start = group * _GROUP
        end = min(start + _GROUP, len(row))
        largest = np.float32(to_float32(row[start]))
        for j in range(np.uint64(start), np.uint64(end)):  # unsigned: signed indices wrap around, without vectors
            largest = max(largest, to_float32(row[j]))
        maxima[group] = largest
        highest = max(highest, largest)
    return highest


@compile_kernel
def _first(row: NDArray[Any], maxima: NDArray[np.float32], best: np.float32) -> int:
    """The lowest id of the best token; 0 if that is NaN."""
    for group in range(len(maxima)):
        if maxima[group] == best:
            for j in range(group * _GROUP, min((group + 1) * _GROUP, len(row))):
                if to_float32(row[j]) == best:
                    return j
    return 0


@compile_kernel
def _weigh(x: np.float32, best: np.float32, scale: np.float32) -> np.float32:
    """2 ** ((x - best) * scale), and 0 instead of next to nothing, so that what is masked has no weight."""
    power = (x - best) * scale
    weight = exp2(power)
    return weight if power > np.float32(-120) else np.float32(0)


@compile_kernel
def _sum_weights(row: NDArray[Any], best: np.float32, scale: np.float32) -> float:
    total = 0.0
    for start in range(0, len(row), _BLOCK):
        total += float(_sum_block(row, start, best, scale))
    return total


@compile_kernel
def _sum_block(row: NDArray[Any], start: int, best: np.float32, scale: np.float32) -> np.float32:
    total = np.float32(0)
    for j in range(np.uint64(start), np.uint64(min(start + _BLOCK, len(row)))):
        total += _weigh(to_float32(row[j]), best, scale)
    return total


@compile_kernel
def _count_above(row: NDArray[Any], value: np.float32) -> np.int32:
    count = np.int32(0)
    for j in range(np.uint64(0), np.uint64(len(row))):
        count += np.int32(to_float32(row[j]) > value)
    return count


@compile_kernel
def _draw_from_all(row: NDArray[Any], best: np.float32, temperature: float, share: float) -> int:
    """In the order of ids: first the block, then the token inside it."""
    scale = np.float32(LOG2_E / temperature)
    total = _sum_weights(row, best, scale)
    target = min(share * total, np.nextafter(total, 0.0))
    start, block, before, weight = 0, 0.0, 0.0, 0.0
    chosen = -1
    while start < len(row):
        block = float(_sum_block(row, start, best, scale))
        if before + block > target:
            break
        before += block
        start += _BLOCK
    for j in range(start, min(start + _BLOCK, len(row))):
        weight = float(_weigh(to_float32(row[j]), best, scale))
        if weight > 0:
            chosen = j
        before += weight
        if before > target and chosen >= 0:
            break
    return max(chosen, 0)


@compile_kernel
def _draw_from_best(
    row: NDArray[Any],
    best: np.float32,
    filters: tuple[float, float, int, float],
    share: float,
    maxima: NDArray[np.float32],
    keys: NDArray[np.int64],
    pivots: NDArray[np.int64],
) -> int:
    """In the order of falling logits, among what `min_p`, then `top_k`, then `top_p` keep."""
    temperature, min_p, top_k, top_p = filters
    top_k = top_k if 0 < top_k < len(row) else 0
    mass = 0.0  # what top_p is a share of; of all tokens only if neither of the others takes any away
    if min_p == 0 and top_k == 0:
        mass = _sum_weights(row, best, np.float32(LOG2_E / temperature))
    num_keys = _gather_kept(row, best, filters, mass, maxima, keys, pivots)
    if num_keys == 0:
        return 0
    if min_p > 0:
        num_keys = _drop_light(keys, num_keys, best, temperature, min_p)
    pivots[0] = num_keys
    num_pivots, num_settled = 1, 0
    if 0 < top_k < num_keys:
        while num_settled < num_keys:
            num_pivots = _settle(keys, num_settled, pivots, num_pivots)
            num_settled += 1
            if num_settled > top_k and keys[num_settled - 1] >> 32 != keys[top_k - 1] >> 32:
                num_keys = num_settled - 1  # all that tie with the last one are kept
    total = mass if mass > 0 else _sum_keys(keys, num_keys, best, temperature)
    if top_p < 1:
        limit, total, num_kept = top_p * total, 0.0, 0
        while num_kept < num_keys and (total < limit or num_kept == 0):
            if num_kept >= num_settled:
                num_pivots = _settle(keys, num_kept, pivots, num_pivots)
                num_settled = num_kept + 1
            total += _weight_of(keys[num_kept], best, temperature)
            num_kept += 1
        num_keys = num_kept
    target = min(share * total, np.nextafter(total, 0.0))
    before, chosen = 0.0, 0
    for i in range(num_keys):
        if i >= num_settled:
            num_pivots = _settle(keys, i, pivots, num_pivots)
            num_settled = i + 1
        weight = _weight_of(keys[i], best, temperature)
        if weight == 0 and i > 0:
            break
        chosen = keys[i] & _LOW_HALF
        before += weight
        if before > target:
            break
    return chosen


@compile_kernel
def _gather_kept(
    row: NDArray[Any],
    best: np.float32,
    filters: tuple[float, float, int, float],
    mass: float,
    maxima: NDArray[np.float32],
    keys: NDArray[np.int64],
    pivots: NDArray[np.int64],
) -> int:
    """Every token that may be kept, and some others; how many there are."""
    temperature, min_p, top_k, top_p = filters
    # Tokens lighter than this add up to less than what top_p leaves out, however many there are.
    lightest = min_p if mass == 0 else (1 - top_p) * mass / len(row)
    floor = np.float32(best + temperature * math.log(0.99 * lightest)) if lightest > 0 else np.float32(-np.inf)
    num_best = top_k if 0 < top_k < len(row) else _NUM_BEST if mass > 0 else len(maxima)
    while True:
        cut = max(floor, _kth_largest(maxima, num_best, keys, pivots))
        num_keys = _gather(row, maxima, cut, keys)
        if mass == 0 or not cut > floor or _sum_keys(keys, num_keys, best, temperature) >= top_p * mass:
            return num_keys
        num_best *= 4


@compile_kernel
def _kth_largest(maxima: NDArray[np.float32], k: int, keys: NDArray[np.int64], pivots: NDArray[np.int64]) -> np.float32:
    """A lower bound of the row's k-th largest number."""
    if k >= len(maxima):
        return np.float32(-np.inf)
    for group in range(len(maxima)):
        keys[group] = _key(maxima[group], group)
    pivots[0] = len(maxima)
    num_pivots = 1
    for i in range(k):
        num_pivots = _settle(keys, i, pivots, num_pivots)
    return _value_of(keys[k - 1])


@compile_kernel
def _gather(row: NDArray[Any], maxima: NDArray[np.float32], cut: np.float32, keys: NDArray[np.int64]) -> int:
    """All tokens that are not below the cut; how many there are."""
    num_keys = 0
    for group in range(len(maxima)):
        if maxima[group] < cut:
            continue
        for j in range(group * _GROUP, min((group + 1) * _GROUP, len(row))):
            value = to_float32(row[j])
            if not value < cut:
                keys[num_keys] = _key(value, j)
                num_keys += 1
    return num_keys


@compile_kernel
def _drop_light(keys: NDArray[np.int64], num_keys: int, best: np.float32, temperature: float, min_p: float) -> int:
    num_kept = 0
    for i in range(num_keys):
        if _weight_of(keys[i], best, temperature) >= min_p:
            keys[num_kept] = keys[i]
            num_kept += 1
    return num_kept


@compile_kernel
def _sum_keys(keys: NDArray[np.int64], num_keys: int, best: np.float32, temperature: float) -> float:
    total = 0.0
    for i in range(num_keys):
        total += _weight_of(keys[i], best, temperature)
    return total


@compile_kernel
def _weight_of(key: int, best: np.float32, temperature: float) -> float:
    return math.exp((np.float64(_value_of(key)) - np.float64(best)) / temperature)


@compile_kernel
def _key(value: np.float32, token: int) -> np.int64:
    bits = np.float32(value + np.float32(0)).view(np.int32)  # adding zero makes -0.0 equal to 0.0 in its bits as well
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (np.int64(~ordered) << 32) | token


@compile_kernel
def _value_of(key: int) -> np.float32:
    ordered = np.int32(~(key >> 32))
    return np.int32(ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).view(np.float32)


@compile_kernel
def _settle(keys: NDArray[np.int64], i: int, pivots: NDArray[np.int64], num_pivots: int) -> int:
    """Put the i-th smallest key in its place, once all before it are; returns the new number of pivots.

    Whatever is before a pivot's place is smaller than what is in it and after it. The last pivot is the nearest one,
    and the first is the end of the keys.
    """
    while pivots[num_pivots - 1] != i:
        pivots[num_pivots] = _partition(keys, i, pivots[num_pivots - 1])
        num_pivots += 1
    return num_pivots - 1


@compile_kernel
def _partition(keys: NDArray[np.int64], begin: int, end: int) -> int:
    """Move what is smaller than the key in the middle before it; where that key has come to be."""
    middle, last = begin + (end - begin) // 2, end - 1
    pivot = keys[middle]
    keys[middle] = keys[last]
    place = begin
    for i in range(begin, last):
        key = keys[i]
        keys[i] = keys[place]
        keys[place] = key
        place += key < pivot
    keys[last] = keys[place]
    keys[place] = pivot
    return place
