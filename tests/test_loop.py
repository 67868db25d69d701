"""One engine for all threads and event loops: nobody waits for ever, and nothing is left behind."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import io
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers import WAIT_SECONDS, FakeRunner, StepFailure, in_threads, is_given_up, is_idle, make_llm, wait_until
from paged_backend import (
    LLM,
    AsyncStream,
    EngineDeadError,
    EngineError,
    InvalidRequestError,
    OverloadedError,
    RequestHandle,
    RequestOutputKind,
    RequestTimeoutError,
    SamplingParams,
)
from paged_backend.engine.scheduler import SchedulerOutput

ENDLESS = SamplingParams(max_tokens=None)


def params(max_tokens: int = 8, **options: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, **{"seed": 7} | options)


class Gate:
    """Holds the engine in its step until it is opened."""

    def __init__(self, runner: FakeRunner) -> None:
        self._is_held, self._is_open = threading.Event(), threading.Event()
        runner.on_step = self._hold

    def _hold(self, output: SchedulerOutput) -> None:
        self._is_held.set()
        assert self._is_open.wait(WAIT_SECONDS)

    def wait_for_step(self) -> None:
        assert self._is_held.wait(WAIT_SECONDS)

    def open(self) -> None:
        self._is_open.set()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


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


def engine_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "paged-backend engine"}


def run_script(script: str, seconds: float = 60.0) -> str:
    """What a Python script prints, in a process of its own that must end by itself."""
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    completed = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=seconds,
    )
    assert completed.returncode == 0, completed.stderr
    return completed.stdout


def test_every_call_from_any_thread_gets_its_own_results_in_order() -> None:
    calls = [
        [([thread, call, index], params(3 + (thread + call + index) % 7)) for index in range(3)]
        for thread in range(8)
        for call in range(5)
    ]

    def results(llm: LLM, call: list[Any]) -> list[list[int]]:
        prompts, all_params = zip(*call, strict=True)
        return [output.outputs[0].token_ids for output in llm.generate(list(prompts), list(all_params))]

    with make_llm() as alone:
        expected = [results(alone, call) for call in calls]
    with make_llm(num_blocks=24) as llm:
        in_thread = in_threads(
            *(
                lambda thread=thread: [results(llm, call) for call in calls[5 * thread : 5 * thread + 5]]
                for thread in range(8)
            )
        )
        assert is_idle(llm.stats())

    assert [result for thread in in_thread for result in thread] == expected


def test_requests_from_different_threads_share_steps(llm: LLM, runner: FakeRunner) -> None:
    gate = Gate(runner)
    first = llm.submit([1], params())
    gate.wait_for_step()
    handles = in_threads(*(lambda: llm.submit([1, 2, 3], params()) for _ in range(8)))
    gate.open()
    results = [handle.result(WAIT_SECONDS) for handle in [first, *handles]]

    assert llm.stats().largest_batch == 9
    assert llm.stats().num_steps < 20 < sum(result.num_output_tokens for result in results)


def test_one_engine_serves_any_number_of_event_loops_one_after_another(llm: LLM) -> None:
    expected = llm.generate([[1, 2, 3]], params())[0].outputs[0].token_ids

    async def one() -> list[int]:
        streamed = [
            token_id async for output in llm.astream([1, 2, 3], params()) for token_id in output.outputs[0].token_ids
        ]
        assert streamed == (await llm.agenerate([[1, 2, 3]], params()))[0].outputs[0].token_ids
        return streamed

    assert [asyncio.run(one()) for _ in range(3)] == [expected] * 3
    assert in_threads(*(lambda: asyncio.run(one()) for _ in range(4))) == [expected] * 4


def test_an_engine_made_in_an_event_loop_outlives_it() -> None:
    async def make() -> LLM:
        llm = make_llm()
        await llm.agenerate([[1, 2]], params())
        return llm

    with asyncio.run(make()) as llm:
        assert llm.generate([[1, 2]], params())[0].finished


async def test_other_tasks_run_while_one_waits(llm: LLM, runner: FakeRunner) -> None:
    gate = Gate(runner)
    task = asyncio.create_task(llm.agenerate([[1, 2]], params()))
    while not task.done():
        gate.open()  # never reached if the task blocked the event loop
        await asyncio.sleep(0)

    assert (await task)[0].finished


@pytest.mark.parametrize("is_stream", [True, False])
async def test_cancelling_a_task_frees_the_blocks_of_its_requests(llm: LLM, is_stream: bool) -> None:
    async def read() -> None:
        async for _ in llm.astream([1, 2], ENDLESS):
            pass

    work = read() if is_stream else llm.agenerate([[1, 2], [3, 4]], ENDLESS)
    task = asyncio.create_task(work)
    while not llm.stats().num_running:
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

    assert is_given_up(llm.stats())


def drop(stream: RequestHandle) -> None:
    """The test's own reference goes with it."""


