"""The check of a GPU runs from end to end without one, at tiny sizes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "gpu_check.py"


@pytest.mark.slow
def test_a_dry_run_finds_everything_right(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    done = subprocess.run(
        [sys.executable, SCRIPT, "--dry", "--out", out], capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(out.read_text())
    assert found["kernels are right"]["is_right"]
    right = {name: value for name, value in found["engine is right"].items() if name != "seconds"}
    assert set(right.values()) == {"12 of 12 as transformers"}
    assert found["whole engines"]["paged-backend"]["mixed"] > 0
