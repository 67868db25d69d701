"""Rank 0's end of tensor parallelism: the other ranks' processes are started, told what to run, watched and ended."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import multiprocessing
import multiprocessing.spawn
import os
import queue
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple, cast

import psutil

from paged_backend.config import EngineConfig
from paged_backend.errors import ConfigError, EngineDeadError, ModelError, PagedBackendError
from paged_backend.model.rank_process import RankReport, RankSetup

logger = logging.getLogger(__name__)

_LOAD_SECONDS = 1800.0
_STEP_SECONDS = 300.0
_LOOK_SECONDS = 1.0
"""How often it is looked whether somebody is late."""
_SETTLE_SECONDS = 0.5
"""Within this time of the first sign that something is wrong, all that it leads to has happened."""
_REASON_SECONDS = 5.0
_CODE = "import sys; from paged_backend.model.rank_process import main; main(sys.argv[1:])"


class _Process(NamedTuple):
    rank: int
    process: subprocess.Popen[bytes]
    connection: Connection

    def __str__(self) -> str:
        return f"rank {self.rank} (process {self.process.pid})"


@dataclasses.dataclass(slots=True)
class _State:
    """What the thread that watches, which also closes the connections, shares with the one that computes."""

    processes: list[_Process] = dataclasses.field(default_factory=list)
    reports: queue.SimpleQueue[RankReport] = dataclasses.field(default_factory=queue.SimpleQueue)
    """One for each time that a rank has got to where it waits; after a failure, one more."""
    deadline: float | None = None
    """When those who compute are late."""
    limit: float = 0.0
    """The seconds that they had."""
    failure: str | None = None
    is_own_error: bool = False
    """Whether the failure is an exception of a rank, rather than its end."""
    failed: threading.Event = dataclasses.field(default_factory=threading.Event)
    is_closed: bool = False
    process_id: int = dataclasses.field(default_factory=os.getpid)


class Ranks:
    """The processes of ranks 1 to N - 1, of which all live or none: when one dies, fails or is late, all are ended, and
    each later use says which one it was.

    They end with this object, with `close()` and with this process, and do not keep it from ending. Used by one thread.
    """

    def __init__(self, num_ranks: int, *, step_seconds: float = _STEP_SECONDS) -> None:
        """`step_seconds` is the longest that a step may take, the compilation of kernels included."""
        self.num_ranks = num_ranks
        self._step_seconds = step_seconds
        self._state = _State()
        # Not at the interpreter's exit: the engine's loop closes this then, when it has come to the end of its step.
        self._end = weakref.finalize(self, _end, self._state)
        self._end.atexit = False

    def start(self, setup: RankSetup) -> None:
        """Start the processes and form a group with them; `setup` is that of rank 0.

        Raises ConfigError if this process cannot be in such a group, EngineDeadError if a process does not get there.
        """
        from paged_backend.model import shards  # torch takes seconds

        _check_platform()
        shards.check_is_free()
        for rank in range(1, self.num_ranks):
            self._state.processes.append(_start(rank))
        threading.Thread(target=_watch, args=(self._state,), name="paged-backend ranks", daemon=True).start()
        self.gather()
        listener = shards.listen()
        port = listener.getsockname()[1]
        for process in self._state.processes:
            self._send(process, setup._replace(rank=process.rank, port=port))
        shards.join(0, self.num_ranks, setup.device, listener)

    def send(self, message: Any) -> None:
        """To all of them."""
        for process in self._state.processes:
            self._send(process, message)

    def gather(self) -> None:
        """Returns when each of them has got to where it waits for the next message."""
        for _ in self._state.processes:
            self._state.reports.get()
            self.check()

    def check(self) -> None:
        """Raises EngineDeadError if one of them has failed."""
        if self._state.failure is not None:
            raise EngineDeadError(self._state.failure)

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        """While all load: what goes wrong ends all of them. ModelError if this is the model's doing, EngineDeadError if
        it is the end of a rank."""
        try:
            with self._on_time(_LOAD_SECONDS):
                yield
        except PagedBackendError:
            self.close()
            raise
        except BaseException as error:
            reason = self._reason_for(error)
            self.close()
            if self._state.failure is None or self._state.is_own_error:
                reason = f"the model cannot be run in shards: {type(error).__name__}: {error}"
                raise ModelError(reason) from error
            raise EngineDeadError(reason) from error

    @contextlib.contextmanager
    def step(self, message: Any) -> Iterator[None]:
        """A step that all take part in: what goes wrong in one of them leaves the others nowhere, and so ends all."""
        self.check()
        try:
            with self._on_time(self._step_seconds):
                self.send(message)
                yield
        except BaseException as error:
            reason = self._reason_for(error)
            self.close()
            raise EngineDeadError(reason) from error

    def close(self) -> None:
        """End them, and leave their group. Closing twice is fine."""
        self._end()

    def _send(self, process: _Process, message: Any) -> None:
        try:
            process.connection.send(message)
        except OSError:
            self._state.failed.wait(_REASON_SECONDS)
            self.check()
            raise

    def _reason_for(self, error: BaseException) -> str:
        """What another rank's end does to this one may be noticed before the end itself."""
        self._state.failed.wait(_REASON_SECONDS)
        return self._state.failure or f"rank 0 (this process) failed: {type(error).__name__}: {error}"

    @contextlib.contextmanager
    def _on_time(self, seconds: float) -> Iterator[None]:
        self._state.limit, self._state.deadline = seconds, time.monotonic() + seconds
        try:
            yield
        finally:
            self._state.deadline = None


