"""On the first start a second process compiles what the first one will need, and its failure costs time only."""

from __future__ import annotations

import pathlib
import subprocess
import sys
import time

import pytest

from paged_kernels.ahead import Helper

_USES = """
import torch
import paged_kernels
from paged_kernels import cpu

def tell():
    raise SystemExit("compiled again")

with paged_kernels.telling_of_compilation(tell):
    for dtype in (torch.float32, torch.bfloat16):
        row, cache = torch.zeros(1, 6, 64, dtype=dtype), torch.zeros(3, 2, 16, 64, dtype=torch.bfloat16)
        cpu.item_kernels(row, cache) if dtype == torch.bfloat16 else None
        columns = [torch.full((7,), value, dtype=torch.float64) for value in (0.8, 0.1, 0.95, 0.5)]
        temperatures, min_p, top_p, shares = columns
        paged_kernels.draw(torch.zeros(7, 100, dtype=dtype), temperatures, min_p, torch.full((7,), 5), top_p, shares)
        paged_kernels.best_logits(torch.zeros(7, 100, dtype=dtype), torch.zeros(7, dtype=torch.int64), 3)
print("found")
"""


def run(*arguments: str) -> list[str]:
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=400, check=True
    ).stdout.splitlines()


def wait_for(helper: Helper, part: str) -> None:
    """Fails if the wait ended only because it had lasted too long."""
    begin = time.monotonic()
    helper.wait_for(part)
    assert time.monotonic() - begin < 60


def test_what_was_compiled_ahead_is_found() -> None:
    assert run("-m", "paged_kernels.ahead", "bfloat16", "bfloat16") == ["attention items", "draws"]
    assert run("-c", _USES) == ["found"]


def test_whoever_waits_goes_on_when_the_part_is_done(tmp_path: pathlib.Path) -> None:
    end = tmp_path / "end"
    code = f"import os, time; print('a part', flush=True)\nwhile not os.path.exists({str(end)!r}): time.sleep(0.01)"
    helper = Helper()
    helper.start("-c", code)
    wait_for(helper, "a part")  # while the process goes on
    end.touch()
    wait_for(helper, "another part")


@pytest.mark.parametrize("code", ["print('another part')", "raise SystemExit(1)", "not Python"])
def test_whoever_waits_goes_on_when_the_process_ends(code: str) -> None:
    helper = Helper()
    helper.start("-c", code)
    wait_for(helper, "a part")


def test_nobody_waits_if_nothing_was_started(monkeypatch: pytest.MonkeyPatch) -> None:
    helper = Helper()
    wait_for(helper, "a part")
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    helper.start("-c", "")
    wait_for(helper, "a part")
