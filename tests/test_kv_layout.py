"""How many blocks sequences take whose layers look back differently far."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers import check_blocks, make_request, make_scheduler
from helpers_crowd import LAYOUTS
from paged_backend.engine.kv_layout import EVERYTHING, UNLIMITED, KVLayout, Reach

reaches_of_a_group = st.builds(Reach, window=st.none() | st.integers(1, 12), chunk=st.none() | st.integers(1, 12))


@st.composite
def layouts(draw: st.DrawFn) -> KVLayout:
    """The first group is the one that looks furthest back, as the engine wants it."""
    reaches = draw(st.lists(reaches_of_a_group, min_size=1, max_size=3))
    reaches.sort(key=lambda reach: reach.num_behind, reverse=True)
    return KVLayout(tuple(reaches), draw(st.integers(1, 5)), draw(st.integers(1, 20)))


@given(reach=reaches_of_a_group, position=st.integers(0, 40))
def test_a_reach_is_the_window_and_the_chunk_of_a_token(reach: Reach, position: int) -> None:
    def is_seen(other: int) -> bool:
        in_window = reach.window is None or position - other < reach.window
        return in_window and (reach.chunk is None or position // reach.chunk == other // reach.chunk)

    assert reach.first_visible(position) == next(other for other in range(position + 1) if is_seen(other))


@given(layout=layouts(), num_tokens=st.integers(2, 60))
def test_a_sequence_comes_to_its_end_in_as_many_blocks_as_are_said_to_do_and_needs_no_more_at_any_time(
    layout: KVLayout, num_tokens: int
) -> None:
    num_blocks = layout.num_blocks_for(num_tokens)
    scheduler = make_scheduler(
        num_blocks=num_blocks,
        block_size=layout.block_size,
        reaches=layout.reaches,
        max_num_batched_tokens=layout.max_step_tokens,
    )
    assert scheduler.max_len >= num_tokens
    request = make_request(range(num_tokens - num_tokens // 3), max_tokens=num_tokens // 3 or 1)
    scheduler.add_request(request)
    while scheduler.has_work:
        output = scheduler.schedule()
        assert output.num_tokens
        for sequence, _ in scheduler.advance(output):
            if sequence.num_output_tokens > layout.block_size:  # what its prompt took more has been given back
                assert len(sequence.held_blocks) <= layout.num_blocks_kept(num_tokens)
            scheduler.update(sequence, 0)
        check_blocks(scheduler)
    assert request.sequences[0].num_tokens == num_tokens - num_tokens // 3 + (num_tokens // 3 or 1)
    assert scheduler.num_preemptions == 0


@given(layout=layouts(), num_blocks=st.integers(1, 60))
def test_the_longest_sequence_fits_and_a_longer_one_does_not(layout: KVLayout, num_blocks: int) -> None:
    longest = layout.longest(num_blocks)
    if longest == UNLIMITED:
        assert all(reach.is_limited for reach in layout.reaches)
    else:
        assert layout.num_blocks_for(longest) <= num_blocks < layout.num_blocks_for(longest + 1)


@given(layout=layouts(), num_blocks=st.integers(1, 200), max_model_len=st.integers(1, 60))
def test_so_many_tokens_fit_in_sequences_of_which_one_is_at_its_prompt(
    layout: KVLayout, num_blocks: int, max_model_len: int
) -> None:
    num_sequences = layout.num_tokens(num_blocks, max_model_len) // max_model_len
    if num_sequences > 1 and any(reach.is_limited for reach in layout.reaches):  # or else all slots count
        others = (num_sequences - 1) * layout.num_blocks_kept(max_model_len)
        assert layout.num_blocks_for(max_model_len) + others <= num_blocks


@pytest.mark.parametrize("reaches", LAYOUTS)
def test_no_layout_takes_more_than_one_table_for_all_layers_would(reaches: tuple[Reach, ...]) -> None:
    for num_tokens in range(1, 40):
        one_table = KVLayout((EVERYTHING,), 4, 8).num_blocks_for(num_tokens)
        assert KVLayout(reaches, 4, 8).num_blocks_for(num_tokens) <= one_table * len(reaches)


def test_without_limits_all_slots_are_tokens() -> None:
    layout = KVLayout((EVERYTHING,), 4, 8)
    assert layout.longest(10) == layout.num_tokens(10, 7) == layout.num_tokens(10, 100) == 40
