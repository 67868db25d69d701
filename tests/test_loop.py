"""One engine for all threads and event loops: nobody waits for ever, and nothing is left behind."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import io
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from helpers import WAIT_SECONDS, FakeRunner, in_threads, is_given_up, is_idle, make_llm, wait_until
from helpers_loop import ENDLESS, Gate, Terminal, params
from paged_backend import LLM, AsyncStream, RequestHandle, RequestOutputKind


@pytest.fixture
def runner() -> FakeRunner:
    """Holds requests that take longer than any test."""
    return FakeRunner(num_blocks=4096, block_size=16)


@pytest.fixture
def llm(runner: FakeRunner) -> Iterator[LLM]:
    with make_llm(runner=runner, block_size=16, max_model_len=60_000) as llm:
        yield llm


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


def test_an_aborted_request_gives_its_reader_what_there_was(llm: LLM) -> None:
    handle = llm.submit([1, 2, 3], ENDLESS)
    first = next(handle)
    handle.abort()
    handle.abort()
    result = handle.result(WAIT_SECONDS)

    assert result.outputs[0].finish_reason == "abort"
    assert result.outputs[0].token_ids[: len(first.outputs[0].token_ids)] == first.outputs[0].token_ids


def test_a_handle_may_be_collected_at_any_time(llm: LLM) -> None:
    class CollectingId(str):
        """Garbage is collected where it is first looked up."""

        def __hash__(self) -> int:
            collections.append(gc.collect() if not collections else 0)
            return super().__hash__()

    collections: list[int] = [0]
    for _ in range(5):  # other threads of this process may collect it before
        cycle: list[Any] = [llm.stream([1, 2], ENDLESS)]
        next(cycle[0])
        cycle.append(cycle)
        request_id = CollectingId("y")
        collections.clear()
        gc.disable()
        try:
            del cycle
            (handle,) = in_threads(functools.partial(llm.submit, [1, 2], params(), request_id=request_id))
            result = handle.result(WAIT_SECONDS)
        finally:
            gc.enable()
        assert result.finished
        if collections[0] > 0:
            break

    assert collections[0] > 0
    assert is_idle(llm.stats())


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
