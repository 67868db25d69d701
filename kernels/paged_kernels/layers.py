"""Halves of a decoder layer in one call each, for CPUs: with one sequence, calls from Python cost more than norms do.

What is computed, and how it is rounded, is what the separate kernels do one after the other.
"""

import dataclasses
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paged_kernels.compiled import TYPES, compile_kernel, set_num_threads
from paged_kernels.fused import GATES, SERIAL_COST, gate_all_rows, gate_rows, norm_all_rows, norm_rows, rotate_tokens
from paged_kernels.packed import Matrix, Types, matrix_of, multiply, types_of
from paged_kernels.packing import PackedWeight

_SERIAL_PRODUCT = 400_000  # about 10 µs: products below are not worth other threads


@dataclasses.dataclass(frozen=True, slots=True)
class Norm:
    """An RMSNorm, with contiguous weights."""

    weight: Tensor
    eps: float
    offset: float = 0.0


class AttentionInput:
    """Norm, the product that gives query, key and value, and rotary positions."""

    def __init__(
        self, norm: Norm, qkv: PackedWeight, bias: Tensor | None, num_heads: tuple[int, int], head_size: int
    ) -> None:
        self._norm, self._qkv = norm, qkv
        self._bias = None if bias is None else bias.float().contiguous()
        self._address = (norm.weight.data_ptr(), norm.eps, norm.offset)
        self._matrix = matrix_of(qkv, self._bias)
        self._heads = (*num_heads, head_size)

    def __call__(self, x: Tensor, residual: Tensor | None, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """[T, E], the same or None, [T, D], [T, D] -> heads [T, (H + 2K) * D], and x and residual summed up."""
        total = x if residual is None else residual
        assert x.is_contiguous() and total.is_contiguous() and cos.is_contiguous() and sin.is_contiguous()
        num_rows, width = x.shape
        out = x.new_empty(num_rows, self._qkv.shape[0])
        _before_attention(
            types_of(x, self._qkv),
            (TYPES[self._norm.weight.dtype], TYPES[cos.dtype]),
            (x.data_ptr(), total.data_ptr(), out.data_ptr()),
            self._address,
            residual is not None,
            self._matrix,
            (cos.data_ptr(), sin.data_ptr(), cos.shape[1]),
            self._heads,
            num_rows,
            1 if num_rows * width * width < _SERIAL_PRODUCT else set_num_threads(),
        )
        return out, total


class AttentionOutput:
    """The product after attention, and the MLP: norm, gate and up, activation, down."""

    def __init__(
        self,
        norm: Norm,
        output: PackedWeight,
        gate_up: PackedWeight,
        down: PackedWeight,
        biases: tuple[Tensor | None, Tensor | None, Tensor | None],
        activation: str,
    ) -> None:
        assert output.bits == gate_up.bits == down.bits
        self._norm, self._weights = norm, (output, gate_up, down)
        self._biases = [None if bias is None else bias.float().contiguous() for bias in biases]
        self._address = (norm.weight.data_ptr(), norm.eps, norm.offset)
        self._matrices = tuple(
            matrix_of(weight, bias) for weight, bias in zip(self._weights, self._biases, strict=True)
        )
        self._gates = GATES[activation]

    def __call__(self, attention: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """[T, H * D], [T, E] -> what the MLP gives [T, E], and the residual before it, in place."""
        output, gate_up, _ = self._weights
        assert attention.is_contiguous() and residual.is_contiguous()
        num_rows, width = residual.shape
        out = torch.empty_like(residual)
        _after_attention(
            types_of(residual, output),
            TYPES[self._norm.weight.dtype],
            (attention.data_ptr(), residual.data_ptr(), out.data_ptr()),
            self._address,
            self._matrices,
            self._gates,
            num_rows,
            1 if num_rows * width * gate_up.shape[0] < _SERIAL_PRODUCT else set_num_threads(),
        )
        return out, residual


@compile_kernel
def _before_attention(
    types: Types,
    likes: tuple[NDArray[Any], NDArray[Any]],
    addresses: tuple[int, int, int],
    norm: tuple[int, float, float],
    adds: bool,
    matrix: Matrix,
    angles: tuple[int, int, int],
    heads: tuple[int, int, int],
    num_rows: int,
    num_threads: int,
) -> None:
    like, (norm_like, angle_like), (x, total, out) = types[0], likes, addresses
    num_columns, width = matrix[3][0], matrix[3][1]
    normed = np.empty(num_rows * width, like.dtype)
    _norm(like, x, total, normed.ctypes.data, norm_like, norm, width, adds, num_rows, num_threads)
    multiply(types, normed.ctypes.data, width, matrix, out, num_rows, num_threads)
    num_query_heads, num_kv_heads, size = heads
    query = (out, num_columns, size, num_query_heads)
    key = (out + num_query_heads * size * like.itemsize, num_columns, size, num_kv_heads)
    rotate_tokens(like, query, key, angle_like, angles, False, 0, num_rows)


@compile_kernel
def _after_attention(
    types: Types,
    norm_like: NDArray[Any],
    addresses: tuple[int, int, int],
    norm: tuple[int, float, float],
    matrices: tuple[Matrix, Matrix, Matrix],
    gates: tuple[float, float],
    num_rows: int,
    num_threads: int,
) -> None:
    like, (attention, total, out), (output, gate_up, down) = types[0], addresses, matrices
    width, inner = output[3][0], down[3][1]
    memory = np.empty(num_rows * (2 * width + 3 * inner), like.dtype)
    projected = memory.ctypes.data
    normed = projected + num_rows * width * like.itemsize
    both = normed + num_rows * width * like.itemsize
    gated = both + 2 * num_rows * inner * like.itemsize
    multiply(types, attention, output[3][1], output, projected, num_rows, num_threads)
    _norm(like, projected, total, normed, norm_like, norm, width, True, num_rows, num_threads)
    multiply(types, normed, width, gate_up, both, num_rows, num_threads)
    if num_rows * 2 * inner < SERIAL_COST:
        gate_rows(like, both, gated, inner, gates[0], gates[1], 0, num_rows)
    else:
        gate_all_rows(like, both, gated, inner, gates[0], gates[1], num_rows, num_threads)
    multiply(types, gated, inner, down, out, num_rows, num_threads)


@compile_kernel
def _norm(
    like: NDArray[Any],
    x: int,
    total: int,
    normed: int,
    norm_like: NDArray[Any],
    norm: tuple[int, float, float],
    width: int,
    adds: bool,
    num_rows: int,
    num_threads: int,
) -> None:
    weight, eps, offset = norm
    if num_rows * width < SERIAL_COST:
        norm_rows(like, x, total, normed, norm_like, weight, width, eps, offset, adds, 0, num_rows)
    else:
        norm_all_rows(like, x, total, normed, norm_like, weight, width, eps, offset, adds, num_rows, num_threads)
