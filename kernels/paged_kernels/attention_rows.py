"""What the two ways to attend share: the batch, its options, and the softmax of a row over a tile of keys.

Whatever the mask, a query sees one range of positions, so a row's softmax is over a range of the tile. Logits are kept
in base 2, where the exponential needs no range reduction. Rows are a whole number of LANES long, padded with zeros.
"""

import functools
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from paged_kernels.compiled import FAST_MATH_WITHOUT_NAN, LOG2_E, compile_kernel, exp2
from paged_kernels.plan import first_visible
from paged_kernels.tiles import copy_numbers
from paged_kernels.vector import LANES, from_float32, to_float32

KEY_TILE = 64
MANY_ROWS = 8  # of an item, from which turning its keys pays
LOWEST = np.float32(-1e30)


class Batch(NamedTuple):
    """What the items have in common; 0 and an empty array stand for None."""

    query: NDArray[Any]  # flat
    token_stride: int
    head_stride: int
    k_cache: NDArray[Any]  # [num_blocks, K, block_size, D]
    v_cache: NDArray[Any]  # [num_blocks, K, block_size, Dv]
    k_scales: NDArray[np.uint16]  # [num_blocks, K, block_size]
    v_scales: NDArray[np.uint16]
    block_tables: NDArray[np.int32]  # [S, max_blocks]
    out: NDArray[Any]  # [T, H, Dv]
    partials: NDArray[np.float32]  # [rows, Dv padded + 2]: weighted sum of values, highest logit, sum of weights
    numbers: NDArray[Any]  # empty, of the type in which tiles are multiplied
    units: NDArray[Any]  # empty, of the type of a unit of depth: a number, or a pair of them as int32
    group: int  # H // K
    scale: np.float32
    window: int
    chunk: int
    softcap: np.float32
    sinks: NDArray[np.float32]
    alibi_slopes: NDArray[np.float32]


class Softmax(NamedTuple):
    """Of each row of an item, so far."""

    sums: NDArray[np.float32]  # [rows, Dv padded]: values, each times its weight
    highest: NDArray[np.float32]  # [rows]: the logit that has weight 1
    weights: NDArray[np.float32]  # [rows]: their sum


