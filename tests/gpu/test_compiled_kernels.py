"""The Triton kernels as they are compiled for GPUs, on a machine without one."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def run_compiled(script: Path, *arguments: str) -> str:
    """What a script prints in a process of its own, in which kernels are compiled, not interpreted."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": os.pathsep.join(sys.path), "TRITON_DEFAULT_FP_FUSION": "1"}
    command = [sys.executable, script, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def launches():
    return json.loads(run_compiled(Path(__file__).with_name("launches_process.py")))


@pytest.mark.parametrize(
    ("step", "other"),
    [
        ("decode", "decode of others"),
        ("mixed", "mixed with others"),
        ("draws", "draws of others"),
        ("adapters", "other adapters"),
        ("slots", "slots of others"),
    ],
)
def test_steps_of_the_same_shapes_launch_the_same(launches, step, other):
    """So that a CUDA graph of one may be replayed for the other."""
    assert launches[step] == launches[other]
    assert len(launches[step]) > 1


def test_no_batch_size_is_compiled_for_by_itself(launches):
    variants = {}
    for step, step_launches in launches.items():
        if step.startswith(("batch of", "layer for")):
            for kernel, variant, _grid, _scalars in step_launches:
                variants.setdefault(kernel, set()).add(variant)
    once = ("attend", "store_tokens", "norm_rows", "turn_heads", "gate_rows")
    assert {len(variants[kernel]) for kernel in once} == {1}
    assert len(variants["merge"]) <= 2  # one per number of splits


TARGETS = ("sm_90", "sm_100", "sm_80", "sm_89", "gfx942", "gfx950")


@pytest.fixture(scope="module")
def problems():
    """Of the code for each target: futures, since compilers for several targets run side by side."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        yield {target: pool.submit(run_compiled, BENCHMARKS / "gpu_kernels.py", target) for target in TARGETS}


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_compiled_code_breaks_no_rule(problems, target):
    """See `problems_of` in benchmarks/gpu_kernels.py."""
    assert problems[target].result() == ""
