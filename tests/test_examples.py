"""Every file in examples/, and every Python example of README.md, runs and prints something."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README_EXAMPLES = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
# The last one goes on where the others stop.
SCRIPTS = [*README_EXAMPLES[:-1], "\n".join((README_EXAMPLES[1], README_EXAMPLES[-1]))]


def run(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONIOENCODING": "utf-8"},
        capture_output=True,
        encoding="utf-8",
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.name)
def test_examples_run(path: Path) -> None:
    assert len(run(str(path)).split()) > 20


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("script", SCRIPTS, ids=range(len(SCRIPTS)))
def test_readmes_examples_run(script: str) -> None:
    assert len(run("-c", script).split()) > 5
