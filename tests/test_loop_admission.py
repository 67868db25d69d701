"""Which requests an engine takes, under which ids and limits, and until when."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest

from helpers import WAIT_SECONDS, FakeRunner, is_idle, make_llm, wait_until
from helpers_loop import ENDLESS, Gate, params
from paged_backend import LLM, InvalidRequestError, OverloadedError, RequestTimeoutError, SamplingParams


@pytest.fixture
def runner() -> FakeRunner:
    """Holds requests that take longer than any test."""
    return FakeRunner(num_blocks=4096, block_size=16)


@pytest.fixture
def llm(runner: FakeRunner) -> Iterator[LLM]:
    with make_llm(runner=runner, block_size=16, max_model_len=60_000) as llm:
        yield llm


@pytest.fixture
def eager_threads() -> Iterator[None]:
    """A thread that is woken up runs at once."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


def test_a_full_queue_refuses_the_next_request_and_queues_no_part_of_a_list(runner: FakeRunner) -> None:
    gate = Gate(runner)
    with make_llm(runner=runner, block_size=16, max_num_queued_reqs=2) as llm:
        running = llm.submit([1], params())
        gate.wait_for_step()
        with pytest.raises(OverloadedError, match="max_num_queued_reqs=2"):
            llm.generate([[1], [2], [3]], params())
        queued = [llm.submit([1], params()) for _ in range(2)]
        with pytest.raises(OverloadedError):
            llm.submit([1], params())
        gate.open()
        for handle in [running, *queued]:
            handle.result(WAIT_SECONDS)

        assert len(llm.generate([[1], [2]], params())) == 2
        assert llm.stats().finished == {"length": 5}


def test_a_request_counts_in_the_queue_as_often_as_it_has_samples(runner: FakeRunner) -> None:
    gate = Gate(runner)
    with make_llm(runner=runner, block_size=16, max_num_queued_reqs=3) as llm:
        running = llm.submit([1], params())
        gate.wait_for_step()
        queued = llm.submit([1], params(n=2))
        with pytest.raises(OverloadedError, match="2 requests are queued and 2 more"):
            llm.submit([1], params(n=2))
        last = llm.submit([1], params())
        gate.open()
        assert [len(handle.result(WAIT_SECONDS).outputs) for handle in (running, queued, last)] == [1, 2, 1]


def test_a_request_id_in_use_is_refused(llm: LLM) -> None:
    stream = llm.stream([1, 2], ENDLESS, request_id="x")
    with pytest.raises(InvalidRequestError, match="'x'"):
        llm.submit([3, 4], params(), request_id="x")
    stream.close()
    llm.stats()

    assert llm.submit([3, 4], params(), request_id="x").result(WAIT_SECONDS).request_id == "x"


@pytest.mark.usefixtures("eager_threads")
def test_a_request_id_is_free_as_soon_as_the_end_of_its_request_was_read(runner: FakeRunner) -> None:
    gate = Gate(runner)
    with make_llm(runner=runner, block_size=16, max_num_batched_tokens=512) as llm:
        first = llm.submit([1], params(1))
        gate.wait_for_step()
        handle = llm.submit([1], params(1), request_id="x")
        others = [llm.submit([1], params(1)) for _ in range(250)]  # their ends are delivered after that of x
        gate.open()
        handle.result(WAIT_SECONDS)

        again = llm.submit([3, 4], params(1), request_id="x")
        assert all(one.result(WAIT_SECONDS).finished for one in [first, again, *others])


def test_dropping_an_ended_request_does_not_end_the_next_one_with_its_id(llm: LLM) -> None:
    unread = llm.submit([1, 2], params(1), request_id="x")
    wait_until(lambda: llm.stats().finished == {"length": 1})
    handle = llm.submit([3, 4], params(50), request_id="x")
    unread.abort()

    assert handle.result(WAIT_SECONDS).outputs[0].finish_reason == "length"


def test_a_refused_request_leaves_the_one_alone_whose_id_it_wanted() -> None:
    with make_llm() as llm:
        handle = llm.submit([1, 2, 3], params(max_tokens=200), request_id="x")
        with pytest.raises(InvalidRequestError, match="in use"):
            llm.submit([4, 5], params(), request_id="x")
        assert handle.result(timeout=WAIT_SECONDS).outputs[0].finish_reason == "length"


