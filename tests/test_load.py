"""`benchmarks/load.py` in short: what it says of the server is true on the demo model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from engines import Setup
from servers import peer_command

ROOT = Path(__file__).parents[1]
FAKE_SERVER = "import json, os, sys; print(json.dumps([sys.argv[1:], dict(os.environ)]))"


def test_vllms_server_is_started_as_its_engine_is(tmp_path: Path) -> None:
    """With the lengths, the threads and the memory that `compare.py` gives it, on the model's folder."""
    package = tmp_path / "vllm" / "entrypoints" / "openai"
    package.mkdir(parents=True)
    (package / "api_server.py").write_text(FAKE_SERVER)
    python = tmp_path / "peers" / "vllm" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.touch()  # so that nothing is installed
    setup = Setup(str(tmp_path / "model"), tmp_path / "peers", threads=2)
    interpreter, *script = peer_command("vllm", setup, 1234, "bfloat16", max_num_seqs=32)
    assert interpreter == str(python)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, *script], env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    options, variables = json.loads(done.stdout)
    assert (
        options
        == (
            "--max-model-len 8192 --max-num-batched-tokens 512 "
            f"--model {tmp_path / 'model'} --max-num-seqs 32 --host 127.0.0.1 --port 1234 --dtype bfloat16"
        ).split()
    )
    assert (variables["VLLM_CPU_KVCACHE_SPACE"], variables["VLLM_CPU_OMP_THREADS_BIND"]) == ("2", "0-1")
    assert "LD_PRELOAD" in variables


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_server_holds_under_many_clients_of_whom_some_hang_up() -> None:
    """Nothing fails, no block is left held, and the memory is flat; how fast it is depends on who else is there."""
    options = ["--clients", "16", "--seconds", "8", "--no-rate", "--kv-cache-memory", "64MiB"]
    command = [sys.executable, ROOT / "benchmarks" / "load.py", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        try:
            output, complaints = running.communicate(timeout=240)
        finally:
            running.terminate()  # not kill: it has a server to end
    assert running.returncode == 0, complaints
    (line,) = [line for line in output.splitlines() if line.startswith("paged-backend serve")]
    assert " 0 failed" in line and " 0 hung up on" not in line
