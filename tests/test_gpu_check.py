"""The check of a GPU runs from end to end without one, at tiny sizes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import gpu_right
from gpu_check import targets
from gpu_setup import Check

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


def test_what_a_stage_found_before_it_failed_is_kept(tmp_path: Path) -> None:
    check = Check(is_dry=True, minutes=1, out=tmp_path / "found.json")

    def fail(check: Check) -> dict[str, Any]:
        check.keep("engines", {"one": 1})
        raise RuntimeError("the other one has no memory")

    check.stage("engines", 0, fail)
    found = json.loads((tmp_path / "found.json").read_text())["engines"]
    assert (found["one"], found["error"]) == (1, "RuntimeError: the other one has no memory")


def test_a_kernel_that_fails_leaves_the_others_to_be_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(check: Check) -> dict[str, float]:
        raise RuntimeError("ptxas failed")

    for part in ("_rounded_caches", "_head_sizes", "_adapters", "_changed_logits", "_draws"):
        monkeypatch.setattr(gpu_right, part, lambda check: {})
    monkeypatch.setattr(gpu_right, "_attention", fail)
    found = gpu_right.kernels_are_right(Check(is_dry=True, minutes=1, out=tmp_path / "found.json"))
    assert not found["is_right"] and found["wrong"] == {"fail": "RuntimeError: ptxas failed"}
    assert found["cases"] == 6


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
