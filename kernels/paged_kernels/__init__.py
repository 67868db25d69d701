"""What a language model computes with a paged cache of keys and values, and around it.

Attention: `store_kv` and `paged_attention`. Matrix products: `linear`, `packed_linear` for what `pack` and
`pack_numbers` make of weights, and `add_low_rank` for adapters. Between them: `add_rms_norm`, `rotary` and
`silu_and_mul`. After them: `mask_logits`, `penalise`, `draw` and `best_logits`.

`reference` defines what they compute. Called from here they run the implementation for the tensors' device: Numba's for
CPUs, Triton's for GPUs of NVIDIA and AMD, the definition itself for all others. The first call for a dtype compiles,
once per machine: the result is kept on disk. Call them from one thread at a time.
"""

import contextlib
import functools
import importlib
import itertools
import logging
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, ParamSpec, TypeVar

from paged_kernels import reference
from paged_kernels.compilation import after_compilation, telling_of_compilation
from paged_kernels.packing import PackedWeight, pack, pack_numbers

__all__ = [
    "PackedWeight",
    "add_low_rank",
    "add_rms_norm",
    "after_compilation",
    "are_interpreted",
    "best_logits",
    "draw",
    "interpreted",
    "linear",
    "mask_logits",
    "pack",
    "pack_numbers",
    "packed_linear",
    "paged_attention",
    "penalise",
    "rotary",
    "silu_and_mul",
    "store_kv",
    "telling_of_compilation",
]

_logger = logging.getLogger(__name__)
_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")


class _CPUKernels:
    """Which kernels compute on CPUs, in the whole process."""

    are_interpreted = False


_on_cpus = _CPUKernels()


@contextlib.contextmanager
def interpreted() -> Iterator[None]:
    """In this block the kernels for GPUs compute on CPUs, interpreted: very slow, for tests of all that uses them.

    In every thread of the process. RuntimeError without TRITON_INTERPRET=1, which Triton reads when it is imported.
    """
    if not importlib.import_module("paged_kernels.triton_device").INTERPRETED.value:
        raise RuntimeError("Triton compiles for a GPU; set TRITON_INTERPRET=1 before anything imports it")
    before, _on_cpus.are_interpreted = _on_cpus.are_interpreted, True
    try:
        yield
    finally:
        _on_cpus.are_interpreted = before


def are_interpreted() -> bool:
    """Whether the kernels for GPUs compute on CPUs: see `interpreted`."""
    return _on_cpus.are_interpreted


@functools.cache
def _has_triton() -> bool:
    try:
        importlib.import_module("triton")
    except ImportError:
        _logger.warning("there is no Triton, so that kernels run as plain torch, slowly; pip install triton")
        return False
    return True


@functools.cache
def _imported(module: str) -> ModuleType:
    """Late: Numba takes half a second to import."""
    return importlib.import_module(f"paged_kernels.{module}")


def _by_device(
    definition: Callable[_Parameters, _Result], *, cpu: str | None = None, gpu: str | None = None
) -> Callable[_Parameters, _Result]:
    """The function of this name in the module that is written for the device of its first tensor, or else the
    definition."""

    @functools.wraps(definition)
    def run(*args: _Parameters.args, **kwargs: _Parameters.kwargs) -> _Result:
        first: Any = next(itertools.chain(args, kwargs.values()))
        if first.is_cpu:
            module = gpu if gpu is not None and _on_cpus.are_interpreted else cpu
        else:
            module = gpu if first.is_cuda and _has_triton() else None  # AMD's are called cuda, too
        if module is None:
            return definition(*args, **kwargs)
        implementation: Callable[_Parameters, _Result] = getattr(_imported(module), definition.__name__)
        return implementation(*args, **kwargs)

    return run


add_low_rank = _by_device(reference.add_low_rank, cpu="low_rank", gpu="triton_lora")
add_rms_norm = _by_device(reference.add_rms_norm, cpu="fused", gpu="triton_fused")
best_logits = _by_device(reference.best_logits, cpu="sampling", gpu="triton_sampling")
draw = _by_device(reference.draw, cpu="sampling", gpu="triton_sampling")
linear = _by_device(reference.linear, cpu="gemm")
mask_logits = _by_device(reference.mask_logits, cpu="masks", gpu="triton_sampling")
paged_attention = _by_device(reference.paged_attention, cpu="cpu", gpu="triton_attention")
packed_linear = _by_device(reference.packed_linear, cpu="packed")
penalise = _by_device(reference.penalise, gpu="triton_sampling")
rotary = _by_device(reference.rotary, cpu="fused", gpu="triton_fused")
silu_and_mul = _by_device(reference.silu_and_mul, cpu="fused", gpu="triton_fused")
store_kv = _by_device(reference.store_kv, cpu="cpu", gpu="triton_attention")
