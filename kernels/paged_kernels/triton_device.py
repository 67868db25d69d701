"""What all Triton kernels share: the device that they are compiled for, and what the interpreter needs.

Triton decides when it is first imported whether kernels are compiled for a GPU or interpreted on the CPU, which
TRITON_INTERPRET=1 asks for. The interpreter computes with the bit patterns of bfloat16 as if they were integers, so
that kernels pass whatever they load through `widened` before they compute with it.
"""

import functools
import os
from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.runtime import driver

INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET", "0") == "1")


class Device(NamedTuple):
    """What launches depend on."""

    architecture: str
    """A row of the tables in triton_configs.py: "sm_90", "gfx942", "interpreter"."""
    num_processors: int
    """How many programs it runs side by side at least."""


def current_device() -> Device:
    """The device that kernels are launched on now, which is torch's current one."""
    return Device("interpreter", 1) if INTERPRETED.value else _gpu(driver.active.get_current_device())


@functools.cache
def _gpu(index: int) -> Device:
    # Triton is asked rather than torch: it names AMD's devices as its compiler does.
    target = driver.active.get_current_target()
    properties: dict[str, Any] = driver.active.utils.get_device_properties(index)
    return Device(architecture_of(target.backend, target.arch), properties["multiprocessor_count"])


def architecture_of(backend: str, arch: int | str) -> str:
    """The row of the tables in triton_configs.py for what Triton calls a target's backend and arch.

    Raises RuntimeError for NVIDIA devices before compute capability 8.0.
    """
    if backend == "hip":
        return "gfx950" if arch == "gfx950" else "gfx942"
    assert isinstance(arch, int)
    if arch < 80:
        raise RuntimeError(
            f"these kernels need an NVIDIA GPU of compute capability 8.0 or later, this one has {arch / 10}; use a CPU"
        )
    rows = {80: "sm_80", 81: "sm_86", 89: "sm_89", 90: "sm_90", 100: "sm_100", 120: "sm_89"}
    return rows[max(first for first in rows if first <= arch)]


@triton.jit
def widened(x):
    """`x`, in float32 if it is interpreted."""
    if INTERPRETED:
        return x.to(tl.float32)
    else:
        return x


@triton.jit
def rounded_to_bfloat16(x):
    """The bfloat16 nearest to each finite float32, ties to even, as float32; the interpreter itself truncates."""
    bits = x.to(tl.int32, bitcast=True)
    bits += 0x7FFF + ((bits >> 16) & 1)
    return (bits & -0x10000).to(tl.float32, bitcast=True)


@triton.jit
def rounded_to_integers(x):
    """The integer nearest to each float32 below 2^22 in absolute value, ties to even: such sums have no fraction."""
    return (x + 12582912.0) - 12582912.0
