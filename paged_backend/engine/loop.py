"""The one thread that owns an engine. Everybody else puts into its inbox and takes from a request's outbox."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import queue
import threading
import traceback
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any, NamedTuple, TypeVar

from paged_backend.engine.encoder_engine import EncoderEngine
from paged_backend.engine.engine import Engine, EngineOutput
from paged_backend.engine.outbox import Outbox
from paged_backend.engine.request import Request
from paged_backend.errors import EngineDeadError, InvalidRequestError, OverloadedError
from paged_backend.outputs import CompletionOutput

logger = logging.getLogger(__name__)

T = TypeVar("T")
News = CompletionOutput | Exception
AnyEngine = Engine | EncoderEngine
_JOIN_SECONDS = 30.0
_CLOSED = "the engine is closed; make a new LLM"


class _Reader(NamedTuple):
    request: Request
    outbox: Outbox[News]


@dataclasses.dataclass(slots=True)
class _Shared:
    """What the callers' threads and the loop thread both touch, under the lock."""

    lock: threading.RLock = dataclasses.field(default_factory=threading.RLock)
    """Reentrant, since a handle may be collected, and so abort, in a thread that holds it."""
    inbox: queue.SimpleQueue[Callable[[AnyEngine], list[EngineOutput]] | None] = dataclasses.field(
        default_factory=queue.SimpleQueue
    )
    readers: dict[str, _Reader] = dataclasses.field(default_factory=dict)
    """Of each unfinished request."""
    unstarted: list[Request] = dataclasses.field(default_factory=list)
    """Requests that no step has run yet, as far as has been looked."""
    dead: str | None = None
    """Why nothing will be served any more."""


class EngineLoop:
    """Makes and runs an engine in a daemon thread, which sleeps while there is no work.

    The thread holds no reference to this object, so dropping the last one closes the engine, as the end of the
    interpreter does. After a fork the child has no such thread, and every call there says so.
    """

    def __init__(self, *, max_num_queued_reqs: int | None = None) -> None:
        self._max_num_queued_reqs = max_num_queued_reqs
        self._shared = _Shared()
        self._process_id = os.getpid()
        self._threads: list[threading.Thread] = []
        self._stop = weakref.finalize(self, _close, self._shared, self._threads, self._process_id)

    def start(self, build: Callable[[], tuple[AnyEngine, T]]) -> T:
        """Make the engine, and return what `build` tells about it; raises what `build` raises.

        It is made in the thread that will run it: OpenMP keeps a pool of workers for each thread that computes, and
        lets all of them sleep early, at the price of a slow start of each operation, once there are more than cores.
        """
        told: Future[T] = Future()
        thread = threading.Thread(
            target=_run, args=(build, told, self._shared), name="paged-backend engine", daemon=True
        )
        self._threads.append(thread)
        thread.start()
        try:
            return told.result()
        except BaseException:
            self._stop.detach()  # do not wait for a model to be loaded that nobody wants any more
            self._shared.inbox.put(None)
            raise
        finally:
            del told  # which holds the error, whose traceback holds this frame, and the frames that hold a model

    def submit(self, requests: list[Request], outboxes: list[Outbox[News]]) -> None:
        """Queue all of them or, if that is impossible, none; the news of each will be in its outbox.

        Raises OverloadedError if the queue has no room for all, InvalidRequestError if a request id is in use.
        """
        self._check_process()
        shared = self._shared
        with shared.lock:
            self._check_alive()
            self._check_ids(requests)
            self._check_queue(requests)
            for request, outbox in zip(requests, outboxes, strict=True):
                shared.readers[request.request_id] = _Reader(request, outbox)
            shared.inbox.put(lambda engine: _add(engine, requests))

    def abort(self, request: Request) -> None:
        """Ask for a request's end; its blocks are free within a step. Requests that are finished or were refused are
        fine, also if another one has their id."""
        with contextlib.suppress(EngineDeadError):
            self._check_process()
            with self._shared.lock:
                reader = self._shared.readers.get(request.request_id)
                if reader is not None and reader.request is request and not request.is_finished:
                    self._shared.inbox.put(lambda engine: engine.abort(request.request_id))

    def call(self, function: Callable[[AnyEngine], T]) -> T:
        """The result of `function`, run between two steps."""
        self._check_process()
        future: Future[T] = Future()

        def run(engine: AnyEngine) -> list[EngineOutput]:
            try:
                future.set_result(function(engine))
            except Exception as error:
                future.set_exception(error)
            return []

        with self._shared.lock:
            self._check_alive()
            self._shared.inbox.put(run)
        return future.result()

    @property
    def is_closed(self) -> bool:
        """Whether the engine was closed, or died."""
        return self._shared.dead is not None

    def close(self) -> None:
        """Fail what is unfinished, end the thread and let go of the engine. Closing twice is fine."""
        self._stop()

    def _check_process(self) -> None:
        if os.getpid() != self._process_id:
            raise EngineDeadError(
                f"this engine lives in process {self._process_id}, not in its forked child {os.getpid()}; "
                "create the LLM in the child, with the start method 'spawn'"
            )

    def _check_alive(self) -> None:
        if self._shared.dead is not None:
            raise EngineDeadError(self._shared.dead)

    def _check_ids(self, requests: list[Request]) -> None:
        seen: set[str] = set()
        for request in requests:
            if request.request_id in self._shared.readers or request.request_id in seen:
                raise InvalidRequestError(
                    f"request_id={request.request_id!r} is in use by an unfinished request; choose another one",
                    field="request_id",
                )
            seen.add(request.request_id)

    def _check_queue(self, requests: list[Request]) -> None:
        limit, shared = self._max_num_queued_reqs, self._shared
        if limit is None:
            return
        shared.unstarted = [
            request
            for request in shared.unstarted
            if request.metrics.first_scheduled_time is None and request.request_id in shared.readers
        ]
        num_queued, num_more = (sum(request.params.n for request in some) for some in (shared.unstarted, requests))
        if num_queued + num_more > limit:
            raise OverloadedError(
                f"{num_queued} requests are queued and {num_more} more would exceed "
                f"max_num_queued_reqs={limit}; try again later, send fewer at once or raise the limit"
            )
        shared.unstarted += requests


