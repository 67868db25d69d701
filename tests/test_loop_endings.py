"""An engine that fails, closes or is forgotten amid requests: everybody is told, and nothing is left behind."""

from __future__ import annotations

import asyncio
import gc
import signal
import sys
import threading
from collections.abc import Callable, Iterator

import pytest

from helpers import WAIT_SECONDS, FakeRunner, StepFailure, in_threads, is_idle, make_llm, wait_until
from helpers_loop import ENDLESS, Gate, Terminal, engine_threads, params, run_script
from paged_backend import LLM, EngineDeadError, EngineError
from paged_backend.engine.scheduler import SchedulerOutput


@pytest.fixture
def runner() -> FakeRunner:
    """Holds requests that take longer than any test."""
    return FakeRunner(num_blocks=4096, block_size=16)


@pytest.fixture
def llm(runner: FakeRunner) -> Iterator[LLM]:
    with make_llm(runner=runner, block_size=16, max_model_len=60_000) as llm:
        yield llm


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
