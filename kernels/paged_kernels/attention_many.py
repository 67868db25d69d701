"""Attention of many rows: two products of tiles for each tile of keys, with the softmax between them.

A tile of keys is turned, so that products go along the rows of registers and no sum over the lanes of one is needed;
that pays from MANY_ROWS on. Then a few rows at a time go through both products and the softmax while all of it is in
the L1 cache.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from paged_kernels.attention_rows import (
    KEY_TILE,
    Batch,
    Softmax,
    add_to_softmax,
    copy_number,
    load_scales,
    load_slots,
    padded,
    visible_keys,
    zeros,
)
from paged_kernels.compiled import compile_kernel
from paged_kernels.tiles import TILE_ROWS, TILE_VECTORS, add_product, copy_numbers, copy_row_of_units, transpose16
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
    scales: NDArray[np.float32]  # [2, KEY_TILE], or none
    softmax: Softmax


@compile_kernel
def make_many_rows(batch: Batch, num_rows: int) -> ManyRows:
    per_unit = batch.units.itemsize // batch.numbers.itemsize
    key_width, value_width = padded(batch.k_cache.shape[3], 2 * LANES), padded(batch.v_cache.shape[3], LANES)
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
        zeros(2, KEY_TILE if len(batch.k_scales) else 0, single),
        Softmax(zeros(num_rows, value_width, single), np.empty(num_rows, np.float32), np.empty(num_rows, np.float32)),
    )


@compile_kernel
def attend_many(batch: Batch, item: Any, work: ManyRows) -> None:
    block_table = batch.block_tables[item.seq]
    per_unit = batch.units.itemsize // batch.numbers.itemsize
    _load_queries(batch, item, work.queries)
    for start in range(item.first_key, item.end_key, KEY_TILE):
        num_keys = min(KEY_TILE, item.end_key - start)
        load_slots(batch.k_cache, item.kv_head, block_table, start, num_keys, work.keys)
        _turn_keys(work)
        load_slots(batch.v_cache, item.kv_head, block_table, start, num_keys, work.values)
        _pair_values(work, num_keys, per_unit)
        if work.scales.shape[1]:
            load_scales(batch.k_scales, item.kv_head, block_table, start, num_keys, work.scales[0])
            load_scales(batch.v_scales, item.kv_head, block_table, start, num_keys, work.scales[1])
        for row in range(0, item.num_queries * batch.group, TILE_ROWS):
            _attend_rows(batch, item, work, row, start, num_keys, per_unit)


@compile_kernel
def _load_queries(batch: Batch, item: Any, queries: NDArray[Any]) -> None:
    head_size = batch.k_cache.shape[3]
    whole = head_size // LANES * LANES
    for row in range(item.num_queries * batch.group):
        head = item.kv_head * batch.group + row % batch.group
        start = (item.token + row // batch.group) * batch.token_stride + head * batch.head_stride
        copy_numbers(batch.query, start, queries, row * queries.shape[1], whole)
        for d in range(whole, head_size):
            copy_number(batch.query, start + d, queries[row], d)


@compile_kernel
def _turn_keys(work: ManyRows) -> None:
    keys = work.keys.view(work.turned_keys.dtype)
    depth = keys.shape[1]
    for d in range(0, depth, LANES):
        for j in range(0, KEY_TILE, LANES):
            transpose16(keys, j * depth + d, depth, work.turned_keys, d * KEY_TILE + j, KEY_TILE)


@compile_kernel
def _pair_values(work: ManyRows, num_keys: int, per_unit: int) -> None:
    width = work.values.shape[1]
    if num_keys % per_unit:
        for d in range(width):
            work.values[num_keys, d] = 0
    for unit in range(padded(num_keys, per_unit) // per_unit):
        copy_row_of_units(work.values, unit * per_unit * width, width, work.paired_values, unit * width, width)


@compile_kernel
def _attend_rows(
    batch: Batch, item: Any, work: ManyRows, first_row: int, start: int, num_keys: int, per_unit: int
) -> None:
    """TILE_ROWS rows, of which the last ones may be none of the item's."""
    num_rows = min(TILE_ROWS, item.num_queries * batch.group - first_row)
    _, end = visible_keys(batch, item, first_row + num_rows - 1, start, num_keys)
    if end <= 0:
        return
    depth = work.turned_keys.shape[0]
    queries = work.queries.view(work.turned_keys.dtype)
    _multiply(queries, first_row * depth, depth, work.turned_keys, depth, padded(end, LANES), work.logits, 0, 1)
    for i in range(num_rows):
        visible = visible_keys(batch, item, first_row + i, start, num_keys)
        add_to_softmax(
            batch, item, first_row + i, start, visible, work.logits[i], work.scales[0], work.scales[1], work.softmax
        )
    copy_numbers(work.logits, 0, work.weights, 0, TILE_ROWS * KEY_TILE)
    weights, sums = work.weights.view(work.turned_keys.dtype), work.softmax.sums
    depth = padded(end, per_unit) // per_unit
    first = first_row * sums.shape[1]
    _multiply(weights, 0, KEY_TILE // per_unit, work.paired_values, depth, sums.shape[1], sums, first, 0)


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
    from_zero: int,
) -> None:
    """Add, or with `from_zero` assign, the products of TILE_ROWS rows with so many columns, a multiple of LANES."""
    stride, total_stride = columns.shape[1], totals.shape[1]
    whole = num_columns - num_columns % _COLUMNS
    if from_zero:
        for c in range(0, whole, _COLUMNS):
            add_product(
                rows, row, row_stride, columns, c, stride, depth, totals, total + c, total_stride, TILE_VECTORS, 1
            )
        for c in range(whole, num_columns, LANES):
            add_product(
                rows, row, row_stride, columns, c, stride, depth, totals, total + c, total_stride, _VECTORS_OF_LANES, 1
            )
    else:
        for c in range(0, whole, _COLUMNS):
            add_product(
                rows, row, row_stride, columns, c, stride, depth, totals, total + c, total_stride, TILE_VECTORS, 0
            )
        for c in range(whole, num_columns, LANES):
            add_product(
                rows, row, row_stride, columns, c, stride, depth, totals, total + c, total_stride, _VECTORS_OF_LANES, 0
            )
