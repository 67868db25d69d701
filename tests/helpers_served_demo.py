"""The demo model behind a real server: a process of its own, as a user starts it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx

from helpers import wait_until
from helpers_server import free_port

ROOT = Path(__file__).parents[1]
KEY = "secret"
_START_SECONDS = 120


@contextlib.contextmanager
def served_demo(*options: str) -> Iterator[str]:
    """The address of a server that asks for `KEY`; it must end with exit code 0."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "paged_backend.cli", "serve", "demo", "--port", str(port), "--api-key", KEY]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([".", "kernels"])}
    with subprocess.Popen([*command, *options], cwd=ROOT, env=environment) as process:
        try:
            wait_until(lambda: process.poll() is not None or _is_ready(url), _START_SECONDS)
            yield url
            process.terminate()
            assert process.wait(60) == 0
        finally:
            process.kill()


def _is_ready(url: str) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(f"{url}/ready").status_code == 200
    return False
