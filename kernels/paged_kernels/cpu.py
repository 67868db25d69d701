"""The kernels for CPUs, compiled by Numba on first use and kept on disk.

`paged_attention` cuts the batch into work items: one key/value head, a tile of queries and the keys they see. A
sequence with few queries has its keys cut as well, with a merge at the end (flash decoding), so that one long context
keeps all threads busy. How a sequence is cut depends on that sequence alone: its result does not change with its batch
mates. Each thread gets a run of items that costs about as much as the others'.

Within an item, a tile of keys and values is widened to float32 once and serves all query heads that share it. Whatever
the mask, a query sees one range of positions, so loops run over that range, what is outside is never read, and no
infinity is needed. Logits are kept in base 2, where the exponential needs no range reduction.
"""

import functools
from typing import Any, NamedTuple

import numba
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paged_kernels.compiled import FAST_MATH_WITHOUT_NAN, LOG2_E, compile_kernel, exp2, set_num_threads
from paged_kernels.plan import cost_of, first_visible, num_partials_of, plan, share
from paged_kernels.vector import LANES, add_weighted, copy_to_float32, dot4, from_float32, to_float32

_KEY_TILE = 32  # a multiple of four, for dot4
_SERIAL_COST = 4000  # about 20 µs: a batch below is not worth other threads, least of all on a busy machine

_LOWEST = np.float32(-1e30)
_NO_HEADS = np.empty(0, np.float32)


class _Batch(NamedTuple):
    """What the items have in common; 0 and an empty array stand for None."""

    query: NDArray[Any]  # flat
    token_stride: int
    head_stride: int
    k_cache: NDArray[Any]  # [num_blocks, K, block_size, D]
    v_cache: NDArray[Any]  # [num_blocks, K, block_size, Dv]
    block_tables: NDArray[np.int32]  # [S, max_blocks]
    out: NDArray[Any]  # [T, H, Dv]
    partials: NDArray[np.float32]  # [rows, Dv padded + 2]: weighted sum of values, highest logit, sum of weights
    group: int  # H // K
    scale: np.float32
    window: int
    chunk: int
    softcap: np.float32
    sinks: NDArray[np.float32]
    alibi_slopes: NDArray[np.float32]