def leave_with_block(stream: RequestHandle) -> None:
    with stream:
        next(stream)


def leave_with_error(stream: RequestHandle) -> None:
    with contextlib.suppress(ZeroDivisionError):
        for _ in stream:
            raise ZeroDivisionError


@pytest.mark.parametrize(
    "leave",
    [RequestHandle.close, RequestHandle.abort, drop, leave_with_block, leave_with_error],
    ids=lambda f: f.__name__,
)
def test_leaving_a_stream_frees_its_blocks_before_the_next_step(
    llm: LLM, leave: Callable[[RequestHandle], object]
) -> None:
    streams = [llm.stream([1, 2, 3], ENDLESS)]
    next(streams[0])
    leave(streams.pop())
    gc.collect()

    assert is_given_up(llm.stats())


async def test_closing_an_asynchronous_stream_frees_its_blocks_before_the_next_step(llm: LLM) -> None:
    async with llm.astream([1, 2, 3], ENDLESS) as stream:
        await anext(stream)
    assert is_given_up(llm.stats())

    async for _ in llm.astream([1, 2, 3], ENDLESS):
        break
    assert is_given_up(llm.stats())

    unread = llm.astream([1, 2, 3], ENDLESS)
    await unread.aclose()
    assert [output async for output in unread] == []


async def test_closing_a_stream_while_its_request_is_made_ends_the_request(llm: LLM) -> None:
    may_go_on = asyncio.Event()

    async def submit() -> RequestHandle:
        await may_go_on.wait()
        return llm.submit([1, 2, 3], ENDLESS)

    stream = AsyncStream(submit)
    reader = asyncio.create_task(anext(stream, None))
    await asyncio.sleep(0)
    await stream.aclose()
    may_go_on.set()
    await asyncio.wait_for(reader, WAIT_SECONDS)

    await asyncio.to_thread(wait_until, lambda: llm.stats().finished == {"abort": 1})


def test_a_closing_engine_says_so_at_once(llm: LLM, runner: FakeRunner) -> None:
    """Not only when the step that it is in is over."""
    gate = Gate(runner)
    unfinished = llm.submit([1, 2, 3], ENDLESS)
    gate.wait_for_step()
    closing = threading.Thread(target=llm.close)
    closing.start()
    wait_until(lambda: llm.is_closed)
    with pytest.raises(EngineDeadError, match="make a new LLM"):
        llm.submit([1, 2, 3], ENDLESS)
    gate.open()
    closing.join(WAIT_SECONDS)
    with pytest.raises(EngineDeadError):
        unfinished.result(WAIT_SECONDS)


def test_an_aborted_request_gives_its_reader_what_there_was(llm: LLM) -> None:
    handle = llm.submit([1, 2, 3], ENDLESS)
    first = next(handle)
    handle.abort()
    handle.abort()
    result = handle.result(WAIT_SECONDS)

    assert result.outputs[0].finish_reason == "abort"
    assert result.outputs[0].token_ids[: len(first.outputs[0].token_ids)] == first.outputs[0].token_ids


@pytest.fixture
def interrupted() -> Iterator[threading.Event]:
    """Set by the first SIGINT, which raises KeyboardInterrupt as ever; later ones are ignored."""
    event = threading.Event()

    def interrupt(*_: object) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        event.set()
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, interrupt)
    yield event
    signal.signal(signal.SIGINT, before)


def test_interrupting_a_call_aborts_its_requests(
    llm: LLM, runner: FakeRunner, interrupted: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    main, terminal = threading.main_thread().ident, Terminal()
    assert main is not None

    def interrupt(output: SchedulerOutput) -> None:
        # The progress bar is there, so the call waits. A signal that comes just before a wait does not end it.
        if terminal.getvalue() and not interrupted.is_set():
            signal.pthread_kill(main, signal.SIGINT)

    runner.on_step = interrupt
    monkeypatch.setattr(sys, "stderr", terminal)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[1, 2], [3, 4]], ENDLESS)

    assert is_idle(llm.stats())


