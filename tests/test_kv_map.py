"""The map of the KV cache: what it shows is what the pool says, in as many cells as asked for."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers import EngineUnderTest, make_engine, make_llm, make_request
from helpers_crowd import LAYOUTS
from paged_backend import InvalidRequestError, KVMap, SamplingParams
from paged_backend.engine.kv_layout import EVERYTHING, Reach
from test_embeddings import make_encoder_llm

PREFIX = list(range(1, 9))


def crowd(engine: EngineUnderTest, num_requests: int) -> None:
    for index in range(num_requests):
        engine.add(make_request([*PREFIX, 100 + index, 200 + index], n=1 + index % 3, max_tokens=3 + index % 9))


def check_sums(shown: KVMap) -> None:
    stats, cells = shown.stats, shown.cells
    assert sum(cells.num_held) == stats.num_blocks - stats.num_free_blocks
    assert sum(cells.num_cached) == stats.num_cached_blocks
    assert 0 <= shown.kv_waste < 1
    for owner, num_held, num_shared, num_filled in zip(
        cells.owners, cells.num_held, cells.num_shared, cells.num_filled_slots, strict=True
    ):
        assert (owner >= 0) == (num_held > 0)
        assert num_shared <= num_held <= shown.blocks_per_cell
        assert num_filled <= num_held * stats.block_size


@given(
    num_requests=st.integers(1, 12),
    max_cells=st.integers(1, 80),
    num_blocks=st.integers(8, 64),
    reaches=st.sampled_from(LAYOUTS),
)
def test_the_map_agrees_with_the_pool_at_every_step(
    num_requests: int, max_cells: int, num_blocks: int, reaches: tuple[Reach, ...]
) -> None:
    engine = make_engine(num_blocks=num_blocks * len(reaches), max_num_seqs=4, reaches=reaches)
    crowd(engine, num_requests)
    while engine.engine.has_work:
        engine.step()
        shown = engine.engine.kv_map(max_cells)
        assert len(shown.cells.owners) <= max_cells
        check_sums(shown)


def test_blocks_are_marked_as_filled_shared_and_cached() -> None:
    engine = make_engine()
    engine.add(make_request([*PREFIX, 50, 51]), make_request([*PREFIX, 60]))
    engine.step()
    engine.step()
    held = engine.engine.kv_map(1000).cells
    shared = [index for index, number in enumerate(held.num_shared) if number]
    assert [held.num_filled_slots[index] for index in shared] == [4, 4]
    assert [held.owners[index] for index in shared] == [0, 0]
    assert sorted(number for number in held.num_filled_slots if number) == [2, 3, 4, 4]
    assert set(held.owners) == {0, 1} and not any(held.num_cached)

    for request_id in list(engine.requests):
        engine.abort(request_id)
    free = engine.engine.kv_map(1000).cells
    assert not any(free.num_held) and set(free.owners) == {-1}
    assert [index for index, number in enumerate(free.num_cached) if number] == shared


def test_groups_of_layers_fill_blocks_of_their_own_and_give_back_what_they_do_not_look_at() -> None:
    engine = make_engine(reaches=(EVERYTHING, Reach(window=4)))
    engine.add(make_request(range(1, 12), max_tokens=8))
    engine.step()
    assert sorted(filter(None, engine.engine.kv_map(1000).cells.num_filled_slots)) == [3, 3, 4, 4, 4, 4]
    engine.step()
    engine.step()
    # 13 tokens, of which the next one sees the last three in the second group.
    assert sorted(filter(None, engine.engine.kv_map(1000).cells.num_filled_slots)) == [1, 1, 4, 4, 4, 4]
    (request,) = engine.engine.kv_map(1000).requests
    assert request.num_blocks == 4 + 2


def test_waste_is_the_share_of_empty_slots_in_held_blocks() -> None:
    engine = make_engine()
    engine.add(make_request([1, 2, 3, 4, 5], max_tokens=4))
    engine.step()
    assert engine.engine.kv_map(1000).kv_waste == 3 / 8


def test_neighbouring_blocks_share_a_cell_if_there_are_more_than_cells() -> None:
    engine = make_engine(num_blocks=64)
    crowd(engine, 6)
    engine.step()
    fine, coarse = engine.engine.kv_map(64), engine.engine.kv_map(5)
    assert fine.blocks_per_cell == 1
    assert coarse.blocks_per_cell == -(-len(fine.cells.owners) // 5)
    assert coarse.kv_waste == fine.kv_waste


def test_requests_are_listed_with_their_tokens_those_that_run_first() -> None:
    engine = make_engine(max_num_seqs=2)
    engine.add(make_request([*PREFIX, 50], max_tokens=8), make_request([*PREFIX, 60], n=2), make_request([7, 8]))
    engine.step()
    engine.step()
    first, second, third = engine.engine.kv_map(1000).requests
    assert (first.number, first.is_running, first.num_prompt_tokens, first.num_output_tokens) == (0, True, 9, 2)
    assert (second.number, second.num_cached_tokens, second.num_sequences) == (1, 8, 2)
    assert (third.number, third.is_running, third.num_blocks) == (2, False, 0)
    assert first.num_blocks == 3


def test_only_so_many_requests_are_listed() -> None:
    engine = make_engine()
    crowd(engine, 100)
    assert len(engine.engine.kv_map(1).requests) == 64


def test_an_idle_engine_has_no_cells_until_blocks_were_handed_out() -> None:
    with make_llm() as llm:
        assert llm.kv_map().cells.owners == []
        llm.generate([[1, 2, 3, 4, 5]], SamplingParams(max_tokens=1))
        assert len(llm.kv_map().cells.owners) == 2


def test_a_map_without_cells_is_refused() -> None:
    with make_llm() as llm, pytest.raises(InvalidRequestError, match="max_cells=0"):
        llm.kv_map(0)


def test_the_map_of_an_encoder_which_has_no_kv_cache_is_empty() -> None:
    with make_encoder_llm() as llm:
        assert llm.kv_map().cells.owners == []
