"""The servers that `load.py` measures, each in a process of its own."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path

from engines import PEERS, SCRIPTS, Setup

HOST = "127.0.0.1"
_READY_SECONDS = 600.0


@contextlib.contextmanager
def serving(command: list[str], port: int, ready: str, environment: Mapping[str, str] | None = None) -> Iterator[int]:
    """The id of a server's process, once `ready` answers 200; ended, and waited for, at the end."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env={**os.environ, **(environment or {})})
    try:
        deadline = time.monotonic() + _READY_SECONDS
        while not answers(port, ready):
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"the server did not start: {' '.join(command)}")
            time.sleep(0.5)
        yield process.pid
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(30)
        process.kill()
        process.wait()


def answers(port: int, path: str) -> bool:
    try:
        with urllib.request.urlopen(f"http://{HOST}:{port}{path}", timeout=5) as response:
            return response.status == 200
    except OSError:
        return False


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind((HOST, 0))
        return int(listener.getsockname()[1])


def peer_command(name: str, setup: Setup, port: int, dtype: str, max_num_seqs: int) -> list[str]:
    """How to start another server on the model's folder."""
    common = ["--host", HOST, "--port", str(port), "--dtype", dtype]
    if name == "vllm":
        folder = str(setup.source(PEERS[name]))
        script = [str(setup.python(PEERS[name])), str(SCRIPTS / "vllm_server.py"), str(setup.threads)]
        return [*script, "--model", folder, "--max-num-seqs", str(max_num_seqs), *common]
    transformers = str(Path(sys.executable).with_name("transformers"))
    return [transformers, "serve", *common, "--continuous-batching", "--device", "cpu"]
