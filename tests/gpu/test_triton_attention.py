"""The Triton attention kernels, interpreted, compute what their definitions say, and touch no memory besides."""

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from helpers_attention import GARBAGE_BLOCK, OPTIONS, Batch, assert_close, garbage_cache
from helpers_triton import poisoned_empty, watched_memory
from paged_kernels import reference
from paged_kernels.reference import LARGEST_STORED
from paged_kernels.triton_attention import AttentionPlan, paged_attention, store_kv

pytestmark = pytest.mark.timeout(200)


@pytest.fixture(autouse=True)
def memory(monkeypatch):
    poisoned_empty(monkeypatch)
    with watched_memory() as launches:
        yield launches


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_every_option_holds_for_decode_and_prefill(options):
    batch = Batch([1, 1, 12, 0, 3], [37, 9, 20, 6, 5])
    batch.assert_same(paged_attention, plan=AttentionPlan(2, 37, num_splits=2), **options)


@pytest.mark.parametrize("name", ["chunk", "all"])
def test_a_batch_needs_no_plan(name):
    Batch([1, 12, 0, 3], [37, 20, 6, 5]).assert_same(paged_attention, **OPTIONS[name])


@pytest.mark.parametrize(
    ("heads", "head_sizes", "block_size"),
    [
        ((3, 3), (32, 32), 8),
        ((9, 3), (64, 64), 1),
        ((8, 1), (80, 80), 16),
        ((4, 2), (96, 96), 24),
        ((2, 2), (128, 64), 256),
        ((2, 1), (256, 256), 32),
        ((20, 1), (24, 40), 6),
        ((40, 2), (16, 16), 4),
        ((1, 1), (8, 8), 64),
        ((16, 1), (576, 512), 16),
    ],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, tuple) else f"blocks of {value}",
)
def test_every_shape_of_heads_and_blocks_works(heads, head_sizes, block_size):
    batch = Batch([1, 9], [21, 9], heads=heads, head_sizes=head_sizes, block_size=block_size)
    batch.assert_same(paged_attention, plan=AttentionPlan(1, 21))


@pytest.mark.parametrize(
    ("heads", "head_sizes"),
    [((16, 1), (576, 512)), ((4, 1), (40, 32)), ((4, 2), (48, 40)), ((3, 3), (30, 20)), ((4, 2), (80, 16))],
    ids=lambda sizes: "-".join(map(str, sizes)),
)
def test_values_may_be_in_keys_of_any_shape(heads, head_sizes):
    batch = Batch([1, 9], [21, 9], heads=heads, head_sizes=head_sizes, values_in_keys=True)
    batch.assert_same(paged_attention, plan=AttentionPlan(1, 21, num_splits=2))


