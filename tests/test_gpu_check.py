"""The check of a GPU runs from end to end without one, at tiny sizes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from gpu_check import targets

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "gpu_check.py"


def test_targets_are_judged_by_what_was_found() -> None:
    found = {
        "decode attention": {
            "8 x 4096": {"share_of_copy": 0.1},
            "32 x 4096": {"share_of_copy": 0.85},
            "128 x 2048": {"share_of_copy": 0.7},
            "seconds": 3.0,
        },
        "whole engines": {
            "paged-backend": {"share_of_steps_outside_the_model": 0.02},
            "ratio_to_generate": 9.9,
        },
    }
    judged = {name: verdict.split(": ")[1] for name, verdict in targets(found).items()}
    assert list(judged.values()) == ["met", "MISSED", "met", "MISSED"]
    assert targets({"whole engines": {"error": "no memory"}}) == {}


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
    of_adapters = found["adapters are right"]
    assert (of_adapters["graphs"], of_adapters["changed"]) == ("12 of 12 as without graphs", "9 of 9 by their adapters")
    assert found["whole engines"]["paged-backend"]["mixed"] > 0
