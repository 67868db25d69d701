"""The attention kernels for CPUs, compiled by Numba on first use and kept on disk.

`paged_attention` cuts the batch into work items: one key/value head, a tile of queries and the keys they see. A
sequence with few queries has its keys cut as well, with a merge at the end (flash decoding), so that one long context
keeps all threads busy. How a sequence is cut depends on that sequence alone: its result does not change with its batch
mates. Each thread gets a run of items that costs about as much as the others'. A row of an item is a query head of one
of its queries; items of few rows and of many are worked on in different ways (attention_few.py, attention_many.py).
"""

import functools
from typing import Any

import numba
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paged_kernels import ahead
from paged_kernels.attention_few import attend_few
from paged_kernels.attention_many import attend_many
from paged_kernels.attention_rows import MANY_ROWS, Batch, padded, write_row
from paged_kernels.compiled import TYPES, array_of, compile_kernel, exp2, set_num_threads
from paged_kernels.native import address_of, call
from paged_kernels.plan import ITEM, cost_of, num_partials_of, plan, share
from paged_kernels.tiles import LOWEST, copy_numbers
from paged_kernels.vector import BFLOAT16_IS_FAST, LANES, from_float32, to_float32

_SERIAL_COST = 18000  # about 20 µs: a batch below is not worth other threads, least of all on a busy machine

NO_HEADS = np.empty(0, np.float32)
NO_SCALES = np.empty((0, 0, 0), np.uint16)
_SINGLE = np.empty(0, np.float32)
_PAIR = np.empty(0, np.int32)


def store_kv(
    key: Tensor,
    value: Tensor | None,
    k_cache: Tensor,
    v_cache: Tensor | None,
    slot_mapping: Tensor,
    *,
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
) -> None:
    """See `reference.store_kv`."""
    slots = slot_mapping.numpy()
    for rows, cache, scales in ((key, k_cache, k_scales), (value, v_cache, v_scales)):
        if rows is None or cache is None:
            continue
        if scales is None:
            store(*_rows(rows), array_of(cache), slots)
        else:
            quantize(*_rows(rows), array_of(cache), array_of(scales), slots)


def paged_attention(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor | None,
    block_tables: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    *,
    scale: float,
    window: int | None = None,
    chunk: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
    value_size: int | None = None,
) -> Tensor:
    """See `reference.paged_attention`."""
    if v_cache is None:
        v_cache, v_scales = k_cache, k_scales
    else:
        value_size = v_cache.shape[3]
    assert k_cache.is_contiguous() and v_cache.is_contiguous() and value_size is not None
    out = query.new_empty(query.shape[0], query.shape[1], value_size)
    num_threads = set_num_threads()
    attend(
        item_kernels(query, k_cache),
        *_rows(query),
        array_of(k_cache),
        array_of(v_cache),
        NO_SCALES if k_scales is None else array_of(k_scales),
        NO_SCALES if v_scales is None else array_of(v_scales),
        block_tables.numpy(),
        query_start_loc.numpy(),
        seq_lens.numpy(),
        array_of(out),
        *tile_types(query, k_cache),
        scale,
        window or 0,
        chunk or 0,
        softcap or 0.0,
        NO_HEADS if sinks is None else sinks.float().numpy(),
        NO_HEADS if alibi_slopes is None else alibi_slopes.float().numpy(),
        num_threads,
    )
    return out


def tile_types(query: Tensor, k_cache: Tensor) -> tuple[NDArray[Any], NDArray[Any]]:
    """In which type tiles are multiplied, and that of a unit of depth; see `Batch`."""
    if BFLOAT16_IS_FAST and query.dtype == torch.bfloat16 and k_cache.dtype in (torch.bfloat16, torch.int8):
        return TYPES[torch.bfloat16], _PAIR
    return _SINGLE, _SINGLE


def item_kernels(query: Tensor, k_cache: Tensor) -> tuple[int, int, int]:
    """The addresses of what `attend` works on its items with, for arguments of these types: on a run of items, on one
    of few rows, on one of many."""
    return _item_kernels(query.dtype, k_cache.dtype, tile_types(query, k_cache)[1] is _PAIR)


@functools.cache
def _item_kernels(dtype: torch.dtype, cache_dtype: torch.dtype, in_pairs: bool) -> tuple[int, int, int]:
    ahead.wait_for_items()
    like, numbers = TYPES[dtype], TYPES[torch.bfloat16] if in_pairs else _SINGLE
    cache = array_of(torch.empty(0, 0, 0, 0, dtype=cache_dtype))
    caches = (cache, cache, NO_SCALES, NO_SCALES, np.empty((0, 0), np.int32))
    made = (np.empty((0, 0, 0), like.dtype), np.empty((0, 0), np.float32))
    tiles = (numbers, _PAIR if in_pairs else _SINGLE)
    zero = np.float32(0)
    batch = Batch(like, 0, 0, *caches, *made, *tiles, 0, zero, 0, 0, zero, NO_HEADS, NO_HEADS)
    items = np.empty(1, ITEM)
    return (
        address_of(_attend_items, 0, 0, batch, items),
        address_of(attend_few, batch, items),
        address_of(attend_many, batch, items),
    )


def _rows(tensor: Tensor) -> tuple[NDArray[Any], int, int]:
    """A [T, heads, head size] tensor as flat memory with its first two strides.

    So a slice of a merged projection needs no copy, and contiguous or not is one compiled kernel.
    """
    if tensor.stride(2) != 1:
        tensor = tensor.contiguous()
    num_tokens, num_heads, head_size = tensor.shape
    token_stride, head_stride, _ = tensor.stride()
    length = (num_tokens - 1) * token_stride + (num_heads - 1) * head_stride + head_size if num_tokens else 0
    return array_of(tensor.as_strided((length,), (1,))), token_stride, head_stride


