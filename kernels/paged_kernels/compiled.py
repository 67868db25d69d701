"""What all CPU kernels share: how they are compiled, how many threads they use, how tensors reach them.

Numba's disk cache does not notice a change of an imported module: after one here, or in attention_rows.py, assembly.py,
plan.py, quads.py, tiles.py or vector.py, delete `__pycache__`.
"""

import math
from collections.abc import Callable
from typing import Any, TypeVar

import numba
import numpy as np
import torch
from numpy.typing import NDArray

from paged_kernels.vector import pointer

SERIAL_PRODUCT = 200_000  # multiplications, about 10 µs: fewer are not worth other threads
LOG2_E = np.float32(math.log2(math.e))
_EXP2 = tuple(np.float32(math.log(2) ** i / math.factorial(i)) for i in range(8))

TYPES: dict[torch.dtype, NDArray[Any]] = {  # 16-bit floats as integers, see vector.py
    torch.float32: np.empty(0, np.float32),
    torch.bfloat16: np.empty(0, np.uint16),
    torch.float16: np.empty(0, np.int16),
}

_Function = TypeVar("_Function", bound=Callable[..., Any])


# Sums may be reordered, but NaN and infinity keep their meaning: an overflow stays in the sequence that has it.
FAST_MATH = frozenset({"reassoc", "contract", "nsz", "arcp", "afn"})
FAST_MATH_WITHOUT_NAN = FAST_MATH | {"nnan"}


def compile_kernel(function: _Function, *, parallel: bool = False, fast_math: frozenset[str] = FAST_MATH) -> _Function:
    options = {"nogil": True, "cache": True, "error_model": "numpy", "fastmath": set(fast_math), "parallel": parallel}
    compiled: _Function = numba.njit(**options)(function)
    return compiled


def set_num_threads() -> int:
    """Have Numba use as many threads as torch does."""
    torch_threads = torch.get_num_threads()
    num_threads = min(torch_threads, int(numba.config.NUMBA_NUM_THREADS))
    numba.set_num_threads(num_threads)
    if torch.get_num_threads() != torch_threads:  # Numba's first start sets OpenMP's number, which torch may share
        torch.set_num_threads(torch_threads)
    return num_threads


def array_of(tensor: torch.Tensor) -> NDArray[Any]:
    """The tensor's memory; 16-bit floats as integers, see vector.py."""
    if tensor.dtype == torch.bfloat16:
        tensor = tensor.view(torch.uint16)
    elif tensor.dtype == torch.float16:
        tensor = tensor.view(torch.int16)
    array: NDArray[Any] = tensor.numpy()
    return array


@compile_kernel
def array_at(address: int | np.int64, start: int, length: int, like: NDArray[Any]) -> NDArray[Any]:
    """Numbers in memory, from the one that is `start` after an address."""
    array: NDArray[Any] = numba.carray(pointer(address + start * like.itemsize, like), length)
    return array


@compile_kernel
def exp2(x: np.float32) -> np.float32:
    """2 ** x for x <= 0, and 2 ** -126 below that: the Taylor series around the nearest integer."""
    x = np.float32(-126) if x < np.float32(-126) else x
    exponent = np.int32(x - np.float32(0.5))
    rest = x - np.float32(exponent)
    result = _EXP2[7] * rest + _EXP2[6]
    result = result * rest + _EXP2[5]
    result = result * rest + _EXP2[4]
    result = result * rest + _EXP2[3]
    result = result * rest + _EXP2[2]
    result = result * rest + _EXP2[1]
    result = result * rest + _EXP2[0]
    return result * np.int32((exponent + 127) << 23).view(np.float32)
