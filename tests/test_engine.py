"""A whole engine on fakes: crowding, failures and aborts must not show in anybody else's output."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, multiple, rule

from helpers import (
    StepFailure,
    byte_level_tokenizer,
    is_idle,
    logprob_of,
    make_engine,
    make_request,
    text_decoder,
    wait_until,
)
from helpers_crowd import LAYOUTS, CrowdedMachine
from paged_backend import EngineError, RepetitionDetection, RequestTimeoutError
from paged_backend.engine.kv_layout import Reach
from paged_backend.engine.request import Request

MAX_LEN = 20
PREFIXES = ([1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4, 9, 9, 9, 9], [7] * 8)


@st.composite
def workloads(draw: st.DrawFn) -> dict[str, Any]:
    """Options of a request that often shares a prefix with others."""
    prefix = draw(st.sampled_from(PREFIXES))[: draw(st.integers(0, 8))]
    prompt = [*prefix, *draw(st.lists(st.integers(0, 2), min_size=1, max_size=4))]
    return {
        "prompt": prompt,
        "n": draw(st.sampled_from([1, 1, 1, 2, 3])),
        "max_tokens": draw(st.integers(0, 8)),
        "priority": draw(st.integers(0, 2)),
        "cache_salt": draw(st.sampled_from([None, None, "salt"])),
        "seed": draw(st.integers(0, 3)),
        "logprobs": draw(st.sampled_from([None, 0])),
        "prompt_logprobs": draw(st.sampled_from([None, None, 0])),
        "prompt_logprobs_start": draw(st.integers(1, len(prompt))),
    }


class CrowdedEngine(CrowdedMachine):
    """Requests come, are aborted and fail in a cache this small; what is left gets what it gets in a roomy engine."""

    requests = CrowdedMachine.requests

    @initialize(
        reaches=st.sampled_from(LAYOUTS),
        room=st.sampled_from([(0, 1), (4, 1), (0, 2), (3, 2), (0, 4), (2, 4)]),
        max_num_batched_tokens=st.integers(1, 24),
        max_num_seqs=st.integers(1, 6),
        enable_prefix_caching=st.sampled_from([True, True, True, False]),
        num_swap_blocks=st.sampled_from([0, 3, 8, 100]),
    )
    def make(self, reaches: tuple[Reach, ...], room: tuple[int, int], **options: Any) -> None:
        self.crowd(reaches, *room, max_model_len=MAX_LEN, **options)

    @rule(target=requests, workload=workloads(), num_copies=st.integers(1, 3))
    def add(self, workload: dict[str, Any], num_copies: int) -> Any:
        return multiple(*self.submit(lambda: make_request(**workload), num_copies))

    def check(self, request_id: str, make: Callable[[], Request]) -> None:
        result = self.engine.result(request_id)
        expected = make_engine(max_model_len=MAX_LEN).run(make())[0]
        if result.error is None and {output.finish_reason for output in result.outputs} == {"length"}:
            assert result == expected
            return
        if result.error is None:
            assert request_id in self.aborted
            assert all(output.finish_reason in ("abort", "length") for output in result.outputs)
        else:
            assert isinstance(result.error.__cause__, StepFailure), result.error
        for output, whole in zip(result.outputs, expected.outputs, strict=True):
            assert output.token_ids == whole.token_ids[: len(output.token_ids)]


TestCrowdedEngine = CrowdedEngine.TestCase
TestCrowdedEngine.settings = settings(stateful_step_count=20)


@pytest.mark.parametrize("num_blocks, num_prompt, max_tokens", [(20, 8, 24), (8, 8, 24), (11, 3, 40)])
def test_preemption_changes_nothing_that_a_reader_sees(num_blocks: int, num_prompt: int, max_tokens: int) -> None:
    def requests() -> list[Request]:
        prompts = [range(10 * index, 10 * index + num_prompt) for index in range(4)]
        return [make_request(prompt, max_tokens=max_tokens, logprobs=1, ignore_eos=True) for prompt in prompts]

    crowded, roomy = make_engine(num_blocks=num_blocks, block_size=4), make_engine(num_blocks=500, block_size=4)
    results = crowded.run(*requests())

    assert results == roomy.run(*requests())
    assert [(len(r.token_ids), len(r.outputs[0].logprobs or ())) for r in results] == [(max_tokens, max_tokens)] * 4
    assert crowded.engine.stats().num_preemptions > 1
    assert is_idle(crowded.engine.stats())


def test_a_request_that_outgrows_the_cache_ends_with_length_and_the_next_one_runs() -> None:
    engine = make_engine(num_blocks=4, block_size=4, max_model_len=1000)
    greedy, short = make_request(range(10), max_tokens=500), make_request(range(50, 53), max_tokens=2)
    results = engine.run(greedy, short)

    assert [(result.finish_reason, len(result.token_ids)) for result in results] == [("length", 6), ("length", 2)]


def test_finished_requests_keep_no_blocks_whatever_ended_them() -> None:
    engine = make_engine(text_decoder(byte_level_tokenizer()), num_blocks=32, block_size=4)
    for number in range(200):
        prompt = range(1000 * number, 1000 * number + 40)
        if number % 3 == 0:
            result = engine.run(make_request(prompt, stop=["b"], extra_args={"forced": list(b"aaaba")}))[0]
            assert (result.text, result.stop_reason) == ("aaa", "b")
        elif number % 3 == 1:
            engine.run(make_request(prompt, eos_token_ids=frozenset({0}), extra_args={"forced": [5, 5, 5, 5, 0]}))
        else:
            request = make_request(prompt)
            engine.add(request)
            engine.step()
            engine.abort(request.request_id)
        assert is_idle(engine.engine.stats())

    assert engine.engine.stats().num_evictions > 0
    assert engine.engine.stats().finished == {"stop": 134, "abort": 66}


def test_aborting_is_fine_before_the_first_step_in_the_last_and_afterwards() -> None:
    engine = make_engine(max_num_seqs=1)
    running, second, third = (make_request(range(10 * i, 10 * i + 5), name) for i, name in enumerate("abc"))
    engine.add(running, second, third)
    engine.step()

    for request_id in ("c", "b", "unknown", "a", "a", "b"):
        engine.abort(request_id)

    assert [engine.result(name).finish_reason for name in "abc"] == ["abort"] * 3
    assert [len(engine.result(name).token_ids) for name in "abc"] == [1, 0, 0]
    assert is_idle(engine.engine.stats())
    assert engine.run(make_request(range(3), "a"))[0].finish_reason == "length", "ended ids can be used again"


def test_a_failing_step_fails_those_in_it_and_the_others_go_on() -> None:
    engine = make_engine(max_num_seqs=2)
    requests = [make_request(range(10 * i, 10 * i + 5)) for i in range(4)]
    engine.add(*requests)
    engine.step()
    engine.failing_step()
    engine.run()

    results = [engine.result(request.request_id) for request in requests]
    assert [type(result.error) for result in results] == [EngineError, EngineError, type(None), type(None)]
    assert results[0].error is not results[1].error, "errors are raised in different threads"
    assert "on purpose" in str(results[0].error)
    assert engine.engine.stats().failed == {"EngineError": 2}
    assert is_idle(engine.engine.stats())


@pytest.mark.parametrize("final_only", [True, False])
def test_an_output_that_cannot_be_decoded_fails_its_request_alone(final_only: bool) -> None:
    errors = [ValueError("no such token")]

    def decode(token_ids: list[int]) -> str:
        if 13 in token_ids and errors:
            raise errors.pop()
        return "x" * len(token_ids)

    engine = make_engine(text_decoder(byte_level_tokenizer())._replace(without_special=decode))
    broken = make_request(max_tokens=5, n=3, extra_args={"forced": [1, 2, 13, 4, 5]}, final_only=final_only)
    fine = make_request(max_tokens=5, extra_args={"forced": [1, 2, 3, 4, 5]})
    results = engine.run(broken, fine)

    assert [type(result.error) for result in results] == [EngineError, type(None)]
    assert "no such token" in str(results[0].error)
    assert results[1].text == "xxxxx"
    assert is_idle(engine.engine.stats())


@pytest.mark.parametrize("n", [1, 3])
def test_no_tokens_asked_for_is_an_answer_too(n: int) -> None:
    result = make_engine(max_num_batched_tokens=4).run(make_request(range(10), max_tokens=0, n=n, prompt_logprobs=0))[0]

    assert [(output.token_ids, output.text, output.finish_reason) for output in result.outputs] == [
        ([], "", "length")
    ] * n
    assert len(result.prompt_logprobs or ()) == 10


@pytest.mark.parametrize("num_tokens", [1, 2, 4, 5, 9])
@pytest.mark.parametrize("max_num_batched_tokens", [1, 4, 5, 64])
def test_prompt_logprobs_are_whole_in_chunks_and_with_the_prompt_in_the_cache(
    num_tokens: int, max_num_batched_tokens: int
) -> None:
    prompt = list(range(num_tokens))
    expected = [None, *({token: (*logprob_of(prompt[:token], token), None)} for token in prompt[1:])]
    engine = make_engine(block_size=4, max_num_batched_tokens=max_num_batched_tokens)
    engine.run(make_request(prompt))
    results = engine.run(make_request(prompt, prompt_logprobs=0, n=2), make_request(range(50, 60)))

    assert results[0].prompt_logprobs == expected
    assert results[1].prompt_logprobs is None


def test_samples_differ_and_their_set_comes_again_with_the_seed() -> None:
    def samples(**options: Any) -> list[list[int]]:
        return [output.token_ids for output in make_engine().run(make_request(n=4, **options))[0].outputs]

    seeded = samples(seed=0)
    assert len(set(map(tuple, seeded))) == 4
    assert samples(seed=0) == seeded
    assert len(set(map(tuple, samples(temperature=0)))) == 1


def test_the_prompt_of_many_samples_is_computed_once() -> None:
    engine = make_engine()
    engine.run(make_request(range(20), n=4, max_tokens=1))

    assert engine.engine.stats().num_computed_tokens == 20


END, STOP, OTHER = 90, 91, 5


@pytest.mark.parametrize(
    "forced, options, expected",
    [
        ([OTHER, END], {}, ("stop", None)),
        ([OTHER, END + 2], {}, ("stop", None)),
        ([OTHER, STOP], {}, ("stop", STOP)),
        ([OTHER, END], {"stop_token_ids": [STOP, END]}, ("stop", END)),
        ([OTHER, END, STOP], {"ignore_eos": True}, ("stop", STOP)),
        ([OTHER, END, OTHER, OTHER], {"ignore_eos": True, "max_tokens": 4}, ("length", None)),
        ([OTHER, OTHER], {"max_tokens": 2}, ("length", None)),
        ([OTHER, END], {"max_tokens": 2}, ("stop", None)),
        ([END, STOP, OTHER, END], {"min_tokens": 3}, ("stop", None)),
        ([OTHER, OTHER, OTHER], {"min_tokens": 3, "max_tokens": 3}, ("length", None)),
        ([1, 2, 3, 2, 3], {"repetition_detection": RepetitionDetection(max_pattern_size=3)}, ("repetition", None)),
        ([2] * 3, {"repetition_detection": RepetitionDetection(max_pattern_size=9, min_count=3)}, ("repetition", None)),
    ],
)  # fmt: skip
def test_a_sequence_ends_for_the_right_reason(forced: list[int], options: dict[str, Any], expected: Any) -> None:
    options = {"stop_token_ids": [STOP], "eos_token_ids": frozenset({END, END + 2})} | options
    # A prompt that repeats itself, and ends in what would end an output, ends nothing.
    request = make_request([2, 2, 2, END, STOP], extra_args={"forced": [*forced, *[OTHER] * 20]}, **options)
    result = make_engine().run(request)[0]

    assert result.token_ids == forced
    assert (result.finish_reason, result.stop_reason) == expected


@pytest.mark.parametrize("final_only", [True, False])
def test_end_tokens_are_counted_but_not_written(final_only: bool) -> None:
    engine = make_engine(text_decoder(byte_level_tokenizer()))

    def text_of(**options: Any) -> str:
        forced = {"forced": list(b"ok\n!")}
        return engine.run(make_request(extra_args=forced, final_only=final_only, **options))[0].text

    assert text_of(eos_token_ids=frozenset(b"\n")) == "ok"
    assert text_of(stop_token_ids=list(b"\n")) == "ok"
    assert text_of(stop_token_ids=list(b"\n"), include_stop_str_in_output=True) == "ok\n"
    assert text_of(eos_token_ids=frozenset(b"\n"), include_stop_str_in_output=True) == "ok"
    assert text_of(eos_token_ids=frozenset(b"\n"), ignore_eos=True, max_tokens=3) == "ok\n"
    assert text_of(eos_token_ids=frozenset(b"\n"), stop=["zzz"]) == "ok", (
        "a stop string does not switch the end token off"
    )
    assert text_of(eos_token_ids=frozenset(b"\n"), detokenize=False) == ""


@pytest.mark.parametrize("final_only", [True, False])
def test_a_stop_string_ends_the_text_but_keeps_token_ids_and_logprobs(final_only: bool) -> None:
    engine = make_engine(text_decoder(byte_level_tokenizer("stop it", " Paris")))
    forced = {"forced": [ord("a"), 257, 256, ord("z")]}
    request = make_request(extra_args=forced, stop=["stop", "t"], logprobs=0, final_only=final_only, max_tokens=3)
    result = engine.run(request)[0]

    assert (result.text, result.finish_reason, result.stop_reason) == ("a Pariss", "stop", "t")
    assert result.token_ids == [ord("a"), 257, 256]
    assert [list(entry) for entry in result.outputs[0].logprobs or ()] == [[ord("a")], [257], [256]]


def test_each_streamed_output_holds_as_many_tokens_as_asked_for() -> None:
    engine = make_engine()
    request = make_request(stream_interval=3, max_tokens=8)
    engine.run(request)

    sizes = [len(output.token_ids) for output in engine.news[request.request_id] if not isinstance(output, Exception)]
    assert sizes == [3, 3, 2]


def test_a_request_past_its_deadline_ends_with_an_error_that_says_so() -> None:
    engine = make_engine()
    late, other = make_request(deadline=time.monotonic() - 1), make_request()
    results = engine.run(late, other)

    assert isinstance(results[0].error, RequestTimeoutError)
    assert results[1].finish_reason == "length"
    assert is_idle(engine.engine.stats())


def test_deadlines_of_finished_requests_hit_nobody() -> None:
    engine = make_engine()
    deadline = time.monotonic() + 0.01
    engine.run(make_request(range(3), "name", deadline=deadline, max_tokens=1))
    wait_until(lambda: time.monotonic() > deadline)

    assert engine.run(make_request(range(3), "name", max_tokens=1))[0].finish_reason == "length"
