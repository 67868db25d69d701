"""The attention kernels for GPUs, by Triton; interpreted on a CPU with TRITON_INTERPRET=1.

What is launched depends on shapes and on the plan, never on the numbers in a tensor: no call waits for the device, and
a CUDA graph may replay the launches for other requests of the same shapes.
"""

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from paged_kernels.reference import LARGEST_STORED
from paged_kernels.triton_attend import attend, merge
from paged_kernels.triton_configs import attention_config, check_cache_dtype
from paged_kernels.triton_device import current_device
from paged_kernels.triton_store import store_tokens


class AttentionPlan(NamedTuple):
    """What the host knows of a batch; one plan for all steps that replay one CUDA graph."""

    num_decodes: int
    """The first so many sequences have one query each."""
    max_seq_len: int
    """No sequence has more tokens than this."""
    num_splits: int | None = None
    """Into how many parts to cut the keys of those sequences, a power of two; chosen by the kernel if None."""


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
    """See `reference.store_kv`; caches and scales are contiguous."""
    num_tokens, num_kv_heads, key_size = key.shape
    if num_tokens == 0:
        return
    _check_cache(k_cache, v_cache, k_scales, v_scales)
    key = _with_contiguous_heads(key)
    value_size, value_token_stride, value_head_stride = 0, 0, 0
    if value is not None:
        value = _with_contiguous_heads(value)
        value_size, (value_token_stride, value_head_stride, _) = value.shape[2], value.stride()
    num_numbers = triton.next_power_of_2(num_kv_heads) * triton.next_power_of_2(max(key_size, value_size))
    store_tokens[(num_tokens,)](
        key, value, k_cache, v_cache, k_scales, v_scales, slot_mapping,
        key.stride(0), key.stride(1), value_token_stride, value_head_stride,
        NUM_KV_HEADS=num_kv_heads,
        HEADS=triton.next_power_of_2(num_kv_heads),
        BLOCK=k_cache.shape[2],
        KEY_SIZE=key_size,
        KEY_COLUMNS=triton.next_power_of_2(key_size),
        VALUE_SIZE=value_size,
        VALUE_COLUMNS=triton.next_power_of_2(value_size),
        LARGEST=None if k_scales is None else LARGEST_STORED[k_cache.dtype],
        num_warps=min(max(num_numbers // 256, 1), 8),  # 8 numbers per thread: 16 bytes, or all at once
    )  # fmt: skip


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
    plan: AttentionPlan | None = None,
) -> Tensor:
    """See `reference.paged_attention`; caches and scales are contiguous.

    A sequence of length 0 may have queries, as padding has: they become 0. With a plan there are two launches, one for
    the sequences that it says have one query each and one for the others; without one there is a single launch, which
    suits either kind.
    """
    _check_cache(k_cache, v_cache, k_scales, v_scales)
    query = _with_contiguous_heads(query)
    if v_cache is None:
        v_cache, v_scales = k_cache, k_scales
    else:
        value_size = v_cache.shape[3]
    assert value_size is not None
    out = query.new_empty(query.shape[0], query.shape[1], value_size)
    layer = _Layer(k_cache, v_cache, k_scales, v_scales, scale, window, chunk, softcap, sinks, alibi_slopes)
    if plan is None:
        plan = AttentionPlan(0, block_tables.shape[1] * k_cache.shape[2])
    first, others = slice(0, plan.num_decodes), slice(plan.num_decodes, None)
    _attend(layer, _Batch(out[first], query[first], block_tables[first], None, seq_lens[first]), plan)
    starts = query_start_loc[others]
    _attend(layer, _Batch(out[others], query[others], block_tables[others], starts, seq_lens[others]), plan)
    return out


class _Layer(NamedTuple):
    k_cache: Tensor
    v_cache: Tensor
    k_scales: Tensor | None
    v_scales: Tensor | None
    scale: float
    window: int | None
    chunk: int | None
    softcap: float | None
    sinks: Tensor | None
    alibi_slopes: Tensor | None

    def most_visible(self, max_seq_len: int) -> int:
        """The most keys that a query sees."""
        return min(limit for limit in (max_seq_len, self.window, self.chunk) if limit is not None)


class _Batch(NamedTuple):
    """What one launch works on; some sequences of a batch, and their tokens."""

    out: Tensor
    query: Tensor
    block_tables: Tensor
    starts: Tensor | None
    """None if each sequence has one query."""
    seq_lens: Tensor


def _attend(layer: _Layer, batch: _Batch, plan: AttentionPlan) -> None:
    num_tokens, num_heads, key_size = batch.query.shape
    num_sequences, num_kv_heads, value_size = len(batch.seq_lens), layer.k_cache.shape[1], batch.out.shape[2]
    if num_tokens == 0:
        return
    device, group = current_device(), num_heads // num_kv_heads
    num_rows = group * num_tokens / num_sequences
    dtypes = batch.query.dtype, layer.k_cache.dtype
    config = attention_config(device.architecture, max(key_size, value_size), num_rows, *dtypes)
    heads = min(group, config.rows)
    num_tiles = num_sequences if batch.starts is None else num_tokens // (config.rows // heads) + num_sequences
    grid = (num_tiles, num_kv_heads * triton.cdiv(group, heads))
    num_splits = plan.num_splits if batch.starts is None else None
    if num_splits is None:
        most_visible = layer.most_visible(plan.max_seq_len)
        num_splits = config.num_splits(grid[0] * grid[1], most_visible, device.num_processors)
    parts = weights = None
    if num_splits > 1:
        parts = batch.query.new_empty(num_tokens, num_heads, num_splits, value_size, dtype=torch.float32)
        weights = parts.new_empty(num_tokens, num_heads, num_splits)
    key_columns = max(16, 1 << (key_size.bit_length() - 1))
    attend[(*grid, num_splits)](
        batch.out, parts, weights, batch.query, layer.k_cache, layer.v_cache, layer.k_scales, layer.v_scales,
        batch.block_tables, batch.starts, batch.seq_lens, layer.sinks, layer.alibi_slopes,
        num_sequences, layer.scale, batch.query.stride(0), batch.query.stride(1), batch.block_tables.stride(0),
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        BLOCK=layer.k_cache.shape[2],
        KEY_SIZE=key_size,
        KEY_COLUMNS=key_columns,
        TAIL_COLUMNS=_columns(key_size - key_columns) if key_size > key_columns else 0,
        VALUE_SIZE=value_size,
        VALUE_STRIDE=layer.v_cache.shape[3],
        VALUE_COLUMNS=_columns(value_size),
        ROWS=config.rows,
        HEADS=heads,
        KEYS=config.keys,
        WINDOW=layer.window,
        CHUNK=layer.chunk,
        SOFTCAP=layer.softcap,
        ONE_QUERY_EACH=batch.starts is None,
        TILES_PER_SPLIT=config.keys_per_split // config.keys if num_splits > 1 else None,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )  # fmt: skip
    if num_splits > 1:
        columns = min(_columns(value_size), 128)
        merge[(num_tokens * num_heads, triton.cdiv(value_size, columns))](
            batch.out, parts, weights, VALUE_SIZE=value_size, COLUMNS=columns, SPLITS=num_splits
        )  # fmt: skip


def _columns(size: int) -> int:
    """Of a tile that holds so many; matrix products take 16 at least."""
    return max(16, int(triton.next_power_of_2(size)))


def _with_contiguous_heads(tensor: Tensor) -> Tensor:
    """[T, heads, head size] with contiguous heads; a slice of a merged projection has them, and needs no copy."""
    return tensor if tensor.stride(2) == 1 else tensor.contiguous()


def _check_cache(k_cache: Tensor, v_cache: Tensor | None, k_scales: Tensor | None, v_scales: Tensor | None) -> None:
    has_scales = k_cache.dtype in LARGEST_STORED
    assert has_scales == (k_scales is not None)
    assert (has_scales and v_cache is not None) == (v_scales is not None)
    assert v_cache is None or v_cache.dtype == k_cache.dtype
    assert all(tensor.is_contiguous() for tensor in (k_cache, v_cache, k_scales, v_scales) if tensor is not None)
    check_cache_dtype(current_device().architecture, k_cache.dtype)
