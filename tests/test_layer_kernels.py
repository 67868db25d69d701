"""Halves of a decoder layer in one call give what their kernels give one after the other, to the last bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from paged_kernels import PackedWeight, add_rms_norm, pack, packed_linear, rotary, silu_and_mul
from paged_kernels.layers import AttentionInput, AttentionOutput, Norm

E, INNER, H, K, D = 128, 256, 4, 2, 32

each_size = pytest.mark.parametrize("bits", [16, 8, 4])


def random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).bfloat16() / 4


def weight(num_columns: int, depth: int, bits: int) -> PackedWeight:
    return pack(random(num_columns, depth), bits)


@each_size
@pytest.mark.parametrize("num_rows", [1, 3, 300])
@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
def test_norm_product_and_positions_before_attention(num_rows: int, bits: int, adds: bool, has_bias: bool) -> None:
    norm, qkv = Norm(random(E) + 1, 1e-5), weight((H + 2 * K) * D, E, bits)
    bias = random((H + 2 * K) * D) if has_bias else None
    x, residual = random(num_rows, E), random(num_rows, E) if adds else None
    cos, sin = random(num_rows, D), random(num_rows, D)
    expected_x, expected_total = add_rms_norm(x, None if residual is None else residual.clone(), norm.weight, norm.eps)
    expected = packed_linear(expected_x, qkv, bias)
    heads = expected.view(num_rows, -1, D)
    rotary(heads[:, :H], heads[:, H : H + K], cos, sin)
    actual, total = AttentionInput(norm, qkv, bias, (H, K), D)(x, residual, cos, sin)
    assert torch.equal(actual, expected)
    assert torch.equal(total, expected_total)


@each_size
@pytest.mark.parametrize("num_rows", [0, 1, 3, 300])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_product_norm_and_mlp_after_attention(num_rows: int, bits: int, activation: str) -> None:
    norm = Norm(random(E) + 1, 1e-6)
    output, gate_up, down = weight(E, H * D, bits), weight(2 * INNER, E, bits), weight(E, INNER, bits)
    biases = (random(E), None, random(E))
    attention, residual = random(num_rows, H * D), random(num_rows, E)
    normed, expected_total = add_rms_norm(
        packed_linear(attention, output, biases[0]), residual.clone(), norm.weight, norm.eps
    )
    gated = silu_and_mul(packed_linear(normed, gate_up), activation=activation)
    expected = packed_linear(gated, down, biases[2])
    actual, total = AttentionOutput(norm, output, gate_up, down, biases, activation)(attention, residual)
    assert torch.equal(actual, expected)
    assert torch.equal(total, expected_total)
