"""What a language model computes with a paged cache of keys and values, and around it.

Attention: `store_kv` and `paged_attention`. Matrix products: `linear`, `packed_linear` for what `pack` makes of
weights, and `add_low_rank` for adapters. Between them: `add_rms_norm`, `rotary` and `silu_and_mul`. After them:
`mask_logits`, `draw` and `best_logits`.

`reference` defines what they compute. Called from here they run the implementation for the tensors' device. The first
call for a dtype on a CPU compiles, once per machine: the result is kept on disk. Call them from one thread at a time.
"""

import functools
import importlib
import itertools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from paged_kernels import reference
from paged_kernels.compilation import telling_of_compilation
from paged_kernels.packing import PackedWeight, pack

__all__ = [
    "PackedWeight",
    "add_low_rank",
    "add_rms_norm",
    "best_logits",
    "draw",
    "linear",
    "mask_logits",
    "pack",
    "packed_linear",
    "paged_attention",
    "rotary",
    "silu_and_mul",
    "store_kv",
    "telling_of_compilation",
]

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")


def _by_device(definition: Callable[_Parameters, _Result], cpu_module: str) -> Callable[_Parameters, _Result]:
    """The function of this name that is written for the device of its first tensor, or else the definition."""

    @functools.cache
    def for_cpu() -> Callable[_Parameters, _Result]:
        module = importlib.import_module(f"paged_kernels.{cpu_module}")  # late: Numba takes half a second to import
        implementation: Callable[_Parameters, _Result] = getattr(module, definition.__name__)
        return implementation

    @functools.wraps(definition)
    def run(*args: _Parameters.args, **kwargs: _Parameters.kwargs) -> _Result:
        first: Any = next(itertools.chain(args, kwargs.values()))
        return for_cpu()(*args, **kwargs) if first.is_cpu else definition(*args, **kwargs)

    return run


add_low_rank = _by_device(reference.add_low_rank, "low_rank")
add_rms_norm = _by_device(reference.add_rms_norm, "fused")
best_logits = _by_device(reference.best_logits, "sampling")
draw = _by_device(reference.draw, "sampling")
linear = _by_device(reference.linear, "gemm")
mask_logits = _by_device(reference.mask_logits, "masks")
paged_attention = _by_device(reference.paged_attention, "cpu")
packed_linear = _by_device(reference.packed_linear, "packed")
rotary = _by_device(reference.rotary, "fused")
silu_and_mul = _by_device(reference.silu_and_mul, "fused")
store_kv = _by_device(reference.store_kv, "cpu")
