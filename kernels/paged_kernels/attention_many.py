"""Attention of many rows: two products of tiles for each tile of keys, with the softmax between them.

A tile of keys is turned, so that products go along the rows of registers and no sum over the lanes of one is needed;
that pays from MANY_ROWS on. Then a few rows at a time go through both products and the softmax while all of it is in
the L1 cache.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from paged_kernels.attention_rows import (
    Batch,
    Scales,
    Softmax,
    adjust,
    begin_rows,
    copy_number,
    end_rows,
    load_scales,
    load_slots,
    make_scales,
    padded,
    zeros,
)
from paged_kernels.compiled import LOG2_E, compile_kernel
from paged_kernels.plan import first_visible
from paged_kernels.tiles import (
    KEY_TILE,
    TILE_ROWS,
    TILE_VECTORS,
    add_product,
    copy_numbers,
    copy_row_of_units,
    transpose16,
    weigh_row,
)
from paged_kernels.vector import LANES, WIDTH

_COLUMNS = TILE_VECTORS * WIDTH
_VECTORS_OF_LANES = LANES // WIDTH


class ManyRows(NamedTuple):
    """Where an item of many rows is worked on. A unit is a number, or a pair of them."""

    queries: NDArray[Any]  # [rows, D padded], numbers
    keys: NDArray[Any]  # [KEY_TILE, D padded], numbers as they are in the cache
    turned_keys: NDArray[Any]  # [units of D padded, KEY_TILE]
    values: NDArray[Any]  # [KEY_TILE, Dv padded], numbers
    paired_values: NDArray[Any]  # [units of KEY_TILE, Dv padded]
    weights: NDArray[Any]  # [TILE_ROWS, KEY_TILE], numbers
    logits: NDArray[np.float32]  # [TILE_ROWS, KEY_TILE]
    scales: Scales
    softmax: Softmax


@compile_kernel
def _make_many_rows(batch: Batch, num_rows: int) -> ManyRows:
    per_unit = batch.units.itemsize // batch.numbers.itemsize
    key_width, value_width = padded(batch.k_cache.shape[3], 2 * LANES), padded(batch.out.shape[2], LANES)
    num_rows = padded(num_rows, TILE_ROWS)
    single = np.empty(0, np.float32)
    return ManyRows(
        zeros(num_rows, key_width, batch.numbers),
        zeros(KEY_TILE, key_width, batch.numbers),
        zeros(key_width // per_unit, KEY_TILE, batch.units),
        zeros(KEY_TILE, value_width, batch.numbers),
        zeros(KEY_TILE // per_unit, value_width, batch.units),
        zeros(TILE_ROWS, KEY_TILE, batch.numbers),
        zeros(TILE_ROWS, KEY_TILE, single),
        make_scales(batch),
        Softmax(zeros(num_rows, value_width, single), np.empty(num_rows, np.float32), np.empty(num_rows, np.float32)),
    )


@compile_kernel
def attend_many(batch: Batch, items: NDArray[Any]) -> None:
    most_rows = 0
    for item in items:
        most_rows = max(most_rows, item.num_queries * batch.group)
    work = _make_many_rows(batch, most_rows)
    sums, highest, weights = work.softmax.sums, work.softmax.highest, work.softmax.weights
    for item in items:
        begin_rows(item, batch.group, batch.sinks, sums, highest, weights)
        _attend(batch, item, work)
        end_rows(item, batch.group, sums, highest, weights, batch.out, batch.partials)


@compile_kernel
def _attend(batch: Batch, item: Any, work: ManyRows) -> None:
    k_cache, v_cache, block_table, group = batch.k_cache, batch.v_cache, batch.block_tables[item.seq], batch.group
    slopes, num_rows = batch.alibi_slopes[item.kv_head * group :], item.num_queries * group
    key_size, value_size = k_cache.shape[3], batch.out.shape[2]
    scales, softmax = work.scales, work.softmax
    is_adjusted, k_scales = batch.softcap > 0 or len(slopes) > 0, scales.keys
    scale = LOG2_E if is_adjusted else batch.scale * LOG2_E
    _load_queries(batch.query, batch.token_stride, batch.head_stride, item, group, key_size, work.queries)
    units = work.turned_keys.dtype
    queries, keys, weights = work.queries.view(units), work.keys.view(units), work.weights.view(units)
    turned_keys, values, paired_values, logits = work.turned_keys, work.values, work.paired_values, work.logits
    sums, highest, totals = softmax.sums, softmax.highest, softmax.weights
    depth, width = turned_keys.shape[0], sums.shape[1]
    per_unit = KEY_TILE // weights.shape[1]
    for start in range(item.first_key, item.end_key, KEY_TILE):
        num_keys = min(KEY_TILE, item.end_key - start)
        load_slots(k_cache, item.kv_head, block_table, start, num_keys, key_size, work.keys)
        _turn(keys, turned_keys)
        load_slots(v_cache, item.kv_head, block_table, start, num_keys, value_size, values)
        _pair(values, num_keys, per_unit, paired_values)
        if len(k_scales):
            load_scales(batch.k_scales, item.kv_head, block_table, start, num_keys, scales.keys)
            load_scales(batch.v_scales, item.kv_head, block_table, start, num_keys, scales.values)
        for first in range(0, num_rows, TILE_ROWS):
            rows = min(TILE_ROWS, num_rows - first)  # the other rows of the tile are nobody's
            end = min(item.position + (first + rows - 1) // group + 1 - start, num_keys)
            if end <= 0:
                continue
            _multiply(queries, first * depth, depth, turned_keys, depth, padded(end, LANES), logits, 0)
            if is_adjusted:
                distance = start - item.position
                adjust(logits, rows, first, group, distance, batch.scale, scales.keys, batch.softcap, slopes)
                k_scales = scales.ones
            for i in range(rows):
                position = item.position + (first + i) // group
                low = max(first_visible(position, batch.window, batch.chunk) - start, 0)
                high = min(position + 1 - start, num_keys)
                place = i * KEY_TILE
                if low < high:
                    weigh_row(
                        k_cache, logits, place, low, high, scale, k_scales, scales.values, highest, totals, first + i,
                        sums, width, work.weights, place,
                    )  # fmt: skip
                else:
                    work.weights[i] = 0
            depth_of_end = padded(end, per_unit) // per_unit
            _add(weights, 0, KEY_TILE // per_unit, paired_values, depth_of_end, width, sums, first * width)


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
    whole = head_size // LANES * LANES
    for row in range(item.num_queries * group):
        head = item.kv_head * group + row % group
        start = (item.token + row // group) * token_stride + head * head_stride
        copy_numbers(query, start, queries, row * queries.shape[1], whole)
        for d in range(whole, head_size):
            copy_number(query, start + d, queries[row], d)


@compile_kernel
def _turn(keys: NDArray[Any], turned_keys: NDArray[Any]) -> None:
    depth = keys.shape[1]
    for d in range(0, depth, LANES):
        for j in range(0, KEY_TILE, LANES):
            transpose16(keys, j * depth + d, depth, turned_keys, d * KEY_TILE + j, KEY_TILE)


@compile_kernel
def _pair(values: NDArray[Any], num_keys: int, per_unit: int, paired_values: NDArray[Any]) -> None:
    width = values.shape[1]
    if num_keys % per_unit:
        values[num_keys] = 0
    for unit in range(padded(num_keys, per_unit) // per_unit):
        copy_row_of_units(values, unit * per_unit * width, width, paired_values, unit * width, width)


@compile_kernel
def _multiply(
    rows: NDArray[Any],
    row: int,
    row_stride: int,
    columns: NDArray[Any],
    depth: int,
    num_columns: int,
    totals: NDArray[np.float32],
    total: int,
) -> None:
    """The products of TILE_ROWS rows with so many columns, a multiple of LANES."""
    stride, to = columns.shape[1], totals.shape[1]
    whole = num_columns - num_columns % _COLUMNS
    for c in range(0, whole, _COLUMNS):
        add_product(rows, row, row_stride, columns, c, stride, depth, totals, total + c, to, TILE_VECTORS, 1)
    for c in range(whole, num_columns, LANES):
        add_product(rows, row, row_stride, columns, c, stride, depth, totals, total + c, to, _VECTORS_OF_LANES, 1)


@compile_kernel
def _add(
    rows: NDArray[Any],
    row: int,
    row_stride: int,
    columns: NDArray[Any],
    depth: int,
    num_columns: int,
    totals: NDArray[np.float32],
    total: int,
) -> None:
    """`_multiply`, added to what is there."""
    stride, to = columns.shape[1], totals.shape[1]
    whole = num_columns - num_columns % _COLUMNS
    for c in range(0, whole, _COLUMNS):
        add_product(rows, row, row_stride, columns, c, stride, depth, totals, total + c, to, TILE_VECTORS, 0)
    for c in range(whole, num_columns, LANES):
        add_product(rows, row, row_stride, columns, c, stride, depth, totals, total + c, to, _VECTORS_OF_LANES, 0)
