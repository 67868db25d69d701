"""Device code of `paged_attention`.

A program works on a tile of queries that share a key/value head: row r of it is query head `r % HEADS` of those, of
query `r // HEADS`. So each key and value is loaded once for all of them. It goes through the keys that any of its
rows sees, or through one part of them if they are split, tile by tile, with a running softmax; `merge` puts the parts
together. Logits are kept in base 2.
"""

import triton
import triton.language as tl

from paged_kernels.triton_device import widened

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit(
    do_not_specialize=["num_sequences", "table_stride"],
    do_not_specialize_on_alignment=["tables_ptr", "starts_ptr", "lens_ptr"],
)
def attend(
    out_ptr,
    parts_ptr,
    weights_ptr,
    query_ptr,
    k_cache_ptr,
    v_cache_ptr,
    k_scales_ptr,
    v_scales_ptr,
    tables_ptr,
    starts_ptr,
    lens_ptr,
    sinks_ptr,
    slopes_ptr,
    num_sequences,
    scale,
    token_stride,
    head_stride,
    table_stride,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    KEY_COLUMNS: tl.constexpr,
    TAIL_COLUMNS: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    VALUE_STRIDE: tl.constexpr,
    VALUE_COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    HEADS: tl.constexpr,
    KEYS: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ONE_QUERY_EACH: tl.constexpr,
    TILES_PER_SPLIT: tl.constexpr,
):
    """The grid is (tiles, NUM_KV_HEADS * head blocks, splits); starts_ptr may be None if each sequence has one query.

    A key is loaded as KEY_COLUMNS and TAIL_COLUMNS numbers, both powers of two, so that 80 numbers take 64 + 16
    columns. Values are VALUE_STRIDE numbers apart, and may be in keys: they are then loaded once more, from the L2
    cache, since Triton 3.9 copies no tile ahead that two products take in different orders. If the keys are split, each
    split has TILES_PER_SPLIT tiles at least, and parts_ptr and weights_ptr are written, not out_ptr; otherwise it is
    None.
    """
    QUERIES: tl.constexpr = ROWS // HEADS
    HEAD_BLOCKS: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    NUM_HEADS: tl.constexpr = NUM_KV_HEADS * GROUP
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # the last queries of a sequence see most: they begin first
    kv_head = tl.program_id(1) // HEAD_BLOCKS
    if ONE_QUERY_EACH:
        sequence = tile
        first_token = tile
        num_queries = 1
        first_query = 0
    else:
        sequence = _owner(starts_ptr, num_sequences, tile, QUERIES)
        first_token = tl.load(starts_ptr + sequence) - tl.load(starts_ptr)
        num_queries = tl.load(starts_ptr + sequence + 1) - tl.load(starts_ptr + sequence)
        first_query = (tile - (first_token // QUERIES + sequence)) * QUERIES
        if first_query >= num_queries:
            return
    seq_len = tl.load(lens_ptr + sequence)
    first_position = seq_len - num_queries + first_query

    rows = tl.arange(0, ROWS)
    head_of_group = tl.program_id(1) % HEAD_BLOCKS * HEADS + rows % HEADS
    heads = kv_head * GROUP + head_of_group
    queries = first_query + rows // HEADS
    is_row = (rows < QUERIES * HEADS) & (head_of_group < GROUP) & (queries < num_queries)
    tokens = (first_token + queries).to(tl.int64)
    positions = first_position + rows // HEADS
    oldest = _first_visible(positions, WINDOW, CHUNK)

    columns = tl.arange(0, KEY_COLUMNS)
    query_rows = query_ptr + tokens * token_stride + heads * head_stride
    query = _load(query_rows[:, None], is_row[:, None], columns[None, :], KEY_SIZE)
    if TAIL_COLUMNS:
        tail = KEY_COLUMNS + tl.arange(0, TAIL_COLUMNS)
        query_tail = _load(query_rows[:, None], is_row[:, None], tail[None, :], KEY_SIZE)
    if slopes_ptr is not None:
        slopes = _load_wide(slopes_ptr + heads, is_row) * LOG2_E

    value_columns = tl.arange(0, VALUE_COLUMNS)
    sums = tl.zeros([ROWS, VALUE_COLUMNS], tl.float32)
    weight = tl.zeros([ROWS], tl.float32)
    highest = tl.full([ROWS], float("-inf"), tl.float32)
    if sinks_ptr is not None:
        counts_here = tl.program_id(2) == 0  # not once per split
        weight = tl.where(counts_here, weight + 1.0, weight)
        highest = tl.where(counts_here, _load_wide(sinks_ptr + heads, is_row) * LOG2_E, highest)

    first_key = _first_visible(first_position, WINDOW, CHUNK)
    end_key = tl.minimum(seq_len, first_position + QUERIES)
    first_tile = first_key // KEYS
    end_tile = tl.cdiv(end_key, KEYS)
    if TILES_PER_SPLIT is not None:
        tiles_per_split = tl.maximum(tl.cdiv(end_tile - first_tile, tl.num_programs(2)), TILES_PER_SPLIT)
        first_tile += tl.program_id(2) * tiles_per_split
        end_tile = tl.minimum(end_tile, first_tile + tiles_per_split)
    table_ptr = tables_ptr + sequence.to(tl.int64) * table_stride
    keys = first_tile * KEYS + tl.arange(0, KEYS)
    is_key = (keys >= first_key) & (keys < end_key)
    blocks = tl.load(table_ptr + keys // BLOCK, mask=is_key, other=0)
    for _ in range(first_tile, end_tile):
        # Block numbers are loaded an iteration ahead: else keys and values would wait for them, and the compiler would
        # spend the pipeline's stages on that chain instead of on buffers of keys and values.
        slots = (blocks.to(tl.int64) * NUM_KV_HEADS + kv_head) * BLOCK + keys % BLOCK
        next_keys = keys + KEYS
        is_next_key = (next_keys >= first_key) & (next_keys < end_key)
        blocks = tl.load(table_ptr + next_keys // BLOCK, mask=is_next_key, other=0)

        key_rows = k_cache_ptr + slots * KEY_SIZE
        k = _load(key_rows[None, :], is_key[None, :], columns[:, None], KEY_SIZE)
        logits = tl.dot(query, k.to(query.dtype), input_precision="ieee")
        if TAIL_COLUMNS:
            k_tail = _load(key_rows[None, :], is_key[None, :], tail[:, None], KEY_SIZE)
            logits = tl.dot(query_tail, k_tail.to(query.dtype), logits, input_precision="ieee")
        if k_scales_ptr is not None:
            logits *= _load_wide(k_scales_ptr + slots, is_key)[None, :]
        logits = _scaled(logits, scale, SOFTCAP)
        if slopes_ptr is not None:
            logits += slopes[:, None] * (keys[None, :] - positions[:, None]).to(tl.float32)
        is_seen = is_key[None, :] & (keys[None, :] <= positions[:, None])
        if WINDOW is not None or CHUNK is not None:
            is_seen &= keys[None, :] >= oldest[:, None]
        logits = tl.where(is_seen, logits, float("-inf"))

        new_highest = tl.maximum(highest, tl.max(logits, 1))
        base = _or_zero(new_highest)
        factor = tl.exp2(highest - base)
        shares = tl.exp2(logits - base[:, None])
        weight = weight * factor + tl.sum(shares, 1)
        highest = new_highest
        if v_scales_ptr is not None:
            shares *= _load_wide(v_scales_ptr + slots, is_key)[None, :]
        value_rows = v_cache_ptr + slots * VALUE_STRIDE
        v = _load(value_rows[:, None], is_key[:, None], value_columns[None, :], VALUE_SIZE).to(query.dtype)
        sums = tl.dot(shares.to(query.dtype), v, sums * factor[:, None], input_precision="ieee")
        keys = next_keys
        is_key = is_next_key

    has_weight = weight != 0.0
    sums /= tl.where(has_weight, weight, 1.0)[:, None]
    out_rows = tokens * NUM_HEADS + heads
    mask = is_row[:, None] & (value_columns < VALUE_SIZE)[None, :]
    if TILES_PER_SPLIT is not None:
        part_rows = out_rows * tl.num_programs(2) + tl.program_id(2)
        log_weight = tl.where(has_weight, highest + tl.log2(tl.where(has_weight, weight, 1.0)), float("-inf"))
        tl.store(weights_ptr + part_rows, log_weight, mask=is_row)
        part_ptrs = parts_ptr + part_rows[:, None] * VALUE_SIZE + value_columns[None, :]
        tl.store(part_ptrs, sums, mask=mask & has_weight[:, None])
    else:
        out_ptrs = out_ptr + out_rows[:, None] * VALUE_SIZE + value_columns[None, :]
        tl.store(out_ptrs, sums.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _load(rows, is_row, columns, SIZE: tl.constexpr):
    """Columns of rows that have SIZE of them, 0 elsewhere; rows and columns are one dimension of the tile each."""
    return widened(tl.load(rows + columns, mask=is_row & (columns < SIZE), other=0.0))


@triton.jit
def _load_wide(ptrs, mask):
    return widened(tl.load(ptrs, mask=mask, other=0.0)).to(tl.float32)


@triton.jit
def _scaled(logits, scale, SOFTCAP: tl.constexpr):
    """Products of queries and keys as logits in base 2."""
    if SOFTCAP is None:
        return logits * (scale * LOG2_E)
    else:  # tanh(x) = 2 sigmoid(2x) - 1
        return (2.0 * tl.sigmoid(logits * (scale * (2.0 / SOFTCAP))) - 1.0) * (SOFTCAP * LOG2_E)


@triton.jit
def _or_zero(highest):
    """What is subtracted from logits: their maximum, or anything finite where there is no logit yet."""
    return tl.where(highest == float("-inf"), 0.0, highest)


@triton.jit
def _owner(starts_ptr, num_sequences, tile, QUERIES: tl.constexpr):
    """The sequence that a tile belongs to, where sequence s has the tiles from its first token // QUERIES + s on.

    That leaves room for all of them, and the number of tiles depends on that of tokens and of sequences alone.
    """
    start = tl.load(starts_ptr)
    low = 0
    high = num_sequences
    while high - low > 1:
        middle = (low + high) // 2
        if (tl.load(starts_ptr + middle) - start) // QUERIES + middle <= tile:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def _first_visible(position, WINDOW: tl.constexpr, CHUNK: tl.constexpr):
    """The first key that queries at these positions see."""
    first = position * 0
    if WINDOW is not None:
        first = tl.maximum(first, position - WINDOW + 1)
    if CHUNK is not None:
        first = tl.maximum(first, position // CHUNK * CHUNK)
    return first


@triton.jit
def merge(
    out_ptr,
    parts_ptr,
    weights_ptr,
    VALUE_SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Put the parts of each query head together, [T * H, SPLITS, VALUE_SIZE] with the logarithms of their weights.

    The grid is (T * H, tiles of COLUMNS); SPLITS is a power of two. A head without any key becomes 0.
    """
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    part_rows = row * SPLITS + tl.arange(0, SPLITS)
    log_weights = tl.load(weights_ptr + part_rows)
    shares = tl.exp2(log_weights - _or_zero(tl.max(log_weights, 0)))
    # Parts without weight were not written.
    parts = _load(parts_ptr + part_rows[:, None] * VALUE_SIZE, (shares > 0.0)[:, None], columns[None, :], VALUE_SIZE)
    total = tl.sum(shares, 0)
    out = tl.sum(parts * shares[:, None], 0) / tl.where(total == 0.0, 1.0, total)
    tl.store(out_ptr + row * VALUE_SIZE + columns, out.to(out_ptr.dtype.element_ty), mask=columns < VALUE_SIZE)
