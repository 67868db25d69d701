"""The kernels between matrix products compute what their definitions say, and what transformers' models compute."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers.activations import ACT2FN
from transformers.models.cohere.modeling_cohere import apply_rotary_pos_emb as cohere_rotary
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as llama_rotary

from paged_kernels import add_rms_norm, reference, rotary, silu_and_mul

PARALLEL = 110  # rows that are enough work for several threads

dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
num_rows = st.sampled_from([0, 1, 2, 7, PARALLEL])


def make_random(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def make_heads(num_tokens: int, *, heads=(9, 3), head_size=64, dtype=torch.float32) -> tuple[Tensor, Tensor]:
    """Query and key as the views of one merged projection that they are in a model."""
    num_heads, num_kv_heads = heads
    qkv = make_random(num_tokens, (num_heads + 2 * num_kv_heads) * head_size, dtype=dtype)
    query, key, _ = qkv.unflatten(1, (-1, head_size)).split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    return query, key


def make_angles(num_tokens: int, width: int, *, interleaved: bool = False) -> tuple[Tensor, Tensor]:
    half = torch.arange(num_tokens)[:, None] * 100.0 ** -(torch.arange(width // 2) / width)
    angles = half.repeat_interleave(2, dim=1) if interleaved else torch.cat([half, half], dim=1)
    return angles.cos(), angles.sin()


def assert_close(actual: Tensor, expected: Tensor, *, ulps: int = 1, atol: float = 2e-6) -> None:
    assert actual.dtype == expected.dtype
    rtol = 1e-5 if actual.dtype == torch.float32 else ulps * torch.finfo(actual.dtype).eps
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=atol)


@dtypes
@given(num_rows, st.sampled_from([1, 31, 576, 1030]), st.booleans(), st.sampled_from([0.0, 1.0]))
def test_add_rms_norm_computes_its_definition(dtype, rows, width, adds, offset):
    x, weight = make_random(rows, width, dtype=dtype), make_random(width, dtype=dtype, seed=1)
    residuals = [make_random(rows, width, dtype=dtype, seed=2) if adds else None for _ in range(2)]
    normed, total = add_rms_norm(x, residuals[0], weight, 1e-5, offset=offset)
    expected, expected_total = reference.add_rms_norm(x, residuals[1], weight, 1e-5, offset=offset)
    assert_close(normed, expected, ulps=2)  # where the quotient is rounded the other way, so may be the product
    assert torch.equal(total, expected_total)
    assert total is (residuals[0] if adds else x)


@dtypes
def test_add_rms_norm_rounds_as_llama_does(dtype):
    norm = LlamaRMSNorm(576, eps=1e-5).to(dtype)
    norm.weight.data = make_random(576, dtype=dtype, seed=1)
    x = make_random(7, 576, dtype=dtype)
    assert_close(add_rms_norm(x, None, norm.weight, 1e-5)[0], norm(x).detach(), ulps=2)


@dtypes
def test_add_rms_norm_with_an_offset_rounds_as_gemma_does(dtype):
    norm = GemmaRMSNorm(576, eps=1e-5).to(dtype)
    norm.weight.data = make_random(576, dtype=dtype, seed=1)
    x = make_random(7, 576, dtype=dtype)
    assert_close(add_rms_norm(x, None, norm.weight, 1e-5, offset=1.0)[0], norm(x).detach())


def test_add_rms_norm_takes_heads_and_a_float32_weight():
    query, _ = make_heads(5, dtype=torch.bfloat16)
    weight = make_random(64, dtype=torch.float32)
    normed, _ = add_rms_norm(query, None, weight, 1e-5)
    assert_close(normed, reference.add_rms_norm(query, None, weight, 1e-5)[0], ulps=2)


@dtypes
@given(num_rows, st.sampled_from([(64, 64), (64, 32), (80, 20), (6, 2)]), st.booleans(), st.booleans())
def test_rotary_computes_its_definition(dtype, num_tokens, sizes, interleaved, angles_are_float32):
    head_size, width = sizes
    angles = make_angles(num_tokens, width, interleaved=interleaved)
    if not angles_are_float32:
        angles = tuple(part.to(dtype) for part in angles)
    actual, expected = (make_heads(num_tokens, head_size=head_size, dtype=dtype) for _ in range(2))
    rotary(*actual, *angles, interleaved=interleaved)
    reference.rotary(*expected, *angles, interleaved=interleaved)
    for a, e in zip(actual, expected, strict=True):
        assert_close(a, e)
        assert torch.equal(a[..., width:], e[..., width:])


@pytest.mark.parametrize("rows", [2, PARALLEL])
def test_rotary_leaves_the_values_beside_the_keys_alone(rows):
    qkv = make_random(rows, 15, 64, dtype=torch.bfloat16)
    before = qkv.clone()
    rotary(qkv[:, :9], qkv[:, 9:12], *make_angles(rows, 64))
    assert torch.equal(qkv[:, 12:], before[:, 12:])
    assert not torch.equal(qkv[1, :12], before[1, :12])


@dtypes
@pytest.mark.parametrize(("model_rotary", "interleaved"), [(llama_rotary, False), (cohere_rotary, True)])
def test_rotary_turns_heads_as_models_do(dtype, model_rotary, interleaved):
    cos, sin = (part.to(dtype) for part in make_angles(7, 64, interleaved=interleaved))
    query, key = make_heads(7, dtype=dtype)
    turned = model_rotary(query[None], key[None], cos[None], sin[None], unsqueeze_dim=2)
    rotary(query, key, cos, sin, interleaved=interleaved)
    largest = 2 * torch.finfo(dtype).eps * 4  # models round each product; a sum of two may be smaller than either
    assert_close(query, turned[0][0].to(dtype), atol=largest)
    assert_close(key, turned[1][0].to(dtype), atol=largest)


@dtypes
@given(num_rows, st.sampled_from([1, 33, 576]), st.sampled_from(["silu", "gelu_tanh"]))
def test_silu_and_mul_computes_its_definition(dtype, rows, width, activation):
    gate_up = 4 * make_random(rows, 2 * width, dtype=dtype)
    actual = silu_and_mul(gate_up, activation=activation)
    assert_close(actual, reference.silu_and_mul(gate_up, activation=activation), atol=1e-5)


@dtypes
@pytest.mark.parametrize(("activation", "model_activation"), [("silu", "silu"), ("gelu_tanh", "gelu_pytorch_tanh")])
def test_silu_and_mul_activates_as_models_do(dtype, activation, model_activation):
    gate_up = make_random(7, 2 * 1536, dtype=dtype)
    gate, up = gate_up.chunk(2, dim=-1)
    assert_close(silu_and_mul(gate_up, activation=activation), ACT2FN[model_activation](gate) * up, ulps=2)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_activations_have_their_limits_and_keep_nan(activation):
    gate = torch.tensor([-1e30, -1e4, 0.0, 1e4, 1e30, math.inf, math.nan])
    gate_up = torch.cat([gate, torch.ones_like(gate)])[None]
    expected = torch.where(gate < 0, 0.0, gate)[None]
    torch.testing.assert_close(silu_and_mul(gate_up, activation=activation), expected, equal_nan=True)


def test_float16_is_rounded_as_float16():
    x, gate_up = make_random(3, 576, dtype=torch.float16), make_random(3, 576, dtype=torch.float16, seed=1)
    assert_close(add_rms_norm(x, None, x[0], 1e-5)[0], reference.add_rms_norm(x, None, x[0], 1e-5)[0], ulps=2)
    assert_close(silu_and_mul(gate_up), reference.silu_and_mul(gate_up), atol=1e-5)


def compute_all(rows: slice, dtype: torch.dtype) -> dict[str, Any]:
    """Each kernel's results for some of the rows of one batch."""
    x, residual = (make_random(PARALLEL, 576, dtype=dtype, seed=i)[rows] for i in range(2))
    gate_up = make_random(PARALLEL, 2 * 576, dtype=dtype)[rows]
    query, key = (heads[rows] for heads in make_heads(PARALLEL, dtype=dtype))
    normed, total = add_rms_norm(x, residual, make_random(576, dtype=dtype), 1e-5)
    rotary(query, key, *(part[rows] for part in make_angles(PARALLEL, 64)))
    return {"normed": normed, "total": total, "query": query, "key": key, "gated": silu_and_mul(gate_up)}


@dtypes
def test_a_row_is_the_same_to_the_last_bit_in_any_batch(dtype):
    everything = compute_all(slice(None), dtype)
    for rows in (slice(0, 1), slice(17, 18), slice(40, 70), slice(PARALLEL - 1, None)):
        for name, result in compute_all(rows, dtype).items():
            assert torch.equal(result, everything[name][rows]), name