@compile_kernel
def padded(size: int, step: int) -> int:
    return -(-size // step) * step


@compile_kernel
def zeros(num_rows: int, width: int, like: NDArray[Any]) -> NDArray[Any]:
    """Zeros that begin at a multiple of 64 bytes: vectors that straddle cache lines load half as fast."""
    memory = np.zeros(num_rows * width + 64 // like.itemsize, like.dtype)
    first = (-memory.ctypes.data % 64) // like.itemsize
    return memory[first : first + num_rows * width].reshape(num_rows, width)


@compile_kernel
def load_slots(
    cache: NDArray[Any], head: int, block_table: NDArray[np.int32], start: int, num_slots: int, tile: NDArray[Any]
) -> None:
    """Copy the slots of consecutive positions into the first rows of a tile."""
    _, num_heads, block_size, head_size = cache.shape
    width = tile.shape[1]
    whole = head_size // LANES * LANES
    done = 0
    while done < num_slots:
        block, offset = block_table[(start + done) // block_size], (start + done) % block_size
        run = min(block_size - offset, num_slots - done)
        source = ((block * num_heads + head) * block_size + offset) * head_size
        if width == head_size:
            copy_numbers(cache, source, tile, done * width, run * width)
        else:
            for i in range(run):
                copy_numbers(cache, source + i * head_size, tile, (done + i) * width, whole)
                for d in range(whole, head_size):
                    copy_number(cache[block, head, offset + i], d, tile[done + i], d)
        done += run


@compile_kernel
def copy_number(source: NDArray[Any], i: int, target: NDArray[Any], j: int) -> None:
    target[j] = from_float32(to_float32(source[i]), target)


@compile_kernel
def load_scales(
    scales: NDArray[np.uint16],
    head: int,
    block_table: NDArray[np.int32],
    start: int,
    num_slots: int,
    tile: NDArray[np.float32],
) -> None:
    block_size = scales.shape[2]
    for i in range(num_slots):
        tile[i] = to_float32(scales[block_table[(start + i) // block_size], head, (start + i) % block_size])


@compile_kernel
def visible_keys(batch: Batch, item: Any, row: int, start: int, num_keys: int) -> tuple[int, int]:
    """The range that a row sees of the keys that start at this position; none if it ends before it begins."""
    position = item.position + row // batch.group
    first = max(first_visible(position, batch.window, batch.chunk), item.first_key)
    return max(first - start, 0), min(position + 1 - start, num_keys)


@compile_kernel
def add_to_softmax(
    batch: Batch,
    item: Any,
    row: int,
    start: int,
    visible: tuple[int, int],
    logits: NDArray[np.float32],
    k_scales: NDArray[np.float32],
    v_scales: NDArray[np.float32],
    softmax: Softmax,
) -> None:
    """Turn products with a tile of keys into the weights of its values, and what came before to their scale."""
    low, high = visible
    if low >= high:
        for j in range(KEY_TILE):
            logits[j] = 0
        return
    if len(k_scales):
        for j in range(KEY_TILE):
            logits[j] *= k_scales[j]
    if batch.softcap > 0 or len(batch.alibi_slopes):
        _adjust(batch, item, row, start, logits)
    else:
        scale = batch.scale * LOG2_E
        for j in range(KEY_TILE):
            logits[j] *= scale
    _hide(logits, low, high)
    before = softmax.highest[row]
    after = max(before, _highest(logits))
    total = _exponentiate(logits, low, high, after)
    if len(v_scales):
        for j in range(KEY_TILE):
            logits[j] *= v_scales[j]
    decay = exp2(before - after)
    softmax.highest[row] = after
    softmax.weights[row] = softmax.weights[row] * decay + total
    if decay != 1:
        sums = softmax.sums[row]
        for d in range(np.uint64(len(sums))):  # unsigned: signed indices wrap around, without vectors
            sums[d] *= decay


@compile_kernel
def _adjust(batch: Batch, item: Any, row: int, start: int, logits: NDArray[np.float32]) -> None:
    """Apply the scale, softcap and ALiBi."""
    for j in range(KEY_TILE):
        logits[j] *= batch.scale
    if batch.softcap > 0:
        for j in range(KEY_TILE):
            logits[j] = _tanh(logits[j] / batch.softcap) * batch.softcap
    if len(batch.alibi_slopes):
        slope = batch.alibi_slopes[item.kv_head * batch.group + row % batch.group]
        distance = start - item.position - row // batch.group
        for j in range(KEY_TILE):
            logits[j] += slope * np.float32(distance + j)
    for j in range(KEY_TILE):
        logits[j] *= LOG2_E


@compile_kernel
def _hide(logits: NDArray[np.float32], low: int, high: int) -> None:
    first, num = np.uint32(low), np.uint32(high - low)
    for j in range(KEY_TILE):
        logits[j] = logits[j] if np.uint32(j) - first < num else LOWEST


@functools.partial(compile_kernel, fast_math=FAST_MATH_WITHOUT_NAN)
def _highest(logits: NDArray[np.float32]) -> np.float32:
    """The maximum, or anything if there is a NaN: that is what lets LLVM use vectors."""
    highest = LOWEST
    for j in range(KEY_TILE):
        highest = max(highest, logits[j])
    return highest


@compile_kernel
def _exponentiate(logits: NDArray[np.float32], low: int, high: int, highest: np.float32) -> np.float32:
    first, num = np.uint32(low), np.uint32(high - low)
    total = np.float32(0)
    for j in range(KEY_TILE):
        weight = exp2(logits[j] - highest)
        weight = weight if np.uint32(j) - first < num else np.float32(0)
        logits[j] = weight
        total += weight
    return total


@compile_kernel
def _tanh(x: np.float32) -> np.float32:
    """Eigen's rational approximation, within a few units in the last place."""
    x = min(max(x, np.float32(-7.9053111)), np.float32(7.9053111))
    square = x * x
    p = np.float32(-2.76076847742355e-16) * square + np.float32(2.00018790482477e-13)
    p = p * square + np.float32(-8.60467152213735e-11)
    p = p * square + np.float32(5.12229709037114e-08)
    p = p * square + np.float32(1.48572235717979e-05)
    p = p * square + np.float32(6.37261928875436e-04)
    p = p * square + np.float32(4.89352455891786e-03)
    q = np.float32(1.19825839466702e-06) * square + np.float32(1.18534705686654e-04)
    q = q * square + np.float32(2.26843463243900e-03)
    q = q * square + np.float32(4.89352518554385e-03)
    return x * p / q