@compile_kernel
def store(
    rows: NDArray[Any], token_stride: int, head_stride: int, cache: NDArray[Any], slot_mapping: NDArray[np.int64]
) -> None:
    _, num_heads, block_size, width = cache.shape
    whole = width // LANES * LANES
    for t in range(len(slot_mapping)):
        slot = slot_mapping[t]
        if slot < 0:
            continue
        for h in range(num_heads):
            start = t * token_stride + h * head_stride
            target = ((slot // block_size * num_heads + h) * block_size + slot % block_size) * width
            copy_numbers(rows, start, cache, target, whole)
            for d in range(whole, width):
                cache[slot // block_size, h, slot % block_size, d] = rows[start + d]


@functools.partial(compile_kernel, fast_math=frozenset())
def quantize(
    rows: NDArray[Any],
    token_stride: int,
    head_stride: int,
    cache: NDArray[np.int8],
    scales: NDArray[np.uint16],
    slot_mapping: NDArray[np.int64],
) -> None:
    block_size, width = cache.shape[2], cache.shape[3]
    for t in range(len(slot_mapping)):
        slot = slot_mapping[t]
        if slot < 0:
            continue
        for h in range(cache.shape[1]):
            start = t * token_stride + h * head_stride
            row = rows[start : start + width]
            largest = np.float32(0)
            for d in range(width):
                largest = max(largest, abs(to_float32(row[d])))
            stored = from_float32(largest / np.float32(127), scales)
            scales[slot // block_size, h, slot % block_size] = stored
            scale = to_float32(stored) if stored else np.float32(1)
            for d in range(width):
                number = np.rint(to_float32(row[d]) / scale)
                number = min(max(number, np.float32(-127)), np.float32(127))
                cache[slot // block_size, h, slot % block_size, d] = np.int8(number)


@functools.partial(compile_kernel, parallel=True)
def attend(
    kernels: tuple[int, int, int],
    query: NDArray[Any],
    token_stride: int,
    head_stride: int,
    k_cache: NDArray[Any],
    v_cache: NDArray[Any],
    k_scales: NDArray[np.uint16],
    v_scales: NDArray[np.uint16],
    block_tables: NDArray[np.int32],
    query_start_loc: NDArray[np.int32],
    seq_lens: NDArray[np.int32],
    out: NDArray[Any],
    numbers: NDArray[Any],
    units: NDArray[Any],
    scale: float,
    window: int,
    chunk: int,
    softcap: float,
    sinks: NDArray[np.float32],
    alibi_slopes: NDArray[np.float32],
    num_threads: int,
) -> None:
    num_kv_heads = k_cache.shape[1]
    group = out.shape[1] // num_kv_heads
    items = plan(query_start_loc, seq_lens, num_kv_heads, group, window, chunk)
    num_partials = num_partials_of(items, group)
    batch = Batch(
        query,
        token_stride,
        head_stride,
        k_cache,
        v_cache,
        k_scales,
        v_scales,
        block_tables,
        out,
        np.empty((num_partials, padded(out.shape[2], LANES) + 2), np.float32),
        numbers,
        units,
        group,
        np.float32(scale),
        window,
        chunk,
        np.float32(softcap),
        sinks,
        alibi_slopes,
    )
    # One loop for one part or many: a call outside of it would double the code, and the time that compiling it takes.
    num_parts = num_threads if cost_of(items, group, 0, len(items)) >= _SERIAL_COST else 1
    bounds = share(items, group, num_parts)
    for part in numba.prange(num_parts):
        call(kernels[0], (kernels[1], kernels[2], batch, items[bounds[part] : bounds[part + 1]]))
    if num_partials:
        _merge_items(batch, items)  # under 1 % of the work


@compile_kernel
def _attend_items(few_address: int, many_address: int, batch: Batch, items: NDArray[Any]) -> None:
    """Those of few rows and those of many in turns, as many as follow one another."""
    begin, has_few = 0, True
    while begin < len(items):
        end = begin
        while end < len(items) and (items[end].num_queries * batch.group < MANY_ROWS) == has_few:
            end += 1
        if begin < end:
            call(few_address if has_few else many_address, (batch, items[begin:end]))
        begin, has_few = end, not has_few


@compile_kernel
def _merge_items(batch: Batch, items: NDArray[Any]) -> None:
    """Put the partial results of split sequences together; the first split's item stands for all."""
    partials, out, group = batch.partials, batch.out, batch.group
    width = np.uint64(partials.shape[1] - 2)
    sums = np.empty((1, width), np.float32)
    for item in items:
        if item.num_splits == 1 or item.split > 0:
            continue
        num_rows = item.num_queries * group
        for row in range(num_rows):
            first, end = item.partial + row, item.partial + num_rows * item.num_splits
            highest = np.float32(LOWEST)
            for i in range(first, end, num_rows):
                highest = max(highest, partials[i, width])
            weight = np.float32(0)
            for d in range(width):
                sums[0, d] = 0
            for i in range(first, end, num_rows):
                factor = exp2(partials[i, width] - highest)
                weight += partials[i, width + np.uint64(1)] * factor
                for d in range(width):
                    sums[0, d] += partials[i, d] * factor
            write_row(sums, 0, weight, out, item.token + row // group, item.kv_head * group + row % group)
