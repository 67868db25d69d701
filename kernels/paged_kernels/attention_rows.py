"""What the two ways to attend share: the batch, its options, and the softmax of a row over a tile of keys.

Whatever the mask, a query sees one range of positions, so a row's softmax is over a range of the tile. Logits are kept
in base 2, where the exponential needs no range reduction. Rows are a whole number of LANES long, padded with zeros.

A call between compiled functions costs an instruction for each number in each array's description, and atomic ones
for the arrays taken out of a tuple. So what runs once per tile or more often takes few arrays, or is an intrinsic.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from paged_kernels.compiled import LOG2_E, compile_kernel
from paged_kernels.tiles import KEY_TILE, LOWEST, copy_numbers
from paged_kernels.vector import LANES, from_float32, to_float32

MANY_ROWS = 8  # of an item, from which turning its keys pays


class Batch(NamedTuple):
    """What the items have in common; 0 and an empty array stand for None."""

    query: NDArray[Any]  # flat
    token_stride: int
    head_stride: int
    k_cache: NDArray[Any]  # [num_blocks, K, block_size, D]
    v_cache: NDArray[Any]  # [num_blocks, K, block_size, Dv], or k_cache: a value is the first Dv numbers of a row
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


class Scales(NamedTuple):
    """Of a tile's keys and values, [KEY_TILE] each; empty if the cache holds floats."""

    keys: NDArray[np.float32]
    values: NDArray[np.float32]
    ones: NDArray[np.float32]


@compile_kernel
def make_scales(batch: Batch) -> Scales:
    num = KEY_TILE if len(batch.k_scales) else 0
    return Scales(np.zeros(num, np.float32), np.zeros(num, np.float32), np.ones(num, np.float32))


@compile_kernel
def begin_rows(
    item: Any,
    group: int,
    sinks: NDArray[np.float32],
    sums: NDArray[np.float32],
    highest: NDArray[np.float32],
    weights: NDArray[np.float32],
) -> None:
    """Begin the item's softmax: nothing seen but the sink, which counts once if the keys are split."""
    width = np.uint64(sums.shape[1])  # unsigned: signed indices wrap around, without vectors
    for row in range(item.num_queries * group):
        for d in range(width):
            sums[row, d] = 0
        highest[row] = LOWEST
        weights[row] = 0
        if len(sinks) and item.split == 0:
            highest[row] = sinks[item.kv_head * group + row % group] * LOG2_E
            weights[row] = 1


@compile_kernel
def end_rows(
    item: Any,
    group: int,
    sums: NDArray[np.float32],
    highest: NDArray[np.float32],
    weights: NDArray[np.float32],
    out: NDArray[Any],
    partials: NDArray[np.float32],
) -> None:
    """Write the item's rows to the output, or to the partial results if other items have the rest of their keys."""
    width, first_head = np.uint64(sums.shape[1]), item.kv_head * group
    for row in range(item.num_queries * group):
        if item.num_splits == 1:
            write_row(sums, row, weights[row], out, item.token + row // group, first_head + row % group)
        else:
            partial = item.partial + row
            for d in range(width):
                partials[partial, d] = sums[row, d]
            partials[partial, width] = highest[row]
            partials[partial, width + np.uint64(1)] = weights[row]


@compile_kernel
def write_row(
    sums: NDArray[np.float32], row: int, weight: np.float32, out: NDArray[Any], token: int, head: int
) -> None:
    factor = np.float32(1) / weight
    for d in range(np.uint64(out.shape[2])):
        out[token, head, d] = from_float32(sums[row, d] * factor, out)


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
    cache: NDArray[Any],
    head: int,
    block_table: NDArray[np.int32],
    start: int,
    num_slots: int,
    size: int,
    tile: NDArray[Any],
) -> None:
    """Copy the first `size` numbers of the slots of consecutive positions into the first rows of a tile."""
    _, num_heads, block_size, row_size = cache.shape
    width = tile.shape[1]
    whole = size // LANES * LANES
    done = 0
    while done < num_slots:
        block, offset = block_table[(start + done) // block_size], (start + done) % block_size
        run = min(block_size - offset, num_slots - done)
        source = ((block * num_heads + head) * block_size + offset) * row_size
        if size == width == row_size:
            copy_numbers(cache, source, tile, done * width, run * width)
        else:
            for i in range(run):
                copy_numbers(cache, source + i * row_size, tile, (done + i) * width, whole)
                for d in range(whole, size):
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
    block_size, done = scales.shape[2], 0
    while done < num_slots:
        block, offset = block_table[(start + done) // block_size], (start + done) % block_size
        run = min(block_size - offset, num_slots - done)
        stored, target = scales[block, head, offset : offset + run], tile[done : done + run]
        for i in range(np.uint64(run)):  # unsigned: signed indices wrap around, without vectors
            target[i] = to_float32(stored[i])
        done += run


@compile_kernel
def adjust(
    logits: NDArray[np.float32],
    num_rows: int,
    first_row: int,
    group: int,
    distance: int,
    scale: np.float32,
    k_scales: NDArray[np.float32],
    softcap: np.float32,
    slopes: NDArray[np.float32],
) -> None:
    """Turn products with a tile of keys into logits, in base e, where these are not just scaled: softcap and ALiBi.

    Row 0 is head `first_row % group` of query `first_row // group` of an item; `distance` is how far the first key is
    from the item's first query.
    """
    for i in range(num_rows):
        row = first_row + i
        away = np.float32(distance - row // group)
        slope = slopes[row % group] if len(slopes) else np.float32(0)
        for j in range(KEY_TILE):
            logit = logits[i, j] * scale
            if len(k_scales):
                logit *= k_scales[j]
            if softcap > 0:
                logit = _tanh(logit / softcap) * softcap
            logits[i, j] = logit + slope * (away + np.float32(j))


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
