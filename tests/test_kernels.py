"""Every kernel computes what its definition in plain torch says, and the definition is attention."""

import math
import os
import subprocess
import sys

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from helpers_attention import GARBAGE_BLOCK, OPTIONS, Batch, assert_close
from paged_kernels import paged_attention, reference, store_kv


def dense_attention(batch, window=None, chunk=None, softcap=None, sinks=None, alibi_slopes=None) -> Tensor:
    """Attention as a textbook has it: one query, one head, all keys at a time, in float64."""
    num_heads, num_kv_heads = batch.query.shape[1], batch.k_cache.shape[1]
    rows = []
    queries = iter(batch.query.double())
    for s, seq_len in enumerate(batch.seq_lens):
        for q in range(seq_len - batch.query_lens[s], seq_len):
            query = next(queries)
            seen = [
                p for p in range(q + 1) if not (window and p <= q - window) and not (chunk and p // chunk != q // chunk)
            ]
            for h in range(num_heads):
                kv_head = h * num_kv_heads // num_heads
                logits = batch.keys[s][seen, kv_head].double() @ query[h] * batch.scale
                if softcap:
                    logits = softcap * torch.tanh(logits / softcap)
                if alibi_slopes is not None:
                    logits = logits + alibi_slopes[h].double() * (torch.tensor(seen) - q)
                denominator = logits.exp().sum() + (0 if sinks is None else sinks[h].double().exp())
                rows.append(logits.exp() / denominator @ batch.values[s][seen, kv_head].double())
    return torch.stack(rows).view(*batch.query.shape[:2], -1).to(batch.query.dtype)


each_option = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())


@each_option
def test_the_definition_is_dense_attention(options):
    batch = Batch([1, 3, 0, 21], [9, 7, 5, 21])
    assert_close(batch.attend(reference.paged_attention, **options), dense_attention(batch, **options))


def test_values_that_are_in_keys_are_their_first_numbers():
    batch = Batch([1, 3, 21], [9, 7, 21], heads=(4, 1), head_sizes=(24, 16), values_in_keys=True)
    assert_close(batch.attend(reference.paged_attention), dense_attention(batch))


@each_option
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_option_holds_for_decode_prefill_and_chunks_alike(options, dtype):
    Batch([1, 40, 3, 0, 17, 1], [700, 40, 259, 12, 333, 1], dtype=dtype).assert_same(paged_attention, **options)


@pytest.mark.parametrize("heads", [(3, 3), (9, 3), (8, 2), (8, 1), (1, 1)], ids="H{0[0]}K{0[1]}".format)
@pytest.mark.parametrize(
    "head_sizes", [(64, 64), (80, 80), (96, 64), (256, 256), (24, 40), (8, 8)], ids="D{0[0]}Dv{0[1]}".format
)
@pytest.mark.parametrize("block_size", [4, 16, 32])
def test_every_shape_of_heads_and_blocks_works(heads, head_sizes, block_size):
    batch = Batch([1, 5, 18], [300, 37, 18], heads=heads, head_sizes=head_sizes, block_size=block_size)
    batch.assert_same(paged_attention)


@pytest.mark.parametrize("heads", [(16, 1), (4, 2), (1, 1)], ids="H{0[0]}K{0[1]}".format)
@pytest.mark.parametrize(
    "head_sizes", [(576, 512), (40, 32), (48, 40), (30, 20), (32, 32)], ids="D{0[0]}Dv{0[1]}".format
)
@pytest.mark.parametrize("cache_dtype", [None, torch.int8], ids=str)
def test_values_may_be_in_keys_of_any_shape(heads, head_sizes, cache_dtype):
    for dtype, block_size in ((torch.float32, 4), (torch.bfloat16, 6), (torch.bfloat16, 16)):
        sizes = {"heads": heads, "head_sizes": head_sizes, "block_size": block_size}
        batch = Batch([1, 5, 18], [300, 37, 18], dtype=dtype, cache_dtype=cache_dtype, values_in_keys=True, **sizes)
        batch.assert_same(paged_attention)


