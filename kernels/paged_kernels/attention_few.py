"""Attention of a few rows: keys and values stream through the registers once, straight from the cache.

The time is that of reading them. So while an item is worked on, the keys and values of the next one are brought into
the second cache: the processor foresees neither where they are nor, of a short item, that there will be any.

Where the processor multiplies pairs of bfloat16, queries, keys and the weights of values stay bfloat16; otherwise keys
and values are widened to float32 on the way.
"""

from typing import Any, NamedTuple

import numpy as np
from numba.extending import overload
from numpy.typing import NDArray

from paged_kernels.attention_rows import (
    MANY_ROWS,
    Batch,
    Scales,
    Softmax,
    adjust,
    begin_rows,
    end_rows,
    load_scales,
    load_slots,
    make_scales,
    padded,
    zeros,
)
from paged_kernels.compiled import LOG2_E, compile_kernel
from paged_kernels.plan import first_visible
from paged_kernels.tiles import KEY_TILE, add_values, dot_keys, fetch_numbers, weigh_row
from paged_kernels.vector import LANES, from_float32, to_float32

_MOST_ROWS = MANY_ROWS - 1
_SINGLE = np.empty(0, np.float32)


class FewRows(NamedTuple):
    """Where an item of few rows is worked on; the tiles are for what cannot be used in place."""

    queries: NDArray[Any]  # [rows, D padded]: bfloat16 if keys are multiplied as they are, or float32
    keys: NDArray[Any]  # [KEY_TILE, D padded]
    values: NDArray[Any]  # [KEY_TILE, Dv padded]
    logits: NDArray[np.float32]  # [rows, KEY_TILE]
    weights: NDArray[Any]  # [rows, KEY_TILE], of the queries' type
    scales: Scales
    softmax: Softmax


@compile_kernel
def _make_few_rows(batch: Batch, in_place: bool) -> FewRows:
    key_width, value_width = padded(batch.k_cache.shape[3], LANES), padded(batch.out.shape[2], LANES)
    type_of_rows = _type_of_rows(batch.numbers, batch.k_cache)
    highest, weights = np.empty(_MOST_ROWS, np.float32), np.empty(_MOST_ROWS, np.float32)
    return FewRows(
        zeros(_MOST_ROWS, key_width, type_of_rows),
        zeros(0 if in_place else KEY_TILE, key_width, batch.numbers),
        zeros(0 if batch.out.shape[2] == value_width else KEY_TILE, value_width, batch.numbers),
        zeros(_MOST_ROWS, KEY_TILE, _SINGLE),
        zeros(_MOST_ROWS, KEY_TILE, type_of_rows),
        make_scales(batch),
        Softmax(zeros(_MOST_ROWS, value_width, _SINGLE), highest, weights),
    )


def _type_of_rows(numbers: NDArray[Any], cache: NDArray[Any]) -> NDArray[Any]:
    """An empty array of it."""
    return numbers if numbers.dtype == cache.dtype else _SINGLE


def _compile_type_of_rows(numbers: Any, cache: Any) -> Any:
    if numbers.dtype == cache.dtype:
        return lambda numbers, cache: numbers
    return lambda numbers, cache: _SINGLE


overload(_type_of_rows, strict=False)(_compile_type_of_rows)  # whose parameters have annotations, which Numba minds


