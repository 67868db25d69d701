"""Block tables: what is shared, what is copied, what is found again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers import make_manager, make_request
from helpers_crowd import LAYOUTS
from paged_backend.engine import request as engine_request
from paged_backend.engine.kv_cache_manager import KVCacheManager
from paged_backend.engine.kv_layout import EVERYTHING, Reach

# Python's hash of -1 is that of -2, and the hash of an integer is taken modulo this number.
MODULUS = 2**61 - 1


class SameHash(int):
    """A token id whose hash says nothing."""

    def __hash__(self) -> int:
        return 1


def computed(manager: KVCacheManager, prompt: Iterable[int], **options: Any) -> engine_request.Sequence:
    """A sequence whose prompt is computed."""
    sequence = make_request(prompt, **options).sequences[0]
    assert manager.admit(sequence)
    manager.publish(sequence, sequence.num_tokens)
    sequence.num_computed_tokens = sequence.num_tokens
    return sequence


def num_found(manager: KVCacheManager, prompt: Iterable[int], **options: Any) -> int:
    """How many tokens of a prompt a new request would find computed."""
    sequence = make_request(prompt, **options).sequences[0]
    assert manager.admit(sequence)
    num_tokens = sequence.num_computed_tokens
    manager.free(sequence)
    return num_tokens


@pytest.mark.parametrize("num_tokens, num_expected", [(1, 0), (4, 0), (5, 4), (8, 4), (9, 8), (12, 8), (13, 12)])
def test_a_prompt_wholly_in_the_cache_leaves_its_last_token_to_compute(num_tokens: int, num_expected: int) -> None:
    manager = make_manager(block_size=4)
    manager.free(computed(manager, range(num_tokens)))

    assert num_found(manager, range(num_tokens)) == num_expected


@given(first=st.lists(st.integers(0, 1), max_size=12), second=st.lists(st.integers(0, 1), min_size=1, max_size=12))
def test_what_is_found_is_the_common_prefix_in_full_blocks(first: list[int], second: list[int]) -> None:
    manager = make_manager(block_size=2)
    manager.free(computed(manager, [*first, 9]))
    num_common = next(
        (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )

    assert num_found(manager, second) == min(num_common, len(second) - 1) // 2 * 2


@pytest.mark.parametrize(
    "first, second",
    [
        ([-1] * 4, [-2] * 4),
        ([5] * 4, [5 + MODULUS] * 4),
        ([SameHash(1)] * 4, [SameHash(2)] * 4),
    ],
)
def test_prompts_whose_hashes_collide_never_share(first: Sequence[int], second: Sequence[int]) -> None:
    assert hash(tuple(first)) == hash(tuple(second))
    manager = make_manager(block_size=4)
    manager.free(computed(manager, [*first, 0, 0, 0, 0, 0]))

    assert num_found(manager, [*second, 0, 0, 0, 0, 0]) == 0
    assert num_found(manager, [*first, 0, 0, 0, 0, 0]) == 8


def test_equal_blocks_after_different_ones_are_not_shared() -> None:
    manager = make_manager(block_size=2)
    manager.free(computed(manager, [1, 1, 7, 7, 0]))

    assert num_found(manager, [2, 2, 7, 7, 0]) == 0
    assert num_found(manager, [7, 7, 0]) == 0


def test_prefixes_are_shared_only_within_one_salt() -> None:
    manager = make_manager(block_size=4)
    manager.free(computed(manager, range(9), cache_salt="a"))

    assert num_found(manager, range(9), cache_salt="a") == 8
    assert num_found(manager, range(9), cache_salt="b") == 0
    assert num_found(manager, range(9)) == 0


def test_nothing_is_found_with_prefix_caching_off() -> None:
    manager = make_manager(block_size=4, enable_prefix_caching=False)
    manager.free(computed(manager, range(9)))

    assert num_found(manager, range(9)) == 0
    assert manager.pool.num_cached == 0


def test_a_request_for_prompt_logprobs_computes_everything_and_still_serves_others() -> None:
    manager = make_manager(block_size=4)
    manager.free(computed(manager, range(9), prompt_logprobs=0))

    assert num_found(manager, range(9), prompt_logprobs=0) == 0
    assert num_found(manager, range(9)) == 8


def test_a_failed_step_leaves_nothing_to_find_but_what_was_there_before() -> None:
    manager = make_manager(block_size=4)
    manager.begin_step()
    computed(manager, range(9))
    manager.begin_step()
    computed(manager, range(17))

    manager.unpublish_step()

    assert num_found(manager, range(17)) == 8


def test_the_end_of_a_prefix_is_forgotten_before_its_start() -> None:
    manager = make_manager(num_blocks=6, block_size=2)
    manager.free(computed(manager, range(8)))
    manager.free(computed(manager, range(50, 56)))

    assert num_found(manager, range(9)) == 6


def test_admission_that_does_not_fit_changes_nothing() -> None:
    manager = make_manager(num_blocks=4, block_size=2)
    manager.free(computed(manager, range(5)))
    computed(manager, range(50, 52))
    free_before = manager.pool.num_free

    sequence = make_request(range(8)).sequences[0]

    assert not manager.admit(sequence)
    assert (manager.pool.num_free, len(sequence.tables), sequence.num_computed_tokens) == (free_before, 0, 0)


def test_a_found_block_that_is_free_counts_against_the_room() -> None:
    manager = make_manager(num_blocks=3, block_size=2)
    manager.free(computed(manager, range(5)))

    assert manager.admit(make_request(range(6)).sequences[0])
    assert manager.pool.num_free == 0


def test_forks_share_everything_until_the_first_of_them_writes() -> None:
    manager = make_manager(block_size=4)
    request = make_request(range(6), n=3)
    parent, *children = request.sequences
    assert manager.admit(parent)
    parent.num_computed_tokens = 6
    for child in children:
        child.token_ids = list(parent.token_ids)
        manager.fork(parent, child)
    assert manager.pool.num_used == 2

    copies = [manager.allocate_slots(sequence, 1) for sequence in request.sequences]

    assert [len(copy or ()) for copy in copies] == [1, 1, 0], "the last one that holds a block may write to it"
    tables = [sequence.tables[0].blocks for sequence in request.sequences]
    assert len({table[0] for table in tables}) == 1
    assert len({table[1] for table in tables}) == 3
    assert manager.pool.num_used == 4


def test_a_fork_without_room_for_its_copy_gets_nothing_and_changes_nothing() -> None:
    manager = make_manager(num_blocks=2, block_size=4)
    parent, child = make_request(range(6), n=2).sequences
    assert manager.admit(parent)
    parent.num_computed_tokens = 6
    manager.fork(parent, child)

    assert manager.allocate_slots(child, 1) is None
    assert child.tables == parent.tables
    manager.free(parent)
    assert manager.allocate_slots(child, 1) == []


def test_freeing_twice_changes_nothing() -> None:
    manager = make_manager(num_blocks=4, block_size=4)
    sequence = computed(manager, range(9))
    manager.free(sequence)
    manager.free(sequence)

    assert manager.pool.num_free == 4


# --- windows ---


def test_blocks_behind_the_window_are_free_again_and_the_rest_is_given_back_once() -> None:
    manager = KVCacheManager(10, 4, reaches=[Reach(window=6)])
    sequence = computed(manager, range(17))
    assert manager.pool.num_free == 5
    # The next token, at position 17, looks back to position 12: three blocks are behind that.
    assert manager.allocate_slots(sequence, 1) == []
    assert manager.pool.num_free == 8
    manager.free(sequence)
    assert manager.pool.num_free == 10


def test_a_fork_holds_what_its_parent_still_holds() -> None:
    manager = KVCacheManager(10, 4, reaches=[Reach(window=6)])
    parent = computed(manager, range(17))
    manager.allocate_slots(parent, 1)
    child = make_request([1]).sequences[0]
    manager.fork(parent, child)
    manager.free(parent)
    assert manager.pool.num_used == 2
    manager.free(child)
    assert manager.pool.num_used == 0


def test_a_dropped_block_is_found_as_long_as_nobody_has_taken_it() -> None:
    manager = KVCacheManager(10, 4, reaches=[Reach(window=6)])
    sequence = computed(manager, range(17))
    manager.allocate_slots(sequence, 1)
    assert num_found(manager, range(17)) == 16


# --- groups of layers ---


def grouped_manager(num_blocks: int = 40, **options: Any) -> KVCacheManager:
    """All tokens are looked at in one group, and six of them in the other two."""
    reaches = (EVERYTHING, Reach(window=6), Reach(window=6))
    return KVCacheManager(num_blocks, 4, reaches=reaches, **options)


def test_each_group_keeps_what_its_layers_look_at() -> None:
    manager = grouped_manager()
    sequence = computed(manager, range(17))
    assert manager.allocate_slots(sequence, 1) == []
    assert [len(table.held) for table in sequence.tables] == [5, 2, 2]
    assert manager.pool.num_used == 9
    manager.free(sequence)
    assert manager.pool.num_used == 0


def test_a_prompt_begins_with_the_blocks_that_its_way_to_the_end_takes() -> None:
    manager = grouped_manager(max_step_tokens=8)
    sequence = make_request(range(40)).sequences[0]
    assert manager.admit(sequence)
    assert [len(table.held) for table in sequence.tables] == [10, 4, 4]  # 5 tokens to look at, and 8 to compute
    while sequence.num_computed_tokens < 40:
        assert manager.allocate_slots(sequence, 8) == []
        sequence.num_computed_tokens += 8
        assert manager.pool.num_used <= manager.layout.num_blocks_for(40) == 10 + 5 + 5
    manager.free(sequence)


@given(data=st.data(), num_blocks=st.integers(1, 12), reaches=st.sampled_from(LAYOUTS))
def test_what_is_found_is_the_longest_prefix_that_all_groups_can_go_on_from(
    data: st.DataObject, num_blocks: int, reaches: tuple[Reach, ...]
) -> None:
    manager = KVCacheManager(200, 2, reaches=reaches)
    sequence = computed(manager, range(2 * num_blocks + 1))
    tables = [list(table.blocks[:num_blocks]) for table in sequence.tables]
    manager.free(sequence)
    is_there = [data.draw(st.lists(st.booleans(), min_size=num_blocks, max_size=num_blocks)) for _ in tables]
    for table, row in zip(tables, is_there, strict=True):
        for block, is_known in zip(table, row, strict=True):
            if not is_known:
                manager.pool.unpublish(block)

    def can_go_on(length: int) -> bool:
        firsts = [0, *(reach.first_visible(2 * length) // 2 for reach in reaches[1:])]
        return all(all(row[first:length]) for row, first in zip(is_there, firsts, strict=True))

    right = 2 * max(length for length in range(num_blocks + 1) if can_go_on(length))
    assert num_found(manager, range(2 * num_blocks + 1)) == right
    assert manager.pool.num_used == 0


def test_a_prefix_longer_than_the_window_is_shared_without_what_is_behind_it() -> None:
    manager = grouped_manager()
    manager.free(computed(manager, range(33)))
    sequence = make_request(range(33)).sequences[0]
    assert manager.admit(sequence)
    assert sequence.num_computed_tokens == 32
    assert [table.num_dropped for table in sequence.tables] == [0, 6, 6]
    assert manager.pool.num_used == 9 + 3 + 3
    manager.free(sequence)


def test_a_failed_step_leaves_nothing_to_find_in_any_group() -> None:
    manager = grouped_manager()
    manager.begin_step()
    first = computed(manager, range(9))
    manager.begin_step()
    second = computed(manager, range(17))
    manager.unpublish_step()
    assert num_found(manager, range(17)) == 8
    manager.free(first)
    manager.free(second)
    assert manager.pool.num_cached == 3 * 2


def test_forks_part_in_every_group_where_they_write() -> None:
    manager = grouped_manager()
    parent, child = make_request(range(18), n=2).sequences
    assert manager.admit(parent)
    parent.num_computed_tokens = 18
    manager.fork(parent, child)
    copies = manager.allocate_slots(child, 1)
    assert copies is not None and len(copies) == 3
    assert manager.allocate_slots(parent, 1) == []
    manager.free(parent)
    manager.free(child)
    assert manager.pool.num_used == 0


def test_guesses_get_as_many_blocks_as_there_are_for_all_groups() -> None:
    manager = grouped_manager(num_blocks=5)
    sequence = computed(manager, range(3))
    assert manager.allocate_slots(sequence, 1) == []
    assert manager.allocate_drafts(sequence, 1, 4) == 0, "two free blocks are none for each of three groups"
    manager.trim(sequence)
    manager.free(sequence)
    assert manager.pool.num_used == 0


def test_swapping_moves_what_each_group_still_looks_at() -> None:
    manager = grouped_manager(num_blocks=20, num_swap_blocks=9, enable_prefix_caching=False)
    sequence = computed(manager, range(17))
    swaps = manager.begin_step()
    manager.preempt(sequence)
    assert (len(swaps.outs), manager.swap_pool.num_used, manager.pool.num_used) == (5 + 2 + 2, 9, 0)
    swaps = manager.begin_step()
    assert manager.admit(sequence)
    assert len(swaps.ins) == 9
    assert {copy.target for copy in swaps.ins} == set(sequence.held_blocks)
    assert sequence.num_computed_tokens == 17
    manager.end_step()
    manager.free(sequence)
    assert (manager.pool.num_used, manager.swap_pool.num_used) == (0, 0)
