"""Who gets how many tokens in a step, who has to make room, and what is left after an end."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from helpers import check_blocks, make_request, make_scheduler
from paged_backend.engine import request as engine_request
from paged_backend.engine.request import FinishReason, Request, Status
from paged_backend.engine.scheduler import Scheduler, SchedulerOutput


def shares(output: SchedulerOutput) -> dict[str, int]:
    """Who computes how many tokens in the step."""
    return {item.sequence.request.request_id: item.num_tokens for item in output.scheduled}


def run_step(scheduler: Scheduler, token_id: int = 0) -> dict[str, int]:
    """One step in which everybody who gets a token gets `token_id`; who computed how many tokens."""
    output = scheduler.schedule()
    for sequence, _ in scheduler.advance(output):
        scheduler.update(sequence, token_id)
    check_blocks(scheduler)
    return shares(output)


def add(scheduler: Scheduler, *requests: Request) -> None:
    for request in requests:
        scheduler.add_request(request)


def run_to_end(scheduler: Scheduler, max_steps: int = 2000) -> list[dict[str, int]]:
    steps = []
    while scheduler.has_work:
        steps.append(run_step(scheduler))
        assert len(steps) < max_steps, "no end in sight"
    return steps


def ids(sequences: list[engine_request.Sequence]) -> list[str]:
    return [sequence.request.request_id for sequence in sequences]


def test_a_step_fills_its_budget_with_decodes_first_and_then_a_part_of_a_prompt() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=8)
    add(scheduler, make_request(range(3), "old"))
    assert run_step(scheduler) == {"old": 3}
    add(scheduler, make_request(range(100, 112), "long"), make_request(range(200, 205), "next"))

    assert run_step(scheduler) == {"old": 1, "long": 7}
    assert run_step(scheduler) == {"old": 1, "long": 5, "next": 2}
    assert run_step(scheduler) == {"old": 1, "long": 1, "next": 3}


def test_only_the_last_part_of_a_prompt_yields_a_token() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=4)
    request = make_request(range(10))
    add(scheduler, request)

    num_outputs = []
    for _ in range(4):
        run_step(scheduler)
        num_outputs.append(request.sequences[0].num_output_tokens)

    assert num_outputs == [0, 0, 1, 2]


def test_a_prompt_waits_until_the_whole_of_it_fits() -> None:
    scheduler = make_scheduler(num_blocks=6, block_size=2, max_num_batched_tokens=4)
    add(scheduler, make_request(range(6), "first", max_tokens=2), make_request(range(50, 58), "second", max_tokens=1))
    steps = run_to_end(scheduler)

    assert all("second" not in step for step in steps if "first" in step)
    assert [step["second"] for step in steps if "second" in step] == [4, 4]
    assert scheduler.num_preemptions == 0


def test_requests_that_arrive_together_compute_a_shared_prefix_once() -> None:
    scheduler = make_scheduler(block_size=4, max_num_batched_tokens=64)
    add(
        scheduler,
        make_request([*range(9), 1], "first"),
        make_request([*range(9), 2], "second"),
        make_request(range(9), "third"),
    )

    assert run_step(scheduler) == {"first": 10, "second": 2, "third": 1}


def test_a_prefix_that_takes_several_steps_is_computed_once() -> None:
    scheduler = make_scheduler(block_size=4, max_num_batched_tokens=6)
    add(scheduler, make_request(range(17), "first", max_tokens=1), make_request(range(17), "second", max_tokens=1))
    steps = run_to_end(scheduler)

    assert sum(step.get("first", 0) for step in steps) == 17
    assert sum(step.get("second", 0) for step in steps) == 1


def test_after_a_failed_step_nobody_finds_what_it_was_to_compute() -> None:
    scheduler = make_scheduler(block_size=4)
    failed = make_request(range(9), "failed")
    add(scheduler, failed)
    scheduler.schedule()
    scheduler.kv_cache_manager.unpublish_step()
    scheduler.finish_all(failed.sequences, FinishReason.ERROR)
    add(scheduler, make_request(range(9), "next"))

    assert run_step(scheduler) == {"next": 9}


def test_the_newest_of_the_lowest_priority_makes_room() -> None:
    scheduler = make_scheduler(num_blocks=8, block_size=2, max_model_len=16)
    names = ["low, old", "low, new", "high, old", "high, new"]
    for index, name in enumerate(names):
        priority = 1 if name.startswith("low") else 0
        add(scheduler, make_request(range(10 * index, 10 * index + 3), name, priority=priority, max_tokens=12))
    run_step(scheduler)
    assert len(scheduler.running) == 4

    order = []
    while len(scheduler.running) > 1:
        before = ids(scheduler.running)
        run_step(scheduler)
        order += [name for name in reversed(before) if name not in ids(scheduler.running)]

    assert order == ["low, new", "low, old", "high, new"]
    assert ids(scheduler.waiting) == ["high, new", "low, old", "low, new"], "served again in the right order"


def test_waiting_requests_start_by_priority_and_then_by_arrival() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    for name, priority in (("a", 0), ("b", 1), ("c", -1), ("d", 0)):
        add(scheduler, make_request(range(3), name, priority=priority, max_tokens=1))

    assert [next(iter(step)) for step in run_to_end(scheduler)] == ["c", "a", "d", "b"]


def test_a_preempted_sequence_keeps_its_tokens_and_computes_them_again() -> None:
    scheduler = make_scheduler(num_blocks=4, block_size=2, max_model_len=8, enable_prefix_caching=False)
    first, second = make_request(range(3), "first", max_tokens=4), make_request(range(3), "second", max_tokens=4)
    add(scheduler, first, second)
    while not scheduler.num_preemptions:
        run_step(scheduler, token_id=5)
    tokens = list(second.sequences[0].token_ids)
    assert (tokens[:3], second.sequences[0].status) == ([0, 1, 2], Status.WAITING)
    while first.sequences[0].status is not Status.FINISHED:
        assert list(run_step(scheduler, token_id=5)) == ["first"]

    assert run_step(scheduler, token_id=6) == {"second": len(tokens)}
    assert second.sequences[0].token_ids == [*tokens, 6]
    assert second.metrics.num_preemptions == 1


@given(
    num_blocks=st.integers(3, 8),
    max_num_batched_tokens=st.integers(1, 12),
    max_num_seqs=st.integers(1, 6),
    requests=st.lists(
        st.tuples(st.integers(1, 6), st.integers(1, 6), st.integers(1, 3), st.integers(0, 2)), min_size=1, max_size=6
    ),
)
def test_every_step_advances_somebody_within_the_limits_and_all_come_to_an_end(
    num_blocks: int, max_num_batched_tokens: int, max_num_seqs: int, requests: list[tuple[int, int, int, int]]
) -> None:
    scheduler = make_scheduler(
        num_blocks=num_blocks,
        block_size=4,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=12,
    )
    made = [
        make_request(range(num_prompt), max_tokens=num_output, n=n, priority=priority)
        for num_prompt, num_output, n, priority in requests
    ]
    add(scheduler, *made)

    for _ in range(1000):
        if not scheduler.has_work:
            break
        output = scheduler.schedule()
        assert 1 <= output.num_tokens <= max_num_batched_tokens
        assert output.num_tokens == sum(item.num_tokens for item in output.scheduled)
        assert len(scheduler.running) <= max_num_seqs
        for sequence, _ in scheduler.advance(output):
            scheduler.update(sequence, 0)
        check_blocks(scheduler)

    lengths = [[sequence.num_output_tokens for sequence in request.sequences] for request in made]
    assert lengths == [[request.max_tokens] * request.params.n for request in made]
    assert scheduler.kv_cache_manager.pool.num_free == num_blocks


def test_samples_share_the_prompt_and_part_where_they_write() -> None:
    scheduler = make_scheduler(block_size=4)
    request = make_request(range(6), n=3)
    add(scheduler, request)

    output = scheduler.schedule()
    sampled = scheduler.advance(output)
    for index, (sequence, row) in enumerate(sampled):
        assert row == 0, "all of them draw from the logits of the one prompt"
        scheduler.update(sequence, 100 + index)
    assert scheduler.kv_cache_manager.pool.num_used == 2
    output = scheduler.schedule()

    assert [item.num_tokens for item in output.scheduled] == [1, 1, 1]
    assert len(output.copies) == 2
    assert scheduler.kv_cache_manager.pool.num_used == 4


def test_samples_beyond_the_largest_batch_wait_for_their_turn() -> None:
    scheduler = make_scheduler(max_num_seqs=2)
    request = make_request(range(6), n=5, max_tokens=3)
    add(scheduler, request)
    steps = run_to_end(scheduler)

    assert [sequence.num_output_tokens for sequence in request.sequences] == [3] * 5
    assert len(steps) == 3 + 2 + 2


def test_finishing_twice_changes_nothing() -> None:
    scheduler = make_scheduler()
    request = make_request(range(6))
    add(scheduler, request)
    run_step(scheduler)
    scheduler.finish_all(request.sequences, FinishReason.ABORT)
    scheduler.finish_all(request.sequences, FinishReason.ERROR)

    assert request.sequences[0].finish_reason is FinishReason.ABORT
    assert not scheduler.has_work
    check_blocks(scheduler)


def test_whoever_ends_while_waiting_running_or_not_yet_forked_leaves_nothing_behind() -> None:
    scheduler = make_scheduler(max_num_seqs=2, max_num_batched_tokens=4)
    unforked, running, waiting = (make_request(range(10 * i, 10 * i + 6), str(i), n=3) for i in range(3))
    add(scheduler, unforked)
    run_step(scheduler)
    add(scheduler, running, waiting)
    run_step(scheduler)
    for request in (waiting, running, unforked):
        scheduler.finish_all(request.sequences, FinishReason.ABORT)
        check_blocks(scheduler)

    assert not scheduler.has_work
    assert scheduler.kv_cache_manager.pool.num_used == 0
    assert all(
        sequence.status is Status.FINISHED for request in (unforked, running, waiting) for sequence in request.sequences
    )


def test_only_the_logits_that_are_needed_are_asked_for() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=6)
    add(scheduler, make_request(range(10), "plain"), make_request(range(50, 54), "all", prompt_logprobs=0))

    steps = []
    for _ in range(3):
        output = scheduler.schedule()
        steps.append([(item.num_tokens, item.num_logits) for item in output.scheduled])
        for sequence, _ in scheduler.advance(output):
            scheduler.update(sequence, 0)

    assert steps == [[(6, 0)], [(4, 1), (2, 2)], [(1, 1), (2, 2)]]
