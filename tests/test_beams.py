"""Beams on a whole engine of fakes: crowding, failures and aborts must not show, and nobody may wait for ever."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from helpers import (
    EngineUnderTest,
    FakeRunner,
    Result,
    StepFailure,
    best_of,
    in_threads,
    is_idle,
    make_engine,
    make_llm,
    make_request,
    wait_until,
)
from helpers_crowd import LAYOUTS, CrowdedMachine
from paged_backend import BeamSearchParams, EngineDeadError, EngineError, InvalidRequestError, RequestTimeoutError
from paged_backend.engine.beam_search import BeamSearch, Candidate
from paged_backend.engine.kv_layout import Reach
from paged_backend.engine.request import Request

MAX_LEN = 16
PREFIXES = ([1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 9, 9], [7] * 6)


def make_search(prompt: list[int], request_id: str | None = None, *, width: int = 3, **options: Any) -> Request:
    """A request for beams; options are those of `BeamSearchParams`, and of requests."""
    of_request = {name: options.pop(name) for name in ("priority", "deadline", "cache_salt") if name in options}
    end_ids = options.pop("end_ids", ())
    params = BeamSearchParams(**{"beam_width": width, "max_tokens": 6} | options)
    sampling = params.sampling_params()
    return make_request(
        prompt,
        request_id,
        beam_params=params,
        eos_token_ids=frozenset(end_ids),
        n=sampling.n,
        max_tokens=sampling.max_tokens,
        **of_request,
    )


@st.composite
def searches(draw: st.DrawFn) -> dict[str, Any]:
    prefix = draw(st.sampled_from(PREFIXES))[: draw(st.integers(0, 6))]
    return {
        "prompt": [*prefix, *draw(st.lists(st.integers(0, 2), min_size=1, max_size=3))],
        "width": draw(st.integers(1, 5)),
        "max_tokens": draw(st.integers(1, 7)),
        "priority": draw(st.integers(0, 2)),
        "end_ids": draw(st.sampled_from([(), (3,), (0, 1, 2, 3)])),
        "length_penalty": draw(st.sampled_from([0.0, 1.0, -1.0])),
        "early_stopping": draw(st.sampled_from([False, True, "never"])),
        "cache_salt": draw(st.sampled_from([None, None, "salt"])),
    }


@st.composite
def samplings(draw: st.DrawFn) -> dict[str, Any]:
    return {
        "prompt": [*draw(st.sampled_from(PREFIXES))[: draw(st.integers(0, 6))], draw(st.integers(0, 2))],
        "n": draw(st.integers(1, 3)),
        "max_tokens": draw(st.integers(1, 8)),
        "priority": draw(st.integers(0, 2)),
    }


class CrowdedBeams(CrowdedMachine):
    """Searches and samples come, are aborted and fail in a cache that holds one sequence; who is left gets what it gets
    in a roomy engine."""

    requests = CrowdedMachine.requests

    @initialize(
        reaches=st.sampled_from(LAYOUTS),
        room=st.sampled_from([(0, 1), (4, 1), (0, 2), (3, 2), (0, 4), (2, 4)]),
        max_num_batched_tokens=st.integers(1, 24),
        max_num_seqs=st.integers(1, 6),
        enable_prefix_caching=st.sampled_from([True, True, False]),
        num_swap_blocks=st.sampled_from([0, 4, 100]),
    )
    def make(self, reaches: tuple[Reach, ...], room: tuple[int, int], **options: Any) -> None:
        self.crowd(reaches, *room, max_model_len=MAX_LEN, **options)

    @rule(target=requests, options=searches())
    def search(self, options: dict[str, Any]) -> str:
        return self.submit(lambda: make_search(**options))[0]

    @rule(target=requests, options=samplings())
    def sample(self, options: dict[str, Any]) -> str:
        return self.submit(lambda: make_request(**options))[0]

    def check(self, request_id: str, make: Callable[[], Request]) -> None:
        result = self.engine.result(request_id)
        if result.error is not None:
            assert isinstance(result.error.__cause__, StepFailure), result.error
        elif any(output.finish_reason == "abort" for output in result.outputs):
            assert request_id in self.aborted
        elif request_id not in self.aborted:
            assert result == make_engine(max_model_len=MAX_LEN, num_blocks=256).run(make())[0]


TestCrowdedBeams = CrowdedBeams.TestCase
TestCrowdedBeams.settings = settings(stateful_step_count=20)


def every_output(prompt: list[int], max_tokens: int, end_ids: tuple[int, ...]) -> list[tuple[float, list[int]]]:
    """Log-probability and tokens of all that the fake model can generate, best first."""
    growing, ended = [(0.0, list[int]())], []
    while growing:
        logprob, tokens = growing.pop()
        if tokens and (len(tokens) == max_tokens or tokens[-1] in end_ids):
            ended.append((logprob, tokens))
        else:
            growing += [(logprob + value, [*tokens, token]) for token, value in best_of([*prompt, *tokens])]
    return sorted(ended, key=lambda item: -item[0])


@given(prompt=st.lists(st.integers(0, 50), min_size=1, max_size=5), end_ids=st.sampled_from([(), (3,), (0, 4)]))
@settings(max_examples=10)
def test_beams_as_wide_as_all_there_is_find_the_best_of_all(prompt: list[int], end_ids: tuple[int, ...]) -> None:
    right = every_output(prompt, 3, end_ids)
    request = make_search(prompt, width=120, n=5, max_tokens=3, length_penalty=0.0, end_ids=end_ids)
    outputs = make_engine(num_blocks=400, max_num_seqs=200).run(request)[0].outputs
    assert [output.score for output in outputs] == pytest.approx([logprob for logprob, _ in right[:5]])


def test_beams_share_the_blocks_of_what_they_have_in_common() -> None:
    engine = make_engine(block_size=4)
    request = make_search(list(range(20)), width=5)
    engine.add(request)
    for _ in range(3):
        engine.step()
    num_used = engine.engine.stats().num_blocks - engine.engine.stats().num_free_blocks
    assert len(request.sequences) == 5
    assert num_used <= 5 + 5  # the prompt's blocks once, and one of its own for each beam


def test_the_prompt_is_computed_once_and_then_a_token_per_beam_and_step() -> None:
    engine = make_engine()
    engine.run(make_search(list(range(20)), width=4, max_tokens=6))
    assert engine.engine.stats().num_computed_tokens == 20 + 4 * 5


def test_searches_that_hold_all_blocks_between_them_do_not_wait_for_each_other_for_ever() -> None:
    for max_num_seqs in (1, 2, 3, 16):
        engine = make_engine(num_blocks=6, block_size=4, max_num_seqs=max_num_seqs, max_model_len=24)
        results = engine.run(*(make_search([10 * index] * 7, width=4, max_tokens=8) for index in range(4)))
        assert [[len(output.token_ids) for output in result.outputs] for result in results] == [[8] * 4] * 4
        assert is_idle(engine.engine.stats())


def test_constraints_that_leave_fewer_outputs_than_asked_for_give_fewer() -> None:
    search = BeamSearch(BeamSearchParams(beam_width=4, max_tokens=2), max_tokens=2, end_token_ids=frozenset())
    only: list[list[Candidate]] = [[(7, -1.0)]]
    assert [item.token_id for item in search.select([[]], only)] == [7]
    assert search.select([[7]], only) == []
    assert [(item.token_ids, item.logprob, item.score) for item in search.hypotheses] == [([7, 7], -2.0, -1.0)]


# --- ends ---


def outputs_after(engine: EngineUnderTest, request: Request) -> Result:
    assert is_idle(engine.engine.stats())
    return engine.result(request.request_id)


def test_an_aborted_search_gives_the_best_it_has() -> None:
    engine, request = make_engine(), make_search([1, 2, 3], width=3, max_tokens=9)
    engine.add(request)
    for _ in range(4):
        engine.step()
    engine.abort(request.request_id)
    outputs = outputs_after(engine, request).outputs
    assert [(len(output.token_ids), output.finish_reason) for output in outputs] == [(4, "abort")] * 3
    assert [output.score for output in outputs] == sorted((output.score for output in outputs), reverse=True)  # type: ignore[type-var]


def test_a_search_aborted_before_its_first_step_has_no_tokens() -> None:
    engine, request = make_engine(), make_search([1, 2, 3], width=3)
    engine.add(request)
    engine.abort(request.request_id)
    best = outputs_after(engine, request).outputs[0]
    assert (best.token_ids, best.finish_reason) == ([], "abort")


def test_a_failing_step_ends_its_searches_with_the_parked_beams() -> None:
    engine, request = make_engine(max_num_batched_tokens=2), make_search([1, 2], width=3)
    engine.add(request)
    engine.step()
    engine.step()  # two of three beams: one step short
    engine.failing_step()
    assert isinstance(outputs_after(engine, request).error, EngineError)


def test_a_search_that_is_late_times_out() -> None:
    engine, request = make_engine(), make_search([1, 2], deadline=time.monotonic() + 0.0)
    engine.add(request)
    engine.step()
    assert isinstance(outputs_after(engine, request).error, RequestTimeoutError)


def test_closing_ends_a_search() -> None:
    def search() -> None:
        with pytest.raises(EngineDeadError):
            llm.beam_search([1, 2, 3], BeamSearchParams(beam_width=2, max_tokens=50_000))

    def close() -> None:
        wait_until(lambda: llm.stats().num_running == 2)
        llm.close()

    runner = FakeRunner(num_blocks=2**13, block_size=16)
    with make_llm(runner=runner, block_size=16, max_model_len=60_000) as llm:
        in_threads(search, close)


def test_fewer_outputs_reach_the_reader_as_they_are() -> None:
    """The fake model knows ten tokens, so that there are ten outputs of one token."""
    with make_llm() as llm:
        (result,) = llm.beam_search([1, 2, 3], BeamSearchParams(beam_width=12, max_tokens=1))
        assert len(result.outputs) == 10 and result.finished
        with pytest.raises(InvalidRequestError, match="beam_width=12 beams of 3 prompt tokens"):
            llm.beam_search([1, 2, 3], BeamSearchParams(beam_width=12, max_tokens=40))


def test_parked_beams_leave_their_places_to_those_who_wait() -> None:
    engine = make_engine(max_num_seqs=2, num_blocks=60)
    engine.add(make_request([9, 9, 9], "other", max_tokens=60, ignore_eos=True))
    search = make_search([1, 2, 3], width=2, max_tokens=3)
    engine.add(search)
    num_steps = 0
    while not search.is_finished:
        engine.step()
        num_steps += 1
    assert num_steps < 20