@each_option
def test_values_in_keys_serve_every_option(options):
    batch = Batch([1, 40, 3, 0, 17, 1], [700, 40, 259, 12, 333, 1], head_sizes=(40, 32), values_in_keys=True)
    batch.assert_same(paged_attention, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("query_lens", "seq_lens"),
    [
        ([], []),
        ([0], [7]),
        ([0, 0, 1, 0], [3, 0, 5, 2]),
        ([1] * 9, range(1, 10)),
        ([1], [3000]),
        ([16], [3000]),
        ([17], [600]),
        ([100], [100]),
        ([33, 1, 64], [90, 1000, 64]),
    ],
    ids=["empty", "no queries", "some without queries", "decode", "long", "long chunk", "tiles", "prefill", "mixed"],
)
def test_any_mix_of_query_and_context_lengths_works(query_lens, seq_lens, dtype):
    Batch(query_lens, list(seq_lens), dtype=dtype).assert_same(paged_attention)


@each_option
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_cache_of_integers_serves_every_option(options, dtype):
    batch = Batch([1, 40, 3, 0, 17, 1], [700, 40, 259, 12, 333, 1], dtype=dtype, cache_dtype=torch.int8)
    batch.assert_same(paged_attention, **options)


@pytest.mark.parametrize("heads", [(9, 3), (8, 1)], ids="H{0[0]}K{0[1]}".format)
@pytest.mark.parametrize("head_sizes", [(64, 64), (80, 96), (24, 40)], ids="D{0[0]}Dv{0[1]}".format)
@pytest.mark.parametrize("block_size", [1, 6, 16])
def test_a_cache_of_integers_serves_every_shape(heads, head_sizes, block_size):
    sizes = {"heads": heads, "head_sizes": head_sizes, "block_size": block_size}
    Batch([1, 5, 18], [300, 37, 18], dtype=torch.bfloat16, cache_dtype=torch.int8, **sizes).assert_same(paged_attention)


@pytest.mark.parametrize("values_in_keys", [False, True], ids=["values", "values in keys"])
def test_attention_to_a_cache_of_integers_is_nearly_that_to_its_numbers(values_in_keys):
    case = {"query_lens": [1, 20], "seq_lens": [300, 50], "head_sizes": (72, 64), "values_in_keys": values_in_keys}
    exact, coarse = (Batch(**case, cache_dtype=dtype) for dtype in (None, torch.int8))
    exact_out, coarse_out = (batch.attend(paged_attention) for batch in (exact, coarse))
    assert 0 < (exact_out - coarse_out).std() / exact_out.std() < 0.02


def test_float16_is_supported():
    Batch([1, 20], [300, 50], head_sizes=(24, 64), dtype=torch.float16).assert_same(paged_attention)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    lens=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 600)), max_size=6),
    group=st.integers(1, 4),
    block_size=st.sampled_from([1, 4, 16]),
    window=st.none() | st.integers(1, 400),
    chunk=st.none() | st.integers(1, 400),
)
def test_random_ragged_batches_match_the_definition(lens, group, block_size, window, chunk):
    query_lens = [num_queries for num_queries, _ in lens]
    seq_lens = [num_queries + num_past for num_queries, num_past in lens]
    batch = Batch(query_lens, seq_lens, heads=(2 * group, 2), block_size=block_size)
    batch.assert_same(paged_attention, window=window, chunk=chunk)


def test_a_sequence_gets_the_same_bits_whatever_its_batch_mates():
    batch = Batch([1, 50, 1, 4], [900, 50, 20, 400])
    together = batch.attend(paged_attention).split(batch.query_lens)
    for s, seq_len in enumerate(batch.seq_lens):
        alone = Batch([batch.query_lens[s]], [seq_len])
        alone.query = batch.query.split(batch.query_lens)[s]
        alone.k_cache, alone.v_cache, alone.block_tables = batch.k_cache, batch.v_cache, batch.block_tables[s : s + 1]
        assert torch.equal(alone.attend(paged_attention), together[s])


@pytest.mark.parametrize("num_threads", [1, 2, 7])
def test_the_number_of_threads_changes_nothing(num_threads):
    batch = Batch([1, 50, 1], [900, 50, 20])
    expected = batch.attend(paged_attention)
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        assert torch.equal(batch.attend(paged_attention), expected)
    finally:
        torch.set_num_threads(before)


def test_the_first_call_leaves_the_number_of_torch_threads_alone():
    script = """
import torch, paged_kernels
torch.set_num_threads(1)
query, lens = torch.ones(1, 1, 8), torch.tensor([1], dtype=torch.int32)
cache, start = torch.ones(1, 1, 4, 8), torch.tensor([0, 1], dtype=torch.int32)
paged_kernels.paged_attention(query, cache, cache, torch.zeros(1, 1, dtype=torch.int32), start, lens, scale=1.0)
assert torch.get_num_threads() == 1, torch.get_num_threads()
"""
    path = os.pathsep.join(sys.path)
    subprocess.run([sys.executable, "-c", script], check=True, timeout=100, env={**os.environ, "PYTHONPATH": path})