def test_a_forked_child_is_told_so_at_once_and_the_parent_goes_on() -> None:
    printed = run_script(
        """
        import os, sys, threading
        from helpers import make_llm
        from paged_backend import EngineDeadError, SamplingParams

        llm = make_llm(num_blocks=1000, max_model_len=4000)
        stream = llm.stream([1, 2, 3], SamplingParams(max_tokens=None))
        next(stream)
        is_held, is_forked = threading.Event(), threading.Event()

        class SlowId(str):
            def __hash__(self):
                is_held.set()
                is_forked.wait()
                return super().__hash__()

        # The engine's lock is held by a thread that the child does not have.
        thread = threading.Thread(target=lambda: llm.submit([1], request_id=SlowId("slow")).result())
        thread.start()
        is_held.wait()
        if os.fork() == 0:
            for call in (lambda: llm.generate([[1]]), lambda: llm.submit([1]), llm.stats):
                try:
                    call()
                except EngineDeadError as error:
                    print("spawn" in str(error))
            stream.close()
            llm.close()
            sys.exit()
        assert os.wait()[1] == 0
        is_forked.set()
        thread.join()
        print(llm.generate([[1]], SamplingParams(max_tokens=2))[0].finished, llm.stats().num_running)
        """
    )
    assert printed.splitlines() == ["True", "True", "True", "True 1"]


def test_a_process_ends_by_itself_in_the_middle_of_a_request() -> None:
    printed = run_script(
        """
        from helpers import make_llm
        from paged_backend import SamplingParams

        llm = make_llm(num_blocks=10_000, max_model_len=40_000)
        stream = llm.stream([1, 2, 3], SamplingParams(max_tokens=None))
        print(len(next(stream).outputs))
        """
    )
    assert printed == "1\n"


def test_closing_fails_who_waits_and_who_comes_later(runner: FakeRunner) -> None:
    llm = make_llm(runner=runner, block_size=16, max_model_len=60_000)
    stream = llm.stream([1, 2, 3], ENDLESS)
    handle = llm.submit([1, 2, 3], ENDLESS)
    next(stream)
    llm.close()

    with pytest.raises(EngineDeadError, match="closed"):
        for _ in stream:
            pass
    with pytest.raises(EngineDeadError, match="closed"):
        handle.result(WAIT_SECONDS)
    for call in (lambda: llm.generate([[1]]), lambda: llm.submit([1]), llm.stats):
        with pytest.raises(EngineDeadError, match="closed"):
            call()
    assert llm.is_closed
    llm.close()
    stream.close()


def test_an_engine_that_never_ran_can_be_closed_too() -> None:
    llm = make_llm()
    llm.close()

    with pytest.raises(EngineDeadError, match="closed"):
        llm.generate([[1]])


def test_an_engine_nobody_refers_to_ends_its_thread() -> None:
    before = engine_threads()
    llm = make_llm()
    llm.generate([[1, 2]], params())
    (thread,) = engine_threads() - before
    del llm
    gc.collect()

    thread.join(WAIT_SECONDS)
    assert not thread.is_alive()


def test_a_handle_keeps_its_engine_alive() -> None:
    handle = make_llm().submit([1, 2], params())
    gc.collect()

    assert handle.result(WAIT_SECONDS).finished


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


def test_a_handle_may_be_collected_at_any_time(llm: LLM) -> None:
    class CollectingId(str):
        """Garbage is collected where it is first looked up."""

        def __hash__(self) -> int:
            collections.append(gc.collect() if not collections else 0)
            return super().__hash__()

    collections: list[int] = []
    cycle: list[Any] = [llm.stream([1, 2], ENDLESS)]
    next(cycle[0])
    cycle.append(cycle)
    request_id = CollectingId("y")
    gc.disable()
    try:
        del cycle
        (result,) = in_threads(lambda: llm.submit([1, 2], params(), request_id=request_id).result(WAIT_SECONDS))
    finally:
        gc.enable()

    assert result.finished and collections[0] > 0
    assert is_idle(llm.stats())


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


