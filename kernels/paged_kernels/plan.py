"""How a batch of attention is cut into work items, and how these are shared among threads."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from paged_kernels.compiled import compile_kernel

_ROWS = 96  # of an item at most, unless one query has more: queries times the heads that share keys and values
SPLIT = 256  # keys of one item, where the keys of a sequence are cut

ITEM = np.dtype(
    [
        ("seq", np.int64),
        ("token", np.int64),  # of the first query
        ("num_queries", np.int64),
        ("position", np.int64),  # of the first query
        ("kv_head", np.int64),
        ("first_key", np.int64),
        ("end_key", np.int64),
        ("split", np.int64),
        ("num_splits", np.int64),
        ("partial", np.int64),  # row of the first query's result in the partial results, if num_splits > 1
    ]
)


@compile_kernel
def plan(
    query_start_loc: NDArray[np.int32],
    seq_lens: NDArray[np.int32],
    num_kv_heads: int,
    group: int,
    window: int,
    chunk: int,
) -> NDArray[Any]:
    """The work items of a batch."""
    tile = max(1, _ROWS // group)
    most = 0
    for s in range(len(seq_lens)):
        most += (query_start_loc[s + 1] - query_start_loc[s]) // tile + seq_lens[s] // SPLIT + 2
    items = np.empty(most * num_kv_heads, ITEM)
    num_items = num_partials = 0
    for s in range(len(seq_lens)):
        start, stop = query_start_loc[s], query_start_loc[s + 1]
        for token in range(start, stop, tile):
            num_queries = min(tile, stop - token)
            position = seq_lens[s] - (stop - token)
            first_key = first_visible(position, window, chunk)
            end_key = position + num_queries
            length = SPLIT if stop - start <= tile else end_key - first_key
            num_splits = -(-(end_key - first_key) // length)
            for h in range(num_kv_heads):
                for split in range(num_splits):
                    item = items[num_items]
                    item.seq = s
                    item.token = token
                    item.num_queries = num_queries
                    item.position = position
                    item.kv_head = h
                    item.first_key = first_key + split * length
                    item.end_key = min(item.first_key + length, end_key)
                    item.split = split
                    item.num_splits = num_splits
                    item.partial = num_partials
                    num_items += 1
                    if num_splits > 1:
                        num_partials += num_queries * group
    return items[:num_items]


@compile_kernel
def num_partials_of(items: NDArray[Any], group: int) -> int:
    num_partials = 0
    for item in items:
        if item.num_splits > 1:
            num_partials += item.num_queries * group
    return num_partials


@compile_kernel
def cost_of(items: NDArray[Any], group: int, begin: int, end: int) -> int:
    """Loading a key and its value takes about as long as multiplying them with eight rows."""
    cost = 0
    for i in range(begin, end):
        cost += (items[i].end_key - items[i].first_key) * (items[i].num_queries * group + 8)
    return cost


@compile_kernel
def share(items: NDArray[Any], group: int, num_threads: int) -> NDArray[np.int64]:
    """Where each thread's run of items begins, and the end of the last one."""
    total = cost_of(items, group, 0, len(items))
    bounds = np.full(num_threads + 1, len(items))
    done = thread = 0
    for i in range(len(items)):
        while done * num_threads >= thread * total:
            bounds[thread] = i
            thread += 1
        done += cost_of(items, group, i, i + 1)
    return bounds


@compile_kernel
def first_visible(position: int, window: int, chunk: int) -> int:
    first = 0
    if window > 0:
        first = max(first, position - window + 1)
    if chunk > 0:
        first = max(first, position // chunk * chunk)
    return first