@pytest.mark.parametrize("cache_dtype", [None, *LARGEST_STORED], ids=str)
@pytest.mark.parametrize("values_in_keys", [False, True], ids=["values", "values in keys"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_every_type_of_cache_works(dtype, values_in_keys, cache_dtype):
    types = {"dtype": dtype, "cache_dtype": cache_dtype, "values_in_keys": values_in_keys}
    batch = Batch([1, 9], [21, 9], head_sizes=(32, 16), **types)
    batch.assert_same(paged_attention, plan=AttentionPlan(1, 21, num_splits=2))


def test_the_number_of_splits_changes_nothing_but_rounding():
    batch = Batch([1, 1, 1], [70, 1, 33], heads=(2, 1))
    for num_splits in (1, 2, 8):
        batch.assert_same(paged_attention, plan=AttentionPlan(3, 70, num_splits), sinks=torch.ones(2))


@pytest.mark.parametrize("num_splits", [1, 4])
def test_padding_becomes_zero(num_splits):
    batch = Batch([1, 1, 1, 1], [20, 0, 3, 0])
    out = batch.attend(paged_attention, plan=AttentionPlan(4, 20, num_splits), window=8)
    assert (out[[1, 3]] == 0).all()
    assert_close(out, batch.attend(reference.paged_attention, window=8))


def test_padding_of_a_prefill_belongs_to_a_sequence_of_length_zero():
    batch = Batch([1, 6, 25], [20, 9, 0])
    out = batch.attend(paged_attention, plan=AttentionPlan(1, 20))
    assert (out[7:] == 0).all()


@pytest.mark.parametrize(
    ("query_lens", "seq_lens"), [([], []), ([0], [7]), ([0, 0, 1, 0], [3, 0, 5, 2])], ids=["empty", "no query", "some"]
)
def test_sequences_without_queries_are_fine(query_lens, seq_lens):
    Batch(query_lens, seq_lens).assert_same(paged_attention)


@pytest.mark.parametrize("num_splits", [1, 4])
def test_decoding_reads_every_key_and_value_once(memory, num_splits):
    seq_lens = [5, 33, 130]
    batch = Batch([1, 1, 1], seq_lens, heads=(8, 2), head_sizes=(80, 64))
    batch.attend(paged_attention, plan=AttentionPlan(3, 130, num_splits))
    assert memory[0].bytes_read["k_cache_ptr"] == sum(seq_lens) * 2 * 80 * 4
    assert memory[0].bytes_read["v_cache_ptr"] == sum(seq_lens) * 2 * 64 * 4


def test_only_what_a_tile_of_queries_sees_is_read(memory):
    batch = Batch([40], [50], heads=(4, 2))  # tiles of 8 queries, times 2 heads
    batch.attend(paged_attention, plan=AttentionPlan(0, 50), window=5)
    num_seen = [last - max(0, first - 4) for first, last in zip(range(10, 50, 8), range(18, 51, 8), strict=True)]
    assert memory[0].bytes_read["k_cache_ptr"] == sum(num_seen) * 2 * 16 * 4


@pytest.mark.parametrize("options", [{"window": 8}, {"chunk": 40}], ids=str)
def test_what_no_query_sees_any_more_takes_no_time(memory, options):
    for seq_len in (40, 400):
        Batch([1], [seq_len]).attend(paged_attention, plan=AttentionPlan(1, 400, 1), **options)
    assert memory[0].num_loads == memory[1].num_loads


def test_splits_without_keys_write_no_values(memory):
    Batch([1, 1], [5, 130]).attend(paged_attention, plan=AttentionPlan(2, 130, num_splits=4))
    num_parts = 1 + 3  # of 16 keys at least, and of 48
    assert memory[0].bytes_written["parts_ptr"] == num_parts * 4 * 16 * 4


def test_blocks_that_left_the_window_are_not_read():
    batch = Batch([1, 6], [50, 30])
    expected = batch.attend(reference.paged_attention, window=8)
    batch.block_tables[0, : (50 - 8) // 4] = GARBAGE_BLOCK
    batch.block_tables[1, : (30 - 5 - 8) // 4] = GARBAGE_BLOCK
    assert_close(batch.attend(paged_attention, window=8), expected)


@pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning")
def test_nan_in_one_sequence_stays_there():
    batch = Batch([1, 1], [40, 40])
    expected = batch.attend(paged_attention)[1]
    batch.query[0, 0, 0] = math.nan
    actual = batch.attend(paged_attention, plan=AttentionPlan(2, 40, num_splits=2))
    assert actual[0, 0].isnan().all()
    assert_close(actual[1], expected)


def test_large_logits_do_not_overflow():
    batch = Batch([1, 5], [40, 30])
    batch.query *= 1000
    batch.assert_same(paged_attention)


def test_query_may_be_a_view_of_a_merged_projection():
    batch = Batch([1, 20], [40, 20])
    merged = torch.randn(21, 64 + 100)
    for view in (merged[:, 30:94].view(21, 4, 16), merged[:, :64].view(21, 16, 4).transpose(1, 2)):
        batch.query = view
        batch.assert_same(paged_attention)


@pytest.mark.slow
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    num_decodes=st.integers(0, 3),
    others=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 60)), max_size=3),
    group=st.integers(1, 5),
    block_size=st.sampled_from([1, 4, 16]),
    window=st.none() | st.integers(1, 50),
    chunk=st.none() | st.integers(1, 50),
    num_splits=st.sampled_from([1, 2, 8]),
)
def test_random_ragged_batches_match_the_definition(num_decodes, others, group, block_size, window, chunk, num_splits):
    query_lens = [1] * num_decodes + [num_queries for num_queries, _ in others]
    seq_lens = list(range(1, num_decodes + 1)) + [num_queries + num_past for num_queries, num_past in others]
    batch = Batch(query_lens, seq_lens, heads=(2 * group, 2), block_size=block_size)
    batch.assert_same(paged_attention, plan=AttentionPlan(num_decodes, 100, num_splits), window=window, chunk=chunk)


