"""Requests that do not end by themselves, engines that wait to be let on, scripts in processes of their own."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

from helpers import WAIT_SECONDS, FakeRunner
from paged_backend import SamplingParams
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
