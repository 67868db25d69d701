"""Attention of a few rows: keys and values stream through the registers once, straight from the cache.

They are widened to float32 on the way, and each is multiplied with all rows. The time is that of reading them, so the
next block, whose place the processor cannot foresee, is brought into the caches while one is used.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from paged_kernels.attention_rows import (
    KEY_TILE,
    MANY_ROWS,
    Batch,
    Softmax,
    add_to_softmax,
    load_scales,
    load_slots,
    padded,
    visible_keys,
    zeros,
)
from paged_kernels.compiled import compile_kernel
from paged_kernels.tiles import add_values, dot_keys
from paged_kernels.vector import LANES, WIDTH, to_float32

_MOST_ROWS = MANY_ROWS - 1
_VECTORS = 4 if WIDTH == 16 else 1  # LANES of values that are added at once


class FewRows(NamedTuple):
    """Where an item of few rows is worked on; the tiles are for what cannot be used in place."""

    queries: NDArray[np.float32]  # [rows, D padded]
    keys: NDArray[Any]  # [KEY_TILE, D padded]
    values: NDArray[Any]  # [KEY_TILE, Dv padded]
    logits: NDArray[np.float32]  # [rows, KEY_TILE]
    scales: NDArray[np.float32]  # [2, KEY_TILE], or none
    softmax: Softmax


@compile_kernel
def make_few_rows(batch: Batch) -> FewRows:
    key_width, value_width = padded(batch.k_cache.shape[3], LANES), padded(batch.v_cache.shape[3], LANES)
    single = np.empty(0, np.float32)
    return FewRows(
        zeros(_MOST_ROWS, key_width, single),
        zeros(KEY_TILE, key_width, batch.numbers),
        zeros(KEY_TILE, value_width, batch.numbers),
        zeros(_MOST_ROWS, KEY_TILE, single),
        zeros(2, KEY_TILE if len(batch.k_scales) else 0, single),
        Softmax(
            zeros(_MOST_ROWS, value_width, single), np.empty(_MOST_ROWS, np.float32), np.empty(_MOST_ROWS, np.float32)
        ),
    )


@compile_kernel
def attend_few(batch: Batch, item: Any, work: FewRows) -> None:
    block_table = batch.block_tables[item.seq]
    _load_queries(batch, item, work.queries)
    # Four keys are multiplied at once; in whole blocks of fours, none of them can be past the end of the cache.
    in_place = batch.k_cache.shape[2] % 4 == 0 and batch.k_cache.shape[3] == work.queries.shape[1]
    for start in range(item.first_key // 4 * 4 if in_place else item.first_key, item.end_key, KEY_TILE):
        num_keys = min(KEY_TILE, item.end_key - start)
        if in_place:
            _multiply_blocks(batch, item, block_table, start, num_keys, work)
        else:
            load_slots(batch.k_cache, item.kv_head, block_table, start, num_keys, work.keys)
            for j in range(0, num_keys, 4):
                _multiply_rows(batch, item, work.keys, j * work.queries.shape[1], 0, j, work)
        if work.scales.shape[1]:
            load_scales(batch.k_scales, item.kv_head, block_table, start, num_keys, work.scales[0])
            load_scales(batch.v_scales, item.kv_head, block_table, start, num_keys, work.scales[1])
        for row in range(item.num_queries * batch.group):
            visible = visible_keys(batch, item, row, start, num_keys)
            add_to_softmax(
                batch, item, row, start, visible, work.logits[row], work.scales[0], work.scales[1], work.softmax
            )
        first = max(start, item.first_key)
        if batch.v_cache.shape[3] == work.values.shape[1]:
            _add_blocks(batch, item, block_table, first, first - start, start + num_keys - first, work)
        else:
            load_slots(batch.v_cache, item.kv_head, block_table, first, start + num_keys - first, work.values)
            _add_rows(batch, item, work.values, 0, 0, first - start, start + num_keys - first, work)


@compile_kernel
def _load_queries(batch: Batch, item: Any, queries: NDArray[np.float32]) -> None:
    for row in range(item.num_queries * batch.group):
        head = item.kv_head * batch.group + row % batch.group
        start = (item.token + row // batch.group) * batch.token_stride + head * batch.head_stride
        query = batch.query[start : start + batch.k_cache.shape[3]]
        for d in range(len(query)):
            queries[row, d] = to_float32(query[d])


@compile_kernel
def _multiply_blocks(
    batch: Batch, item: Any, block_table: NDArray[np.int32], start: int, num_keys: int, work: FewRows
) -> None:
    _, num_heads, block_size, width = batch.k_cache.shape
    done = 0
    while done < num_keys:
        block, offset = block_table[(start + done) // block_size], (start + done) % block_size
        run = min(block_size - offset, num_keys - done)
        source = ((block * num_heads + item.kv_head) * block_size + offset) * width
        ahead = _distance(block_table, start + done, start + done + run, start + num_keys, batch.k_cache)
        for j in range(0, run, 4):
            _multiply_rows(batch, item, batch.k_cache, source + j * width, ahead, done + j, work)
        done += run


@compile_kernel
def _distance(block_table: NDArray[np.int32], position: int, later_position: int, end: int, cache: NDArray[Any]) -> int:
    """How far the block of the later position is from that of the other, in numbers; 0 if there is none any more."""
    if later_position >= end:
        return 0
    _, num_heads, block_size, width = cache.shape
    blocks = block_table[later_position // block_size] - block_table[position // block_size]
    return np.int64(blocks) * num_heads * block_size * width


@compile_kernel
def _multiply_rows(
    batch: Batch, item: Any, keys: NDArray[Any], key: int, ahead: int, column: int, work: FewRows
) -> None:
    """All rows with four keys that follow one another."""
    queries, logits = work.queries, work.logits
    width, num_rows = queries.shape[1], item.num_queries * batch.group
    for row in range(0, num_rows, 4):
        source, target, rest = row * width, row * KEY_TILE + column, num_rows - row
        if rest >= 4:
            dot_keys(queries, source, keys, key, ahead, width, logits, target, KEY_TILE, 4)
        elif rest == 3:
            dot_keys(queries, source, keys, key, ahead, width, logits, target, KEY_TILE, 3)
        elif rest == 2:
            dot_keys(queries, source, keys, key, ahead, width, logits, target, KEY_TILE, 2)
        else:
            dot_keys(queries, source, keys, key, ahead, width, logits, target, KEY_TILE, 1)


@compile_kernel
def _add_blocks(
    batch: Batch, item: Any, block_table: NDArray[np.int32], start: int, column: int, num_values: int, work: FewRows
) -> None:
    _, num_heads, block_size, width = batch.v_cache.shape
    done = 0
    while done < num_values:
        block, offset = block_table[(start + done) // block_size], (start + done) % block_size
        run = min(block_size - offset, num_values - done)
        source = ((block * num_heads + item.kv_head) * block_size + offset) * width
        ahead = _distance(block_table, start + done, start + done + run, start + num_values, batch.v_cache)
        _add_rows(batch, item, batch.v_cache, source, ahead, column + done, run, work)
        done += run


@compile_kernel
def _add_rows(
    batch: Batch, item: Any, values: NDArray[Any], value: int, ahead: int, column: int, num_values: int, work: FewRows
) -> None:
    """To all rows, these values that follow one another."""
    weights, sums = work.logits, work.softmax.sums
    width, num_rows = sums.shape[1], item.num_queries * batch.group
    whole = width - width % (_VECTORS * LANES)
    for row in range(0, num_rows, 4):
        weight, target, rest = row * KEY_TILE + column, row * width, num_rows - row
        for d in range(0, whole, _VECTORS * LANES):
            _add(weights, weight, values, value + d, ahead, num_values, width, sums, target + d, rest)
        for d in range(whole, width, LANES):
            _add_narrow(weights, weight, values, value + d, ahead, num_values, width, sums, target + d, rest)


@compile_kernel
def _add(
    weights: NDArray[np.float32],
    weight: int,
    values: NDArray[Any],
    value: int,
    ahead: int,
    num_values: int,
    width: int,
    sums: NDArray[np.float32],
    target: int,
    num_rows: int,
) -> None:
    if num_rows >= 4:
        add_values(weights, weight, KEY_TILE, values, value, ahead, num_values, width, sums, target, 4, _VECTORS)
    elif num_rows == 3:
        add_values(weights, weight, KEY_TILE, values, value, ahead, num_values, width, sums, target, 3, _VECTORS)
    elif num_rows == 2:
        add_values(weights, weight, KEY_TILE, values, value, ahead, num_values, width, sums, target, 2, _VECTORS)
    else:
        add_values(weights, weight, KEY_TILE, values, value, ahead, num_values, width, sums, target, 1, _VECTORS)


@compile_kernel
def _add_narrow(
    weights: NDArray[np.float32],
    weight: int,
    values: NDArray[Any],
    value: int,
    ahead: int,
    num_values: int,
    width: int,
    sums: NDArray[np.float32],
    target: int,
    num_rows: int,
) -> None:
    """What is left of a row that is no whole number of _VECTORS."""
    if num_rows >= 4:
        add_values(weights, weight, KEY_TILE, values, value, ahead, num_values, width, sums, target, 4, 1)
    elif num_rows == 3:
        add_values(weights, weight, KEY_TILE, values, value, ahead, num_values, width, sums, target, 3, 1)
    elif num_rows == 2:
        add_values(weights, weight, KEY_TILE, values, value, ahead, num_values, width, sums, target, 2, 1)
    else:
        add_values(weights, weight, KEY_TILE, values, value, ahead, num_values, width, sums, target, 1, 1)