SLOTS = [5, -1, 11, 0, -1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("is_contiguous", [True, False])
def test_tokens_are_stored_in_their_slots_and_nowhere_else(dtype, is_contiguous):
    key, value = torch.randn(3, 5, 16).to(dtype), torch.randn(3, 5, 24).to(dtype)
    key, value = key.transpose(0, 1), value.transpose(0, 1)  # [T, K, D], as models hand them over
    if is_contiguous:
        key, value = key.contiguous(), value.contiguous()
    stored = []
    for store in (store_kv, reference.store_kv):
        caches = [torch.full((3, 3, 4, size), 7.0, dtype=dtype) for size in (16, 24)]
        store(key, value, *caches, torch.tensor(SLOTS))
        stored.append(caches)
    assert torch.equal(stored[0][0], stored[1][0])
    assert torch.equal(stored[0][1], stored[1][1])
    alone = torch.full((3, 3, 4, 16), 7.0, dtype=dtype)
    store_kv(key, None, alone, None, torch.tensor(SLOTS))
    assert torch.equal(alone, stored[1][0])
    assert (stored[0][0] == 7).all(-1).sum() == 3 * (12 - 3)


def assert_stored_as_defined(key, cache_dtype):
    num_kv_heads, size = key.shape[1:]
    stored = []
    for store in (store_kv, reference.store_kv):
        caches = [garbage_cache(3, num_kv_heads, 4, size, dtype=cache_dtype) for _ in "kv"]
        scales = [torch.full((3, num_kv_heads, 4), 7.0, dtype=torch.bfloat16) for _ in "kv"]
        alone, scales_alone = caches[0].clone(), scales[0].clone()
        store(key, -key, *caches, torch.tensor(SLOTS), k_scales=scales[0], v_scales=scales[1])
        store(key, None, alone, None, torch.tensor(SLOTS), k_scales=scales_alone)
        stored.append([*caches, *scales, alone, scales_alone])
    for ours, defined in zip(*stored, strict=True):
        assert torch.equal(ours.view(torch.int8), defined.view(torch.int8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_integers_and_their_scales_are_stored_as_defined(dtype):
    key = torch.randn(5, 3, 16).to(dtype)
    key[0, 0], key[0, 1, 3] = 0, 1000  # nothing to scale, and an outlier
    key[2, 0] = torch.arange(16) * 0.5  # halves that fall on ties
    assert_stored_as_defined(key, torch.int8)


@pytest.mark.parametrize("cache_dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_float8_and_its_scales_are_stored_as_defined(dtype, cache_dtype):
    """The interpreter rounds to float8 in its own way, so these numbers need no rounding."""
    numbers = torch.randn(5, 3, 16).sign() * torch.randint(1, 8, (5, 3, 16)).exp2()
    numbers[..., 0] = LARGEST_STORED[cache_dtype]
    key = (numbers * 2.0 ** torch.arange(-2, 3)[:, None, None]).to(dtype)
    key[0, 0] = 0
    assert_stored_as_defined(key, cache_dtype)


def test_a_cache_may_have_more_than_two_billion_numbers():
    num_blocks, small = 2**31 // 1024 + 2, torch.zeros(1, 1, 16, 64, dtype=torch.int8)
    large = torch.empty(num_blocks, 1, 16, 64, dtype=torch.int8)  # takes no memory where it is not touched
    key, outs = torch.randn(5, 1, 64), []
    for cache in (small, large):
        last, scales = len(cache) - 1, torch.zeros(len(cache), 1, 16, dtype=torch.bfloat16)
        slots = last * 16 + torch.arange(5)
        store_kv(key, key, cache, cache, slots, k_scales=scales, v_scales=scales)
        indices = [torch.tensor(numbers, dtype=torch.int32) for numbers in ([[last]], [0, 1], [5])]
        outs.append(paged_attention(key[:1], cache, cache, *indices, scale=1.0, k_scales=scales, v_scales=scales))
    assert torch.equal(*outs)


def test_storing_no_tokens_is_fine():
    cache = torch.zeros(2, 1, 4, 8)
    store_kv(torch.empty(0, 1, 8), torch.empty(0, 1, 8), cache, cache, torch.empty(0, dtype=torch.int64))
    assert not cache.any()