def _run(build: Callable[[], tuple[AnyEngine, T]], told: Future[T], shared: _Shared) -> None:
    """The thread: make the engine; then take messages, step while there is work, deliver."""
    try:
        engine, facts = build()
    except BaseException as error:
        shared.dead = f"the engine could not be made: {error}"
        told.set_exception(error)
        traceback.clear_frames(error.__traceback__)
        return
    told.set_result(facts)
    try:
        while _take_messages(engine, shared):
            if engine.has_work:
                _deliver(shared, engine.step())
    except BaseException as error:
        logger.exception("the engine died")
        what = "" if isinstance(error, EngineDeadError) else f" of {type(error).__name__}"
        _die(engine, shared, f"the engine died{what}: {error}")
        return
    _die(engine, shared, _CLOSED)


def _take_messages(engine: AnyEngine, shared: _Shared) -> bool:
    """Run what is in the inbox, waiting for it if there is nothing else to do; False at the end."""
    block = not engine.has_work
    while True:
        try:
            message = shared.inbox.get(block=block)
        except queue.Empty:
            return True
        if message is None:
            return False
        _deliver(shared, message(engine))
        block = False


def _add(engine: AnyEngine, requests: Iterable[Request]) -> list[EngineOutput]:
    for request in requests:
        engine.add_request(request)
    return []


def _deliver(shared: _Shared, outputs: list[EngineOutput]) -> None:
    if not outputs:
        return
    last = {request.request_id: news for request, news in outputs if _is_over(request, news)}
    with shared.lock:
        reader_of = shared.readers.get
        readers = [reader_of(request.request_id) for request, _ in outputs]
        # First, so that who reads the end of a request may use its id again.
        for request_id in last:
            shared.readers.pop(request_id, None)
    for reader, (request, news) in zip(readers, outputs, strict=True):
        if reader is not None:
            reader.outbox.put(news, is_last=bool(last) and news is last.get(request.request_id))


def _is_over(request: Request, news: News) -> bool:
    return isinstance(news, Exception) or (news.finish_reason is not None and request.is_finished)


def _die(engine: AnyEngine, shared: _Shared, reason: str) -> None:
    """Nobody waits for ever: whoever still waits gets the reason, and so does everybody who comes later."""
    with shared.lock:
        shared.dead = reason
        readers = list(shared.readers.values())
        shared.readers.clear()
    for reader in readers:
        reader.outbox.put(EngineDeadError(reason), is_last=True)
    with contextlib.suppress(Exception):
        engine.fail_all(EngineDeadError(reason))
    with contextlib.suppress(Exception):
        engine.close()
    while True:  # callers of `call` that came too late
        try:
            message: Any = shared.inbox.get_nowait()
        except queue.Empty:
            return
        if message is not None:
            with contextlib.suppress(Exception):
                message(engine)


def _close(shared: _Shared, threads: list[threading.Thread], process_id: int) -> None:
    if os.getpid() != process_id:
        return  # a forked child has neither the thread nor a lock that can be trusted
    with shared.lock:
        shared.dead = shared.dead or _CLOSED
    shared.inbox.put(None)
    for thread in threads:
        if thread is not threading.current_thread():  # where the last reference may have been dropped
            thread.join(_JOIN_SECONDS)