def store_kv(key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """See `reference.store_kv`."""
    _store_kv(*_rows(key), *_rows(value), _array(k_cache), _array(v_cache), slot_mapping.numpy())


def paged_attention(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
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
) -> Tensor:
    """See `reference.paged_attention`."""
    out = query.new_empty(query.shape[0], query.shape[1], v_cache.shape[3])
    num_threads = set_num_threads()
    _paged_attention(
        *_rows(query),
        _array(k_cache),
        _array(v_cache),
        block_tables.numpy(),
        query_start_loc.numpy(),
        seq_lens.numpy(),
        _array(out),
        scale,
        window or 0,
        chunk or 0,
        softcap or 0.0,
        _NO_HEADS if sinks is None else sinks.float().numpy(),
        _NO_HEADS if alibi_slopes is None else alibi_slopes.float().numpy(),
        num_threads,
    )
    return out


def _array(tensor: Tensor) -> NDArray[Any]:
    """The tensor's memory; 16-bit floats as integers, see vector.py."""
    if tensor.dtype == torch.bfloat16:
        tensor = tensor.view(torch.uint16)
    elif tensor.dtype == torch.float16:
        tensor = tensor.view(torch.int16)
    return tensor.numpy()


def _rows(tensor: Tensor) -> tuple[NDArray[Any], int, int]:
    """A [T, heads, head size] tensor as flat memory with its first two strides.

    So a slice of a merged projection needs no copy, and contiguous or not is one compiled kernel.
    """
    if tensor.stride(2) != 1:
        tensor = tensor.contiguous()
    num_tokens, num_heads, head_size = tensor.shape
    token_stride, head_stride, _ = tensor.stride()
    length = (num_tokens - 1) * token_stride + (num_heads - 1) * head_stride + head_size if num_tokens else 0
    return _array(tensor.as_strided((length,), (1,))), token_stride, head_stride


@compile_kernel
def _store_kv(
    key: NDArray[Any],
    key_token_stride: int,
    key_head_stride: int,
    value: NDArray[Any],
    value_token_stride: int,
    value_head_stride: int,
    k_cache: NDArray[Any],
    v_cache: NDArray[Any],
    slot_mapping: NDArray[np.int64],
) -> None:
    block_size = k_cache.shape[2]
    for t in range(len(slot_mapping)):
        slot = slot_mapping[t]
        if slot < 0:
            continue
        for h in range(k_cache.shape[1]):
            start = t * key_token_stride + h * key_head_stride
            row = key[start : start + k_cache.shape[3]]
            for d in range(k_cache.shape[3]):
                k_cache[slot // block_size, h, slot % block_size, d] = row[d]
            start = t * value_token_stride + h * value_head_stride
            row = value[start : start + v_cache.shape[3]]
            for d in range(v_cache.shape[3]):
                v_cache[slot // block_size, h, slot % block_size, d] = row[d]


@functools.partial(compile_kernel, parallel=True)
def _paged_attention(
    query: NDArray[Any],
    token_stride: int,
    head_stride: int,
    k_cache: NDArray[Any],
    v_cache: NDArray[Any],
    block_tables: NDArray[np.int32],
    query_start_loc: NDArray[np.int32],
    seq_lens: NDArray[np.int32],
    out: NDArray[Any],
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
    batch = _Batch(
        query,
        token_stride,
        head_stride,
        k_cache,
        v_cache,
        block_tables,
        out,
        np.empty((num_partials, _padded(v_cache.shape[3]) + 2), np.float32),
        group,
        np.float32(scale),
        window,
        chunk,
        np.float32(softcap),
        sinks,
        alibi_slopes,
    )
    if num_threads == 1 or cost_of(items, 0, len(items)) * group < _SERIAL_COST:
        _attend_items(batch, items)
    else:
        bounds = share(items, num_threads)
        for thread in numba.prange(num_threads):
            _attend_items(batch, items[bounds[thread] : bounds[thread + 1]])
    if num_partials:
        _merge_items(batch, items)  # under 1 % of the work


@compile_kernel
def _attend_items(batch: _Batch, items: NDArray[Any]) -> None:
    """Work through items; a row is a query head of a query, and head sizes are padded to a multiple of LANES."""
    max_rows = 0
    for item in items:
        max_rows = max(max_rows, item.num_queries * batch.group)
    queries = _zeros(max_rows, _padded(batch.k_cache.shape[3]))
    keys = _zeros(_KEY_TILE, queries.shape[1])
    values = _zeros(_KEY_TILE, _padded(batch.v_cache.shape[3]))
    logits = _zeros(max_rows, _KEY_TILE)
    visible = np.empty((max_rows, 2), np.int64)  # each row's range of the tile of keys
    sums = _zeros(max_rows, values.shape[1])
    highest = np.empty(max_rows, np.float32)
    weights = np.empty(max_rows, np.float32)
    for item in items:
        num_rows = item.num_queries * batch.group
        block_table = batch.block_tables[item.seq]
        _load_queries(batch, item, queries)
        _reset(batch, item, sums, highest, weights)
        for start in range(item.first_key, item.end_key, _KEY_TILE):
            num_keys = min(_KEY_TILE, item.end_key - start)
            _load_slots(batch.k_cache, item.kv_head, block_table, start, num_keys, keys)
            _load_slots(batch.v_cache, item.kv_head, block_table, start, num_keys, values)
            _find_visible(batch, item, start, num_keys, visible)
            _multiply(queries, keys, num_rows, visible, logits)
            if batch.softcap > 0 or len(batch.alibi_slopes):
                _adjust(batch, item, start, visible, logits)
            _exponentiate(logits, num_rows, visible, highest, weights, sums)
            _add_values(logits, num_rows, visible, values, sums)
        _finish(batch, item, sums, highest, weights)


@compile_kernel
def _load_queries(batch: _Batch, item: Any, queries: NDArray[np.float32]) -> None:
    head_size = batch.k_cache.shape[3]
    scale = batch.scale if batch.softcap > 0 else batch.scale * LOG2_E
    for row in range(item.num_queries * batch.group):
        head = item.kv_head * batch.group + row % batch.group
        start = (item.token + row // batch.group) * batch.token_stride + head * batch.head_stride
        query = batch.query[start : start + head_size]
        for d in range(head_size):
            queries[row, d] = to_float32(query[d]) * scale


@compile_kernel
def _reset(
    batch: _Batch, item: Any, sums: NDArray[np.float32], highest: NDArray[np.float32], weights: NDArray[np.float32]
) -> None:
    """Begin the item's softmax: nothing seen but the sink, which counts once if the keys are split."""
    for row in range(item.num_queries * batch.group):
        for d in range(sums.shape[1]):
            sums[row, d] = 0
        highest[row] = _LOWEST
        weights[row] = 0
        if len(batch.sinks) and item.split == 0:
            highest[row] = batch.sinks[item.kv_head * batch.group + row % batch.group] * LOG2_E
            weights[row] = 1


@compile_kernel
def _load_slots(
    cache: NDArray[Any],
    head: int,
    block_table: NDArray[np.int32],
    start: int,
    num_slots: int,
    tile: NDArray[np.float32],
) -> None:
    """Widen the slots of consecutive positions into the first rows of a tile."""
    _, num_heads, block_size, head_size = cache.shape
    width = tile.shape[1]
    done = 0
    while done < num_slots:
        block, offset = block_table[(start + done) // block_size], (start + done) % block_size
        run = min(block_size - offset, num_slots - done)
        source = ((block * num_heads + head) * block_size + offset) * head_size
        if width == head_size:
            copy_to_float32(cache, source, tile, done * width, run * width)
        else:
            whole = width - LANES
            for i in range(run):
                copy_to_float32(cache, source + i * head_size, tile, (done + i) * width, whole)
                for d in range(whole, head_size):
                    tile[done + i, d] = to_float32(cache[block, head, offset + i, d])
        done += run


@compile_kernel
def _find_visible(batch: _Batch, item: Any, start: int, num_keys: int, visible: NDArray[np.int64]) -> None:
    """The range that each row sees of the keys that start at this position; none if it ends before it begins."""
    for query in range(item.num_queries):
        position = item.position + query
        low = max(first_visible(position, batch.window, batch.chunk) - start, 0)
        high = min(position + 1 - start, num_keys)
        for row in range(query * batch.group, (query + 1) * batch.group):
            visible[row, 0] = low
            visible[row, 1] = high


@compile_kernel
def _multiply(
    queries: NDArray[np.float32],
    keys: NDArray[np.float32],
    num_rows: int,
    visible: NDArray[np.int64],
    logits: NDArray[np.float32],
) -> None:
    width = keys.shape[1]
    for row in range(num_rows):
        for j in range(visible[row, 0] // 4 * 4, visible[row, 1], 4):
            dot4(queries, row * width, keys, j * width, width, logits, row * _KEY_TILE + j)


@compile_kernel
def _adjust(batch: _Batch, item: Any, start: int, visible: NDArray[np.int64], logits: NDArray[np.float32]) -> None:
    """Apply softcap and ALiBi."""
    for row in range(item.num_queries * batch.group):
        low, high = np.uint64(visible[row, 0]), np.uint64(visible[row, 1])
        if batch.softcap > 0:
            for j in range(low, high):
                logits[row, j] = _tanh(logits[row, j] / batch.softcap) * (batch.softcap * LOG2_E)
        if len(batch.alibi_slopes):
            slope = batch.alibi_slopes[item.kv_head * batch.group + row % batch.group] * LOG2_E
            position = item.position + row // batch.group
            for j in range(visible[row, 0], visible[row, 1]):
                logits[row, j] += slope * np.float32(start + j - position)


@compile_kernel
def _exponentiate(
    logits: NDArray[np.float32],
    num_rows: int,
    visible: NDArray[np.int64],
    highest: NDArray[np.float32],
    weights: NDArray[np.float32],
    sums: NDArray[np.float32],
) -> None:
    """Turn logits into weights relative to the highest logit so far, and what came before to that scale."""
    for row in range(num_rows):
        if visible[row, 0] >= visible[row, 1]:
            continue
        # Unsigned, since Numba makes signed indices wrap around, which keeps LLVM from using vectors.
        low, high = np.uint64(visible[row, 0]), np.uint64(visible[row, 1])
        before = highest[row]
        after = max(before, _highest(logits, row, low, high))
        total = np.float32(0)
        for j in range(low, high):
            weight = exp2(logits[row, j] - after)
            logits[row, j] = weight
            total += weight
        decay = exp2(before - after)
        highest[row] = after
        weights[row] = weights[row] * decay + total
        if decay != 1:
            for d in range(sums.shape[1]):
                sums[row, d] *= decay


@compile_kernel
def _add_values(
    weights: NDArray[np.float32],
    num_rows: int,
    visible: NDArray[np.int64],
    values: NDArray[np.float32],
    sums: NDArray[np.float32],
) -> None:
    width = values.shape[1]
    four = width - width % (4 * LANES)
    for row in range(num_rows):
        low, high = visible[row, 0], visible[row, 1]
        weight, source, target = row * _KEY_TILE + low, low * width, row * width
        for d in range(0, four, 4 * LANES):
            add_weighted(weights, weight, values, source + d, high - low, width, sums, target + d, 4)
        for d in range(four, width, LANES):
            add_weighted(weights, weight, values, source + d, high - low, width, sums, target + d, 1)


@compile_kernel
def _finish(
    batch: _Batch, item: Any, sums: NDArray[np.float32], highest: NDArray[np.float32], weights: NDArray[np.float32]
) -> None:
    """Write the item's rows to the output, or to the partial results if other items have the rest of their keys."""
    width = sums.shape[1]
    for row in range(item.num_queries * batch.group):
        if item.num_splits == 1:
            _write(batch, item, row, sums[row], weights[row])
        else:
            for d in range(width):
                batch.partials[item.partial + row, d] = sums[row, d]
            batch.partials[item.partial + row, width] = highest[row]
            batch.partials[item.partial + row, width + 1] = weights[row]


@compile_kernel
def _merge_items(batch: _Batch, items: NDArray[Any]) -> None:
    """Put the partial results of split sequences together; the first split's item stands for all."""
    width = batch.partials.shape[1] - 2
    sums = np.empty(width, np.float32)
    for item in items:
        if item.num_splits == 1 or item.split > 0:
            continue
        num_rows = item.num_queries * batch.group
        for row in range(num_rows):
            first, end = item.partial + row, item.partial + num_rows * item.num_splits
            highest = _LOWEST
            for i in range(first, end, num_rows):
                highest = max(highest, batch.partials[i, width])
            weight = np.float32(0)
            for d in range(width):
                sums[d] = 0
            for i in range(first, end, num_rows):
                factor = exp2(batch.partials[i, width] - highest)
                weight += batch.partials[i, width + 1] * factor
                for d in range(width):
                    sums[d] += batch.partials[i, d] * factor
            _write(batch, item, row, sums, weight)


@compile_kernel
def _write(batch: _Batch, item: Any, row: int, sums: NDArray[np.float32], weight: np.float32) -> None:
    out = batch.out[item.token + row // batch.group, item.kv_head * batch.group + row % batch.group]
    factor = np.float32(1) / weight
    for d in range(len(out)):
        out[d] = from_float32(sums[d] * factor, out)


@compile_kernel
def _padded(size: int) -> int:
    return -(-size // LANES) * LANES


@compile_kernel
def _zeros(num_rows: int, width: int) -> NDArray[np.float32]:
    """Zeros that begin at a multiple of 64 bytes: vectors that straddle cache lines load half as fast."""
    memory = np.zeros(num_rows * width + LANES, np.float32)
    first = (-memory.ctypes.data % 64) // 4
    return memory[first : first + num_rows * width].reshape(num_rows, width)


@functools.partial(compile_kernel, fast_math=FAST_MATH_WITHOUT_NAN)
def _highest(numbers: NDArray[np.float32], row: int, low: np.uint64, high: np.uint64) -> np.float32:
    """The maximum, or anything if there is a NaN: that is what lets LLVM use vectors."""
    highest: np.float32 = numbers[row, low]
    for j in range(low, high):
        highest = max(highest, numbers[row, j])
    return highest


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