@contextlib.contextmanager
def ranks_for(config: EngineConfig) -> Iterator[Ranks | None]:
    """The ranks of a model that is loaded in this block, which end if that fails; None: it is loaded in one piece."""
    if config.tensor_parallel_size == 1:
        yield None
        return
    ranks = Ranks(config.tensor_parallel_size)
    with ranks.loading():
        yield ranks


def _check_platform() -> None:
    if sys.platform == "win32":
        raise ConfigError("tensor_parallel_size > 1 is not available on Windows; leave it at 1")


def _start(rank: int) -> _Process:
    """A process of its own session, so that neither Ctrl-C nor a closed terminal reaches it before rank 0 decides."""
    ours, theirs = multiprocessing.Pipe()
    python = os.fsdecode(multiprocessing.spawn.get_executable() or sys.executable)
    paths = [os.fspath(path) or os.getcwd() for path in sys.path]
    with theirs:
        process = subprocess.Popen(
            [python, "-P", "-c", _CODE, str(theirs.fileno()), str(os.getpid())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(paths), "LOCAL_RANK": str(rank)},
            start_new_session=True,
        )
    return _Process(rank, process, ours)


class _Failure(NamedTuple):
    reason: str
    is_own_error: bool = False


def _watch(state: _State) -> None:
    """The thread that passes on what the ranks report, and ends all of them if one dies, fails or is late."""
    connections = {process.connection: process for process in state.processes}
    failure = None
    while failure is None and not state.is_closed:
        ready = wait(list(connections), _LOOK_SECONDS)
        failure = _lateness(state)
        for connection in ready:
            failure = failure or _receive(state, connections[cast(Connection, connection)])
    if failure is not None and not state.is_closed:
        _fail(state, failure)
    for connection in connections:
        connection.close()


def _receive(state: _State, process: _Process) -> _Failure | None:
    """Pass a report on; or the failure that it is."""
    try:
        report: RankReport = process.connection.recv()
    except (EOFError, OSError):
        return _death(state) or _Failure(f"{process} has closed its connection")
    if report.error is None:
        state.reports.put(report)
        return None
    return _death(state) or _Failure(f"{process} failed: {report.error}", is_own_error=True)


def _death(state: _State) -> _Failure | None:
    """Who has died, before others failed for want of it."""
    time.sleep(_SETTLE_SECONDS)
    for process in state.processes:
        code = process.process.poll()
        if code:
            how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            return _Failure(f"{process} {how}")
    return None


def _lateness(state: _State) -> _Failure | None:
    """Those that are stopped are the cause; else all are named."""
    deadline = state.deadline
    if deadline is None or time.monotonic() < deadline:
        return None
    names = ", ".join(map(str, [process for process in state.processes if _is_stopped(process)] or state.processes))
    return _Failure(f"no answer from {names}: what all ranks compute together was not over in {state.limit:.0f} s")


def _is_stopped(process: _Process) -> bool:
    try:
        return psutil.Process(process.process.pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
    except psutil.Error:
        return False


def _fail(state: _State, failure: _Failure) -> None:
    state.failure = f"{failure.reason}; all ranks of the model were ended"
    state.is_own_error = failure.is_own_error
    logger.error("%s", state.failure)
    _kill(state)
    state.failed.set()
    for _ in state.processes:
        state.reports.put(RankReport())  # whoever gathers looks for a failure then


def _kill(state: _State) -> None:
    for process in state.processes:
        process.process.kill()
    for process in state.processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.process.wait(_REASON_SECONDS)


def _end(state: _State) -> None:
    if os.getpid() != state.process_id:
        return  # a forked child, which has no processes to end
    state.is_closed = True
    _kill(state)
    if state.processes:
        from paged_backend.model import shards

        shards.leave()
