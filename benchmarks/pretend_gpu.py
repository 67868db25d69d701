"""A GPU that is not there: Triton compiles each launch for it as for a real one, and nothing is executed.

Kernels are called as always, with tensors on the device "meta". What was launched is written down, and the compiled
code says what it would use. A process that does this must not have TRITON_INTERPRET set.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
import subprocess
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_89": GPUTarget("cuda", 89, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
    "gfx950": GPUTarget("hip", "gfx950", 64),
}
SHARED_MEMORY = {
    "sm_80": 166912,
    "sm_89": 101376,
    "sm_90": 232448,
    "sm_100": 232448,
    "gfx942": 65536,
    "gfx950": 163840,
}
"""Bytes that one program may have."""
_NUM_PROCESSORS = {"sm_80": 108, "sm_89": 128, "sm_90": 132, "sm_100": 148, "gfx942": 304, "gfx950": 256}
_TOOLS = pathlib.Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


class Launch(NamedTuple):
    kernel: str
    """Its name."""
    variant: str
    """The hash of the compiled code."""
    grid: tuple[int, int, int]
    scalars: tuple[int | float, ...]
    """The arguments that are numbers, compile-time ones included."""


class PretendGPU:
    """What happened on it: every launch in order, and every variant of a kernel that was compiled for one.

    A variant is compiled once per process, for the first of its launches.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.launches: list[Launch] = []
        self.compiled: dict[str, Compiled] = {}
        """By hash."""


class Compiled(NamedTuple):
    """A variant of a kernel; the code is NVIDIA's cubin, or AMD's assembly as text."""

    kernel: str
    target: str
    num_warps: int
    num_stages: int
    shared_memory: int
    constants: dict[str, Any]
    signature: dict[str, str]
    """The types of its arguments: "*bf16", "i32", "constexpr"."""
    files: dict[str, pathlib.Path]
    """By their suffix: "cubin", "ttgir", "amdgcn"."""


class Resources(NamedTuple):
    """What one program of a kernel uses."""

    num_registers: int
    """Per thread; of vectors on AMD, where scalar ones are apart."""
    num_spills: int
    """NVIDIA: instructions that access local memory. AMD: vector registers that are in memory."""
    shared_memory: int
    wide_loads: int
    """Instructions that load 16 bytes per thread, from global memory."""
    narrow_loads: int
    """Those that load 1 or 2 bytes."""
    matrix_products: str
    """The instruction, as "HGMMA"; empty if there is none."""


@contextlib.contextmanager
def pretend_gpu(name: str) -> Iterator[PretendGPU]:
    """`name` is one of TARGETS. Not to be nested."""
    gpu = PretendGPU(name)
    previous = driver._active
    driver.set_active(_Driver(gpu))
    triton.knobs.compilation.listener = lambda **event: _note(gpu, **event)
    try:
        yield gpu
    finally:
        driver._active = previous
        triton.knobs.compilation.listener = None


def _note(gpu: PretendGPU, *, src: Any, metadata: dict[str, Any], metadata_group: dict[str, str], **_: Any) -> None:
    names = src.fn.arg_names
    constants = {names[path[0]]: value for path, value in src.constants.items()}
    files = {pathlib.Path(path).suffix[1:]: pathlib.Path(path) for path in metadata_group.values()}
    gpu.compiled[metadata["hash"]] = Compiled(
        metadata["name"],
        gpu.name,
        metadata["num_warps"],
        metadata["num_stages"],
        metadata["shared"],
        constants,
        src.signature,
        files,
    )


class _Launcher:
    """What runs a compiled kernel; Triton keeps it for later launches, perhaps in another `pretend_gpu` block."""

    def __init__(self, src: Any, metadata: Any) -> None:
        self._metadata = metadata

    def __call__(self, x: int, y: int, z: int, stream: int, function: Any, *rest: Any) -> None:
        scalars = tuple(argument for argument in rest[4:] if isinstance(argument, int | float))
        driver.active.gpu.launches.append(Launch(self._metadata.name, self._metadata.hash, (x, y, z), scalars))


class _Driver:
    """What Triton asks of a driver."""

    launcher_cls = _Launcher

    def __init__(self, gpu: PretendGPU) -> None:
        self.gpu = gpu
        self._target = TARGETS[gpu.name]
        self.utils = _Utils(gpu)

    def get_current_device(self) -> int:
        return list(TARGETS.values()).index(self._target)  # Triton keeps what it compiled by this number

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_active_torch_device(self) -> torch.device:
        return torch.device("meta")


class _Utils:
    def __init__(self, gpu: PretendGPU) -> None:
        self._name = gpu.name

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {
            "max_shared_mem": SHARED_MEMORY[self._name],
            "multiprocessor_count": _NUM_PROCESSORS[self._name],
            "warpSize": TARGETS[self._name].warp_size,
        }

    def load_binary(self, name: str, binary: bytes, shared: int, device: int) -> tuple[object, int, int, int, int]:
        return object(), 1, 0, 0, 1024

    def unload_module(self, module: object) -> None:
        pass


def resources_of(compiled: Compiled) -> Resources:
    """Read from the machine code."""
    return _resources_on_amd(compiled) if "amdgcn" in compiled.files else _resources_on_nvidia(compiled)


def _resources_on_nvidia(compiled: Compiled) -> Resources:
    usage, code = (_cuobjdump(option, compiled.files["cubin"]) for option in ("-res-usage", "-sass"))
    registers = re.search(r"REG:(\d+)", usage)
    assert registers
    return Resources(
        num_registers=int(registers[1]),
        num_spills=len(re.findall(r"\b(?:LDL|STL)\b", code)),
        shared_memory=compiled.shared_memory,
        wide_loads=len(re.findall(r"\b(?:LDG\.E\.(?:\w+\.)*128|LDGSTS\.E\.(?:\w+\.)*128)", code)),
        narrow_loads=len(re.findall(r"\bLDG\.E\.(?:\w+\.)*[US](?:8|16)\b", code)),
        matrix_products=_first(code, ("UTCHMMA", "HGMMA", "HMMA")),
    )


def _cuobjdump(option: str, cubin: pathlib.Path) -> str:
    environment = {**os.environ, "PATH": f"{_TOOLS}:{os.environ['PATH']}"}  # it calls nvdisasm
    done = subprocess.run(
        [_TOOLS / "cuobjdump", option, cubin], env=environment, capture_output=True, text=True, check=True, timeout=600
    )
    return done.stdout


def _resources_on_amd(compiled: Compiled) -> Resources:
    code = compiled.files["amdgcn"].read_text()

    def number(key: str) -> int:
        found = re.search(rf"\.{key}:\s+(\d+)", code)
        return int(found[1]) if found else 0

    return Resources(
        num_registers=number("vgpr_count"),
        num_spills=number("vgpr_spill_count"),
        shared_memory=compiled.shared_memory,
        wide_loads=len(re.findall(r"\b(?:global|buffer)_load_(?:lds_)?dwordx4\b", code)),
        narrow_loads=len(re.findall(r"\b(?:global|buffer)_load_(?:[us]byte|[us]short|short)\w*", code)),
        matrix_products=_first(code, ("v_mfma",)),
    )


def _first(code: str, instructions: tuple[str, ...]) -> str:
    return next((name for name in instructions if name in code), "")
