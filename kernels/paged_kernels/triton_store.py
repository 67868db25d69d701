"""Device code of `store_kv`: one program writes the key and the value, if any, of one token, all heads at once."""

import triton
import triton.language as tl

from paged_kernels.triton_device import rounded_to_bfloat16, rounded_to_integers, widened


@triton.jit(do_not_specialize_on_alignment=["slots_ptr"])
def store_tokens(
    key_ptr,
    value_ptr,
    k_cache_ptr,
    v_cache_ptr,
    k_scales_ptr,
    v_scales_ptr,
    slots_ptr,
    key_token_stride,
    key_head_stride,
    value_token_stride,
    value_head_stride,
    NUM_KV_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    KEY_COLUMNS: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    VALUE_COLUMNS: tl.constexpr,
    LARGEST: tl.constexpr,
):
    """HEADS, KEY_COLUMNS and VALUE_COLUMNS are the sizes of tiles: the next powers of two. LARGEST is the largest
    number of a scaled cache, None if it is not scaled."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token)
    if slot < 0:
        return
    heads = tl.arange(0, HEADS)
    rows = (slot // BLOCK * NUM_KV_HEADS + heads) * BLOCK + slot % BLOCK
    _store_heads(
        key_ptr + token * key_token_stride, key_head_stride, k_cache_ptr, k_scales_ptr, heads, rows,
        NUM_KV_HEADS, KEY_SIZE, KEY_COLUMNS, LARGEST,
    )  # fmt: skip
    if value_ptr is not None:
        _store_heads(
            value_ptr + token * value_token_stride, value_head_stride, v_cache_ptr, v_scales_ptr, heads, rows,
            NUM_KV_HEADS, VALUE_SIZE, VALUE_COLUMNS, LARGEST,
        )  # fmt: skip


@triton.jit
def _store_heads(
    source_ptr, head_stride, cache_ptr, scales_ptr, heads, rows,
    NUM_KV_HEADS: tl.constexpr, SIZE: tl.constexpr, COLUMNS: tl.constexpr, LARGEST: tl.constexpr,
):  # fmt: skip
    """One token's heads, to these rows of the cache, where a row is one head of one slot."""
    columns = tl.arange(0, COLUMNS)
    mask = (heads < NUM_KV_HEADS)[:, None] & (columns < SIZE)[None, :]
    x = tl.load(source_ptr + heads[:, None] * head_stride + columns[None, :], mask=mask, other=0.0)
    if LARGEST is not None:
        x = widened(x).to(tl.float32)
        scales = rounded_to_bfloat16(tl.div_rn(tl.max(tl.abs(x), 1), LARGEST))
        tl.store(scales_ptr + rows, scales.to(scales_ptr.dtype.element_ty), mask=heads < NUM_KV_HEADS)
        x = tl.div_rn(x, tl.where(scales == 0, 1.0, scales)[:, None] + tl.zeros([1, COLUMNS], tl.float32))
        x = tl.clamp(x, -LARGEST, LARGEST)
        if cache_ptr.dtype.element_ty == tl.int8:
            x = rounded_to_integers(x)
    tl.store(cache_ptr + rows[:, None] * SIZE + columns[None, :], x.to(cache_ptr.dtype.element_ty), mask=mask)