BAD_REQUESTS: dict[str, tuple[Any, SamplingParams]] = {
    "too long": (list(range(70)), params()),
    "empty": ([], params()),
    "id beyond the vocabulary": ([1, 10**6], params()),
    "negative id": ([1, -1], params()),
    "id that is no integer": ([1, 2.5], params()),
    "text without a tokenizer": ("text", params()),
    "stop without a tokenizer": ([1], params(stop="x")),
    "too many logprobs": ([1], params(logprobs=21)),
    "bias beyond the vocabulary": ([1], params(logit_bias={1000: 5.0})),
    "stop id beyond the vocabulary": ([1], params(stop_token_ids=[1000])),
    "more than there is room for": ([1], params(70, min_tokens=70)),
}


@pytest.mark.parametrize("bad", BAD_REQUESTS.values(), ids=BAD_REQUESTS.keys())
def test_one_bad_request_of_a_list_leaves_none_of_it_behind(bad: tuple[Any, SamplingParams]) -> None:
    with make_llm(max_model_len=64) as llm:
        with pytest.raises(InvalidRequestError):
            llm.generate([[1], [2], bad[0], [3]], [params(), params(), bad[1], params()])
        assert is_idle(llm.stats())
        assert llm.stats().num_steps == 0

        outputs = llm.generate([[5], [6]], params())
        assert [output.prompt_token_ids for output in outputs] == [[5], [6]]


@pytest.mark.parametrize("is_stream", [True, False])
@pytest.mark.parametrize("max_tokens", [10, None])
def test_prompt_and_output_together_stay_within_the_models_limit(is_stream: bool, max_tokens: int | None) -> None:
    def run(llm: LLM, num_prompt: int) -> tuple[int, str | None]:
        handle = llm.submit([1] * num_prompt, SamplingParams(max_tokens=max_tokens))
        if is_stream:
            return sum(output.num_output_tokens for output in handle), handle.result().outputs[0].finish_reason
        output = llm.generate([[1] * num_prompt], SamplingParams(max_tokens=max_tokens))[0]
        return output.num_output_tokens, output.outputs[0].finish_reason

    with make_llm(max_model_len=32) as llm:
        assert [run(llm, num_prompt) for num_prompt in (30, 31)] == [(2, "length"), (1, "length")]
        for num_prompt in (32, 33, 5000):
            with pytest.raises(InvalidRequestError, match="max_model_len=32"):
                run(llm, num_prompt)
        assert run(llm, 31) == (1, "length")


def test_a_request_that_can_never_fit_is_refused_with_its_numbers_and_stops_nobody() -> None:
    with make_llm(num_blocks=10, max_model_len=1000) as llm:
        for index in range(10):
            llm.generate([[index] * 6], params(2))
        with pytest.raises(InvalidRequestError, match=r"500 tokens .* holds 40"):
            llm.submit([1] * 500, params())
        grows, short = llm.generate([[1] * 35, [2, 3]], [params(100), params(2)])

    assert (grows.num_output_tokens, grows.outputs[0].finish_reason) == (5, "length")
    assert short.num_output_tokens == 2


def test_each_prompt_of_a_list_may_have_its_own_priority(runner: FakeRunner) -> None:
    with make_llm(runner=runner, block_size=16, max_num_seqs=1) as llm:
        outputs = llm.generate([[1], [2], [3]], params(), priority=[2, 0, 1])
        starts = [output.metrics.first_scheduled_time for output in outputs]

        assert sorted(starts) == [starts[1], starts[2], starts[0]]
        with pytest.raises(InvalidRequestError, match="2 priorities for 3 prompts"):
            llm.generate([[1], [2], [3]], params(), priority=[1, 2])


def test_a_request_ends_with_an_error_when_its_time_is_over(llm: LLM) -> None:
    with pytest.raises(RequestTimeoutError, match="timeout"):
        llm.generate([[1, 2]], ENDLESS, timeout=0.02)

    assert is_idle(llm.stats())
    assert llm.stats().failed == {"RequestTimeoutError": 1}


def test_not_waiting_any_longer_leaves_the_request_running(llm: LLM, runner: FakeRunner) -> None:
    gate = Gate(runner)
    handle = llm.submit([1, 2], params())
    with pytest.raises(TimeoutError):
        handle.result(timeout=0.01)
    gate.open()

    assert handle.result(WAIT_SECONDS).outputs[0].finish_reason == "length"
