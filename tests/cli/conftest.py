"""What the commands load, and how one is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import paged_backend
from helpers import wait_until
from helpers_cli import ROOT, Fakes
from helpers_server import END


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> Fakes:
    fakes = Fakes([], [*b"abcdefgh", END])
    monkeypatch.setattr(paged_backend, "LLM", fakes.make)
    return fakes


@pytest.fixture
def killed(tmp_path: Path) -> Iterator[Any]:
    """Runs a command, kills it once its journal has some lines, and runs it again to its end."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(["tests", ".", "kernels"])}

    def start(*arguments: str, step_seconds: float) -> subprocess.Popen[bytes]:
        command = [sys.executable, "tests/server_process.py", str(step_seconds), *arguments]
        return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL)

    def run_twice(journal: Path, num_lines: int, *arguments: str) -> list[bytes]:
        """The whole lines that were there at the kill."""
        first = start(*arguments, step_seconds=0.01)
        try:
            wait_until(lambda: journal.exists() and journal.read_bytes().count(b"\n") >= num_lines, 60)
        finally:
            first.send_signal(signal.SIGKILL)
            first.wait()
        before = journal.read_bytes().split(b"\n")[:-1]
        second = start(*arguments, step_seconds=0)
        try:
            assert second.wait(60) == 0
        finally:
            second.kill()
        return before

    yield run_twice
