"""Attention over a paged cache of keys and values: `store_kv` and `paged_attention`.

`reference` defines what they compute. Called from here they run the implementation for the tensors' device. The first
call for a dtype on a CPU compiles, once per machine: the result is kept on disk. Call them from one thread at a time.
"""

import functools
import itertools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from paged_kernels import reference

__all__ = ["paged_attention", "store_kv"]

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")


def _by_device(definition: Callable[_Parameters, _Result]) -> Callable[_Parameters, _Result]:
    """The function of this name that is written for the device of its first tensor, or else the definition."""

    @functools.wraps(definition)
    def run(*args: _Parameters.args, **kwargs: _Parameters.kwargs) -> _Result:
        first: Any = next(itertools.chain(args, kwargs.values()))
        if not first.is_cpu:
            return definition(*args, **kwargs)
        from paged_kernels import cpu  # here, since Numba takes half a second to import

        implementation: Callable[_Parameters, _Result] = getattr(cpu, definition.__name__)
        return implementation(*args, **kwargs)

    return run


paged_attention = _by_device(reference.paged_attention)
store_kv = _by_device(reference.store_kv)