def test_blocks_that_left_the_window_are_not_read():
    batch = Batch([1, 6], [50, 30])
    expected = batch.attend(paged_attention, window=8)
    batch.block_tables[0, : (50 - 8) // 4] = GARBAGE_BLOCK
    batch.block_tables[1, : (30 - 5 - 8) // 4] = GARBAGE_BLOCK
    for attention in (paged_attention, reference.paged_attention):
        assert_close(batch.attend(attention, window=8), expected)


def test_nan_in_one_sequence_stays_there():
    batch = Batch([1, 1], [40, 40])
    expected = batch.attend(paged_attention)[1]
    batch.query[0, 0, 0] = math.nan
    actual = batch.attend(paged_attention)
    assert actual[0, 0].isnan().all()
    assert torch.equal(actual[1], expected)


def test_large_logits_do_not_overflow():
    batch = Batch([1, 5], [40, 300])
    batch.query *= 1000
    batch.assert_same(paged_attention)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_query_may_be_a_view_of_a_merged_projection(dtype):
    batch = Batch([1, 20], [40, 20], dtype=dtype)
    merged = torch.randn(21, 64 + 100).to(dtype)
    for view in (merged[:, 30:94].view(21, 4, 16), merged[:, :64].view(21, 16, 4).transpose(1, 2)):
        batch.query = view
        batch.assert_same(paged_attention)


@pytest.mark.parametrize("store", [store_kv, reference.store_kv], ids=["fast", "definition"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("contiguous", [True, False])
def test_tokens_are_stored_in_their_slots_and_nowhere_else(store, dtype, contiguous):
    key, value = torch.randn(2, 5, 16).to(dtype), torch.randn(2, 5, 24).to(dtype)
    key, value = key.transpose(0, 1), value.transpose(0, 1)  # [T, K, D], as models hand them over
    if contiguous:
        key, value = key.contiguous(), value.contiguous()
    k_cache = torch.full((3, 2, 4, 16), 7.0, dtype=dtype)
    v_cache = torch.full((3, 2, 4, 24), 7.0, dtype=dtype)
    expected_k, expected_v = k_cache.clone(), v_cache.clone()
    slots = [5, -1, 11, 0, -1]
    for t, slot in enumerate(slots):
        if slot >= 0:
            expected_k[slot // 4, :, slot % 4], expected_v[slot // 4, :, slot % 4] = key[t], value[t]
    store(key, value, k_cache, v_cache, torch.tensor(slots))
    assert torch.equal(k_cache, expected_k)
    assert torch.equal(v_cache, expected_v)
    alone = torch.full_like(k_cache, 7.0)
    store(key, None, alone, None, torch.tensor(slots))
    assert torch.equal(alone, expected_k)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_integers_and_their_scales_are_stored_as_defined(dtype):
    key = torch.randn(5, 2, 16).to(dtype)
    key[0, 0], key[1, 1, 3] = 0, 1000  # nothing to scale, and an outlier
    key[2, 0] = torch.arange(16) * 0.5  # halves that fall on ties
    slots = torch.tensor([5, -1, 11, 0, 6])
    stored = []
    for store in (store_kv, reference.store_kv):
        cache = torch.full((3, 2, 4, 16), 77, dtype=torch.int8)
        scales = torch.full((3, 2, 4), 7.0, dtype=torch.bfloat16)
        alone, scales_alone = cache.clone(), scales.clone()
        store(key, key, cache, cache.clone(), slots, k_scales=scales, v_scales=scales.clone())
        store(key, None, alone, None, slots, k_scales=scales_alone)
        assert torch.equal(alone, cache) and torch.equal(scales_alone, scales)
        stored.append((cache, scales))
    assert torch.equal(stored[0][0], stored[1][0])
    assert torch.equal(stored[0][1], stored[1][1])
    assert (stored[0][0] == 77).all(-1).sum() == 24 - 8
    numbers = stored[0][0][1, :, 1].float() * stored[0][1][1, :, 1, None].float()
    assert (numbers - key[0].float()).abs().max() <= 0.51 * stored[0][1][1, :, 1].max()


def test_storing_no_tokens_is_fine():
    cache = torch.zeros(2, 1, 4, 8)
    store_kv(torch.empty(0, 1, 8), torch.empty(0, 1, 8), cache, cache, torch.empty(0, dtype=torch.int64))
    assert not cache.any()
