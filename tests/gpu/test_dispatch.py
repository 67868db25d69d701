"""Which kernels compute: those for the device of the tensors, or the definition where there are none."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor

import paged_kernels
from paged_kernels import fused, gemm, triton_fused

pytestmark = pytest.mark.timeout(100)


class OnGPU(Tensor):
    """Says that it is on a GPU."""

    is_cpu = False
    is_cuda = True


@pytest.fixture(autouse=True)
def implementations(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in ((fused, "Numba"), (triton_fused, "Triton")):
        monkeypatch.setattr(module, "silu_and_mul", lambda gate_up, name=name: name)
    monkeypatch.setattr(gemm, "linear", lambda x, weight: "Numba")


def test_each_device_has_its_kernels():
    assert paged_kernels.silu_and_mul(torch.zeros(1, 4)) == "Numba"
    assert paged_kernels.silu_and_mul(gate_up=torch.zeros(1, 4).as_subclass(OnGPU)) == "Triton"
    assert paged_kernels.silu_and_mul(torch.zeros(1, 4, device="meta")).shape == (1, 2)


def test_cpus_have_those_of_gpus_while_these_are_interpreted():
    with paged_kernels.interpreted():
        assert paged_kernels.silu_and_mul(torch.zeros(1, 4)) == "Triton"
        assert paged_kernels.linear(torch.ones(2, 3), torch.ones(4, 3)) == "Numba"  # which Triton has not
    assert paged_kernels.silu_and_mul(torch.zeros(1, 4)) == "Numba"


def run(code: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=90)


@pytest.mark.slow
def test_without_triton_gpus_compute_what_is_defined_and_one_line_says_so():
    done = run(
        "import sys, torch, paged_kernels\n"
        "sys.modules['triton'] = None\n"
        "class OnGPU(torch.Tensor):\n    is_cpu, is_cuda = False, True\n"
        "x = torch.ones(1, 4).as_subclass(OnGPU)\n"
        "for _ in range(2):\n    print(paged_kernels.silu_and_mul(x).shape)\n"
    )
    assert done.stdout.split() == ["torch.Size([1,", "2])"] * 2, done.stderr
    assert done.stderr.count("pip install triton") == 1


@pytest.mark.slow
def test_what_is_compiled_cannot_be_interpreted():
    done = run("import paged_kernels\nwith paged_kernels.interpreted():\n    pass")
    assert "set TRITON_INTERPRET=1 before anything imports it" in done.stderr