@compile_kernel
def attend_few(batch: Batch, items: NDArray[Any]) -> None:
    k_cache, v_cache, tables, out, partials = (
        batch.k_cache, batch.v_cache, batch.block_tables, batch.out, batch.partials
    )  # fmt: skip
    key_size, value_size = k_cache.shape[3], out.shape[2]
    # Four keys are multiplied at once; in whole blocks of fours, none of them can be past the end of the cache.
    in_place = k_cache.shape[2] % 4 == 0 and key_size % LANES == 0
    work = _make_few_rows(batch, in_place)
    queries, logits, weights, scales, softmax = work.queries, work.logits, work.weights, work.scales, work.softmax
    key_tile, value_tile, sums, highest, totals = work.keys, work.values, softmax.sums, softmax.highest, softmax.weights
    key_width, value_width = queries.shape[1], sums.shape[1]
    group, slopes, sinks = batch.group, batch.alibi_slopes, batch.sinks
    is_adjusted, k_scales, v_scales = batch.softcap > 0 or len(slopes) > 0, scales.keys, scales.values
    scale, weigh_scales = LOG2_E if is_adjusted else batch.scale * LOG2_E, scales.ones if is_adjusted else k_scales
    _fetch(k_cache, tables, items[0], items[0].first_key, items[0].end_key)
    _fetch(v_cache, tables, items[0], items[0].first_key, items[0].end_key)
    for i in range(len(items)):
        item, following = items[i], items[min(i + 1, len(items) - 1)]
        num_rows, begin = item.num_queries * group, item.first_key // 4 * 4 if in_place else item.first_key
        fetched = following.first_key
        begin_rows(item, group, sinks, sums, highest, totals)
        _load_queries(batch.query, batch.token_stride, batch.head_stride, item, group, key_size, queries)
        for start in range(begin, item.end_key, KEY_TILE):
            num_keys, first = min(KEY_TILE, item.end_key - start), max(start, item.first_key)
            num_values, to_fetch = start + num_keys - first, min(fetched + num_keys, following.end_key)
            _fetch(k_cache, tables, following, fetched, to_fetch)
            if in_place:
                _multiply_blocks(queries, num_rows, k_cache, tables, item, start, num_keys, logits)
            else:
                load_slots(k_cache, item.kv_head, tables[item.seq], start, num_keys, key_size, key_tile)
                dot_keys(queries, num_rows, key_tile, 0, num_keys, key_width, logits, 0, KEY_TILE)
            if len(k_scales):
                table, place = tables[item.seq], first - start
                load_scales(batch.k_scales, item.kv_head, table, first, num_values, k_scales[place:])
                load_scales(batch.v_scales, item.kv_head, table, first, num_values, v_scales[place:])
            if is_adjusted:
                distance, of_head = start - item.position, slopes[item.kv_head * group :]
                adjust(logits, num_rows, 0, group, distance, batch.scale, k_scales, batch.softcap, of_head)
            for row in range(num_rows):
                position, place = item.position + row // group, row * KEY_TILE
                low = max(first_visible(position, batch.window, batch.chunk), first) - start
                high = min(position + 1 - start, num_keys)
                if low < high:
                    weigh_row(
                        k_cache, logits, place, low, high, scale, weigh_scales, v_scales,
                        highest, totals, row, sums, value_width, weights, place,
                    )  # fmt: skip
                else:
                    weights[row] = 0
            _fetch(v_cache, tables, following, fetched, to_fetch)
            fetched = to_fetch
            if value_size == value_width:
                _add_blocks(weights, first - start, num_rows, v_cache, tables, item, first, num_values, sums)
            else:
                load_slots(v_cache, item.kv_head, tables[item.seq], first, num_values, value_size, value_tile)
                place = first - start
                add_values(
                    weights, place, KEY_TILE, num_rows, value_tile, 0, value_width, num_values, value_width, sums
                )
        _fetch(k_cache, tables, following, fetched, following.end_key)
        _fetch(v_cache, tables, following, fetched, following.end_key)
        end_rows(item, group, sums, highest, totals, out, partials)


@compile_kernel
def _fetch(cache: NDArray[Any], tables: NDArray[np.int32], item: Any, start: int, end: int) -> None:
    """Bring the item's keys, or values, of these positions into the second cache."""
    _, num_heads, block_size, width = cache.shape
    while start < end:
        block, offset = np.int64(tables[item.seq, start // block_size]), start % block_size
        run = min(block_size - offset, end - start)
        fetch_numbers(cache, ((block * num_heads + item.kv_head) * block_size + offset) * width, run * width)
        start += run


@compile_kernel
def _load_queries(
    query: NDArray[Any],
    token_stride: int,
    head_stride: int,
    item: Any,
    group: int,
    head_size: int,
    queries: NDArray[Any],
) -> None:
    for row in range(item.num_queries * group):
        head = item.kv_head * group + row % group
        start = (item.token + row // group) * token_stride + head * head_stride
        for d in range(np.uint64(head_size)):  # unsigned: signed indices wrap around, without vectors
            queries[row, d] = from_float32(to_float32(query[np.uint64(start) + d]), queries)


@compile_kernel
def _multiply_blocks(
    queries: NDArray[Any],
    num_rows: int,
    cache: NDArray[Any],
    tables: NDArray[np.int32],
    item: Any,
    start: int,
    num_keys: int,
    logits: NDArray[np.float32],
) -> None:
    _, num_heads, block_size, width = cache.shape
    done = 0
    while done < num_keys:
        block, offset = np.int64(tables[item.seq, (start + done) // block_size]), (start + done) % block_size
        run = min(block_size - offset, num_keys - done)
        slot = (block * num_heads + item.kv_head) * block_size + offset
        dot_keys(queries, num_rows, cache, slot * width, run, width, logits, done, KEY_TILE)
        done += run


@compile_kernel
def _add_blocks(
    weights: NDArray[Any],
    column: int,
    num_rows: int,
    cache: NDArray[Any],
    tables: NDArray[np.int32],
    item: Any,
    start: int,
    num_values: int,
    sums: NDArray[np.float32],
) -> None:
    _, num_heads, block_size, row_size = cache.shape
    width = sums.shape[1]
    done = 0
    while done < num_values:
        position = start + done
        block, offset = np.int64(tables[item.seq, position // block_size]), position % block_size
        run = min(block_size - offset, num_values - done)
        slot = (block * num_heads + item.kv_head) * block_size + offset
        add_values(weights, column + done, KEY_TILE, num_rows, cache, slot * row_size, row_size, run, width, sums)
        done += run