def five_readers(llm: LLM) -> list[Callable[[], object]]:
    """Three streams, a blocking call and an asynchronous stream, all endless."""

    async def read() -> None:
        async for _ in llm.astream([4], ENDLESS):
            pass

    streams = [lambda prompt=prompt: list(llm.stream([prompt], ENDLESS)) for prompt in range(3)]
    return [*streams, lambda: llm.generate([[3]], ENDLESS), lambda: asyncio.run(read())]


def expect(error: type[Exception], readers: list[Callable[[], object]]) -> None:
    def read(reader: Callable[[], object]) -> None:
        with pytest.raises(error):
            reader()

    in_threads(*(lambda reader=reader: read(reader) for reader in readers))


def test_a_failing_step_reaches_everybody_in_it_and_the_engine_goes_on(llm: LLM, runner: FakeRunner) -> None:
    def fail_with_five(output: SchedulerOutput) -> None:
        if len(output.scheduled) == 5:
            raise StepFailure("on purpose")

    runner.on_step = fail_with_five
    expect(EngineError, five_readers(llm))

    assert is_idle(llm.stats())
    assert llm.generate([[1, 2]], params())[0].finished


def test_when_the_engine_dies_everybody_is_told_and_so_is_who_comes_later(llm: LLM, runner: FakeRunner) -> None:
    class Crash(BaseException):
        pass

    def crash_with_five(output: SchedulerOutput) -> None:
        if len(output.scheduled) == 5:
            raise Crash("on purpose")

    runner.on_step = crash_with_five
    expect(EngineDeadError, five_readers(llm))

    expect(EngineDeadError, [*five_readers(llm), llm.stats])
    assert llm.is_closed


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


@pytest.mark.parametrize("is_async", [True, False])
def test_streams_give_what_is_new_or_all_so_far_or_all_at_the_end(llm: LLM, is_async: bool) -> None:
    expected = llm.generate([[1, 2]], params(40, n=2))[0].outputs

    async def read(kind: RequestOutputKind) -> list[Any]:
        return [output async for output in llm.astream([1, 2], params(40, n=2, output_kind=kind))]

    def outputs(kind: RequestOutputKind) -> list[Any]:
        return asyncio.run(read(kind)) if is_async else list(llm.stream([1, 2], params(40, n=2, output_kind=kind)))

    deltas = [piece for output in outputs(RequestOutputKind.DELTA) for piece in output.outputs]
    for index in range(2):
        token_ids = [token_id for piece in deltas if piece.index == index for token_id in piece.token_ids]
        assert token_ids == expected[index].token_ids

    whole = outputs(RequestOutputKind.CUMULATIVE)
    assert [output.finished for output in whole] == [False] * (len(whole) - 1) + [True]
    for output in whole:
        assert all(
            piece.token_ids == full.token_ids[: len(piece.token_ids)]
            for piece, full in zip(output.outputs, expected, strict=True)
        )
    assert whole[-1].outputs == expected

    (final,) = outputs(RequestOutputKind.FINAL_ONLY)
    assert final.outputs == expected


def test_a_slow_reader_gets_all_that_has_gathered_at_once(llm: LLM) -> None:
    stream = llm.stream([1, 2], params(20, logprobs=0))
    wait_until(lambda: llm.stats().finished == {"length": 1})
    (output,) = stream

    assert output.finished
    assert len(output.outputs[0].token_ids) == len(output.outputs[0].logprobs or ()) == 20


@pytest.mark.parametrize(
    "stderr, use_tqdm, is_shown", [(Terminal, True, True), (Terminal, False, False), (io.StringIO, True, False)]
)
def test_a_progress_bar_is_shown_in_terminals_only(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, stderr: type[io.StringIO], use_tqdm: bool, is_shown: bool
) -> None:
    monkeypatch.setattr(sys, "stderr", stderr())
    llm.generate([[1], [2]], params(), use_tqdm=use_tqdm)

    assert ("2/2" in sys.stderr.getvalue()) is is_shown  # type: ignore[attr-defined]


def test_a_refused_request_leaves_the_one_alone_whose_id_it_wanted() -> None:
    with make_llm() as llm:
        handle = llm.submit([1, 2, 3], params(max_tokens=200), request_id="x")
        with pytest.raises(InvalidRequestError, match="in use"):
            llm.submit([4, 5], params(), request_id="x")
        assert handle.result(timeout=WAIT_SECONDS).outputs[0].finish_reason == "length"
