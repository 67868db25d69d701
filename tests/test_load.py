"""`benchmarks/load.py` in short: what it says of the server is true on the demo model."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_server_holds_under_many_clients_of_whom_some_hang_up() -> None:
    """Nothing fails, no block is left held, and the memory is flat; how fast it is depends on who else is there."""
    options = ["--clients", "16", "--seconds", "20", "--no-rate", "--kv-cache-memory", "64MiB"]
    command = [sys.executable, ROOT / "benchmarks" / "load.py", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        try:
            output, complaints = running.communicate(timeout=240)
        finally:
            running.terminate()  # not kill: it has a server to end
    assert running.returncode == 0, complaints
    (line,) = [line for line in output.splitlines() if line.startswith("paged-backend serve")]
    assert " 0 failed" in line and " 0 hung up on" not in line
