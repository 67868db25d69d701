"""Attention of a few rows: keys and values stream through the registers once, straight from the cache.

They are widened to float32 on the way, and each is multiplied with all rows. The time is that of reading them, so what
is needed next, whose place the processor cannot foresee, is brought into the caches meanwhile: a tile's values during
its keys, and the next tile's keys during its values. A block ahead would be too late for memory.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from paged_kernels.attention_rows import (
    MANY_ROWS,
    Batch,
    Scales,
    Softmax,
    adjust,
    load_scales,
    load_slots,
    make_scales,
    padded,
    zeros,
)
from paged_kernels.compiled import LOG2_E, compile_kernel
from paged_kernels.plan import first_visible
from paged_kernels.tiles import KEY_TILE, add_values, dot_keys, weigh_row
from paged_kernels.vector import LANES, to_float32

_MOST_ROWS = MANY_ROWS - 1


class FewRows(NamedTuple):
    """Where an item of few rows is worked on; the tiles are for what cannot be used in place."""

    queries: NDArray[np.float32]  # [rows, D padded]
    keys: NDArray[Any]  # [KEY_TILE, D padded]
    values: NDArray[Any]  # [KEY_TILE, Dv padded]
    logits: NDArray[np.float32]  # [rows, KEY_TILE]
    scales: Scales
    softmax: Softmax


@compile_kernel
def make_few_rows(batch: Batch) -> FewRows:
    key_width, value_width = padded(batch.k_cache.shape[3], LANES), padded(batch.out.shape[2], LANES)
    single = np.empty(0, np.float32)
    highest, weights = np.empty(_MOST_ROWS, np.float32), np.empty(_MOST_ROWS, np.float32)
    return FewRows(
        zeros(_MOST_ROWS, key_width, single),
        zeros(KEY_TILE, key_width, batch.numbers),
        zeros(KEY_TILE, value_width, batch.numbers),
        zeros(_MOST_ROWS, KEY_TILE, single),
        make_scales(batch),
        Softmax(zeros(_MOST_ROWS, value_width, single), highest, weights),
    )


@compile_kernel
def attend_few(batch: Batch, item: Any, work: FewRows) -> None:
    k_cache, v_cache, block_table, group = batch.k_cache, batch.v_cache, batch.block_tables[item.seq], batch.group
    window, chunk, slopes = batch.window, batch.chunk, batch.alibi_slopes[item.kv_head * group :]
    queries, logits, scales = work.queries, work.logits, work.scales
    sums, highest, weights = work.softmax.sums, work.softmax.highest, work.softmax.weights
    key_size, value_size, num_rows = k_cache.shape[3], batch.out.shape[2], item.num_queries * group
    key_width, value_width = queries.shape[1], sums.shape[1]
    is_adjusted, k_scales = batch.softcap > 0 or len(slopes) > 0, scales.keys
    scale = LOG2_E if is_adjusted else batch.scale * LOG2_E
    _load_queries(batch.query, batch.token_stride, batch.head_stride, item, group, key_size, queries)
    # Four keys are multiplied at once; in whole blocks of fours, none of them can be past the end of the cache.
    in_place = k_cache.shape[2] % 4 == 0 and key_size == key_width
    to_values = (v_cache.ctypes.data - k_cache.ctypes.data) // k_cache.itemsize
    end_key = item.position + item.num_queries  # of all items of this sequence: the next one goes on where this ends
    for start in range(item.first_key // 4 * 4 if in_place else item.first_key, item.end_key, KEY_TILE):
        num_keys = min(KEY_TILE, item.end_key - start)
        first = max(start, item.first_key)
        num_values = start + num_keys - first
        if in_place:
            _multiply_blocks(
                queries, num_rows, k_cache, item.kv_head, block_table, start, num_keys, logits, to_values,
                v_cache.shape[3],
            )  # fmt: skip
        else:
            load_slots(k_cache, item.kv_head, block_table, start, num_keys, key_size, work.keys)
            dot_keys(queries, num_rows, work.keys, 0, 0, num_keys, key_width, logits, 0, KEY_TILE)
        if len(k_scales):
            load_scales(batch.k_scales, item.kv_head, block_table, first, num_values, scales.keys[first - start :])
            load_scales(batch.v_scales, item.kv_head, block_table, first, num_values, scales.values[first - start :])
        if is_adjusted:
            distance = start - item.position
            adjust(logits, num_rows, 0, group, distance, batch.scale, scales.keys, batch.softcap, slopes)
            k_scales = scales.ones
        for row in range(num_rows):
            position = item.position + row // group
            low = max(first_visible(position, window, chunk), first) - start
            high = min(position + 1 - start, num_keys)
            place = row * KEY_TILE
            if low < high:
                weigh_row(
                    k_cache, logits, place, low, high, scale, k_scales, scales.values, highest, weights, row, sums,
                    value_width, logits, place,
                )  # fmt: skip
            else:
                logits[row] = 0
        if value_size == value_width:
            _add_blocks(
                logits, first - start, num_rows, v_cache, item.kv_head, block_table, first, num_values, sums,
                -to_values, key_size, end_key,
            )  # fmt: skip
        else:
            load_slots(v_cache, item.kv_head, block_table, first, num_values, value_size, work.values)
            add_values(
                logits, first - start, KEY_TILE, num_rows, work.values, 0, value_width, 0, num_values, value_width, sums
            )


@compile_kernel
def _load_queries(
    query: NDArray[Any],
    token_stride: int,
    head_stride: int,
    item: Any,
    group: int,
    head_size: int,
    queries: NDArray[np.float32],
) -> None:
    for row in range(item.num_queries * group):
        head = item.kv_head * group + row % group
        start = (item.token + row // group) * token_stride + head * head_stride
        for d in range(np.uint64(head_size)):  # unsigned: signed indices wrap around, without vectors
            queries[row, d] = to_float32(query[np.uint64(start) + d])


@compile_kernel
def _multiply_blocks(
    queries: NDArray[np.float32],
    num_rows: int,
    cache: NDArray[Any],
    head: int,
    block_table: NDArray[np.int32],
    start: int,
    num_keys: int,
    logits: NDArray[np.float32],
    to_values: int,
    value_width: int,
) -> None:
    """Meanwhile the values of these keys are fetched, which are `to_values` numbers from the keys' cache."""
    _, num_heads, block_size, width = cache.shape
    done = 0
    while done < num_keys:
        block, offset = np.int64(block_table[(start + done) // block_size]), (start + done) % block_size
        run = min(block_size - offset, num_keys - done)
        slot = (block * num_heads + head) * block_size + offset
        ahead = to_values + slot * (value_width - width)
        dot_keys(queries, num_rows, cache, slot * width, ahead, run, width, logits, done, KEY_TILE)
        done += run


@compile_kernel
def _add_blocks(
    weights: NDArray[np.float32],
    column: int,
    num_rows: int,
    cache: NDArray[Any],
    head: int,
    block_table: NDArray[np.int32],
    start: int,
    num_values: int,
    sums: NDArray[np.float32],
    to_keys: int,
    key_width: int,
    end_key: int,
) -> None:
    """Meanwhile the keys of the next tile are fetched, which are `to_keys` numbers from the values' cache."""
    _, num_heads, block_size, row_size = cache.shape
    width = sums.shape[1]
    done = 0
    while done < num_values:
        position = start + done
        block, offset = np.int64(block_table[position // block_size]), position % block_size
        run = min(block_size - offset, num_values - done)
        slot = (block * num_heads + head) * block_size + offset
        ahead, position = 0, position + KEY_TILE
        if position < end_key:
            block, offset = np.int64(block_table[position // block_size]), position % block_size
            ahead = to_keys + ((block * num_heads + head) * block_size + offset) * key_width - slot * row_size
        add_values(
            weights, column + done, KEY_TILE, num_rows, cache, slot * row_size, row_size, ahead, run, width, sums
        )
        done += run
