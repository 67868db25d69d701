"""The Triton kernels between matrix products, interpreted, compute what their definitions say, and touch no memory
besides."""

import math

import pytest
import torch
from torch import Tensor

from helpers_triton import poisoned_empty, watched_memory
from paged_kernels import reference
from paged_kernels.triton_fused import add_rms_norm, rotary, silu_and_mul

pytestmark = [pytest.mark.timeout(100), pytest.mark.filterwarnings("ignore:overflow")]

SLOW = [pytest.param(dtype, marks=pytest.mark.slow) for dtype in (torch.float32, torch.float16)]
each_dtype = pytest.mark.parametrize("dtype", [torch.bfloat16, *SLOW], ids=str)
# The interpreter truncates to bfloat16, so that each rounding may be off by one more.
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2**-6, torch.float16: 2**-9}


@pytest.fixture(autouse=True)
def memory(monkeypatch):
    poisoned_empty(monkeypatch)
    with watched_memory() as launches:
        yield launches


def make_random(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def make_heads(num_tokens: int, *, head_size: int, dtype: torch.dtype, heads: tuple[int, int] = (9, 3)) -> list[Tensor]:
    """Query, key and value as the views of one merged projection that they are in a model."""
    sizes = [heads[0], heads[1], heads[1]]
    qkv = make_random(num_tokens, sum(sizes) * head_size, dtype=dtype)
    return list(qkv.unflatten(1, (-1, head_size)).split(sizes, dim=1))


def assert_close(actual: Tensor, expected: Tensor) -> None:
    tolerance = TOLERANCES[expected.dtype]
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@each_dtype
@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("shape", [(3, 576), (9, 80), (2, 3, 33), (1, 1), (0, 64)], ids=str)
def test_add_rms_norm_computes_its_definition(shape, adds, offset, dtype):
    x, weight = make_random(*shape, dtype=dtype), make_random(shape[-1], dtype=dtype, seed=1)
    residuals = [make_random(*shape, dtype=dtype, seed=2) if adds else None for _ in range(2)]
    normed, total = add_rms_norm(x, residuals[0], weight, 1e-5, offset=offset)
    expected, expected_total = reference.add_rms_norm(x, residuals[1], weight, 1e-5, offset=offset)
    assert_close(normed, expected)
    assert_close(total, expected_total)
    assert total is (residuals[0] if adds else x)


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_add_rms_norm_rounds_where_its_definition_does(offset):
    """In float16, which the interpreter rounds as a GPU does; all sums are between two numbers."""
    even, odd = (2 * torch.arange(64.0) + first for first in (2048, 1))
    weight = make_random(64, dtype=torch.float16)
    actual, expected = (
        norm(even.half(), odd.half(), weight, 1e-5, offset=offset) for norm in (add_rms_norm, reference.add_rms_norm)
    )
    assert torch.equal(actual[0], expected[0]) and torch.equal(actual[1], expected[1])


def test_add_rms_norm_takes_views_and_a_float32_weight():
    query, *_ = make_heads(5, head_size=64, dtype=torch.bfloat16)
    x, weight = query[:, 2], make_random(64, dtype=torch.float32)
    assert_close(add_rms_norm(x, None, weight, 1e-5)[0], reference.add_rms_norm(x, None, weight, 1e-5)[0])


@each_dtype
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("head_size", "width"), [(64, 64), (80, 20), (96, 96), (6, 2)])
def test_rotary_computes_its_definition_and_leaves_all_else_alone(head_size, width, interleaved, dtype):
    cos, sin = (make_random(4, width, dtype=torch.float32, seed=seed) for seed in (1, 2))
    actual, expected = (make_heads(4, head_size=head_size, dtype=dtype) for _ in range(2))
    rotary(*actual[:2], cos, sin, interleaved=interleaved)
    reference.rotary(*expected[:2], cos, sin, interleaved=interleaved)
    for a, e in zip(actual, expected, strict=True):
        assert_close(a, e)
    for a, e in zip(actual[:2], expected[:2], strict=True):
        assert torch.equal(a[..., width:], e[..., width:])
    assert torch.equal(actual[2], expected[2])


def test_rotary_takes_more_heads_than_one_program_turns():
    actual, expected = (make_heads(2, head_size=128, dtype=torch.float32, heads=(40, 2)) for _ in range(2))
    cos, sin = (make_random(2, 128, dtype=torch.float32, seed=seed) for seed in (1, 2))
    rotary(*actual[:2], cos, sin)
    reference.rotary(*expected[:2], cos, sin)
    for a, e in zip(actual, expected, strict=True):
        assert_close(a, e)


@each_dtype
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("width", [1, 33, 1536])
def test_silu_and_mul_computes_its_definition(width, activation, dtype):
    gate_up = 4 * make_random(3, 2 * width, dtype=dtype)
    actual = silu_and_mul(gate_up, activation=activation)
    assert_close(actual, reference.silu_and_mul(gate_up, activation=activation))


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_activations_have_their_limits_and_keep_nan(activation):
    gate = torch.tensor([-1e30, -1e4, 0.0, 1e4, 1e30, math.inf, math.nan])
    gate_up = torch.cat([gate, torch.ones_like(gate)])[None]
    expected = torch.where(gate < 0, 0.0, gate)[None]
    torch.testing.assert_close(silu_and_mul(gate_up, activation=activation), expected, equal_nan=True)


def test_each_number_is_read_and_written_once(memory):
    x, residual, weight = (make_random(5, 128, dtype=torch.float32) for _ in range(3))
    add_rms_norm(x, residual, weight[0], 1e-5)
    silu_and_mul(x)
    norm, gate = memory
    size = x.numel() * 4
    assert (norm.bytes_read["x_ptr"], norm.bytes_read["residual_ptr"]) == (size, size)
    assert (norm.bytes_written["residual_ptr"], norm.bytes_written["normed_ptr"]) == (size, size)
    assert (gate.bytes_read["gate_up_ptr"], gate.bytes_written["out_ptr"]) == (size, size // 2)
