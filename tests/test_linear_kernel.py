"""`linear` is a matrix product with one rounding, and each row's bits are its own."""

import math

import pytest
import torch
from torch import Tensor

from paged_kernels import linear, reference

each_dtype = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16], ids=str)


def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def assert_is_product(actual: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
    """Within half a unit in the last place of the exact value, give or take the error of float32 sums."""
    exact = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    error_of_sums = 4e-7 * (x.double().abs() @ weight.double().abs().T)
    assert actual.dtype == x.dtype
    assert actual.shape == exact.shape
    half_unit = torch.finfo(x.dtype).eps / 2 * exact.abs()
    assert ((actual.double() - exact).abs() <= half_unit + error_of_sums + 1e-7).all()


@each_dtype
@pytest.mark.parametrize("depth", [1, 32, 33, 576, 1024, 1060, 2100])
@pytest.mark.parametrize("num_columns", [1, 7, 8, 45, 200])
@pytest.mark.parametrize("multiply", [linear, reference.linear], ids=["fast", "definition"])
def test_every_shape_gives_the_product(multiply, num_columns, depth, dtype):
    weight, bias = random(num_columns, depth, dtype=dtype), random(num_columns, dtype=dtype)
    for num_rows in (1, 2, 3, 5, 13, 70):
        x = random(num_rows, depth, dtype=dtype)
        assert_is_product(multiply(x, weight), x, weight)
        assert_is_product(multiply(x, weight, bias), x, weight, bias)


@pytest.mark.parametrize("num_rows", [600, 1025])
def test_more_rows_than_are_multiplied_at_once_work(num_rows):
    x, weight = random(num_rows, 64), random(40, 64)
    assert_is_product(linear(x, weight), x, weight)


@pytest.mark.parametrize("depth", [64, 576, 1100])
@pytest.mark.parametrize("num_columns", [96, 101])
def test_a_row_gets_the_same_bits_whatever_its_batch_mates(num_columns, depth):
    x, weight, bias = random(600, depth), random(num_columns, depth), random(num_columns)
    together = linear(x, weight, bias)
    for num_rows in (*range(1, 14), 64, 100):
        assert torch.equal(linear(x[:num_rows], weight, bias), together[:num_rows])
    assert torch.equal(linear(x[599:], weight, bias), together[599:])


@pytest.mark.parametrize("num_rows", [1, 8, 150])
def test_the_number_of_threads_changes_nothing(num_rows):
    x, weight = random(num_rows, 576), random(963, 576)
    before = torch.get_num_threads()
    results = []
    try:
        for num_threads in (1, 2, 7):
            torch.set_num_threads(num_threads)
            results.append(linear(x, weight))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@each_dtype
def test_rows_may_be_a_view(dtype):
    weight, merged = random(24, 64, dtype=dtype), random(90, 200, dtype=dtype)
    for x in (merged[:, 10:74], merged[::3, 1:65], merged[:64, :9].T, merged[:1, :64]):
        assert torch.equal(linear(x, weight), linear(x.contiguous(), weight))


def test_rows_and_weights_may_differ_in_type():
    x, weight = random(3, 100, dtype=torch.float32), random(24, 100)
    assert_is_product(linear(x, weight), x, weight)


@pytest.mark.parametrize("shape", [(0, 5, 64), (3, 0, 64), (3, 5, 0)], ids=["no rows", "no columns", "no depth"])
def test_what_is_empty_stays_empty(shape):
    num_rows, num_columns, depth = shape
    y = linear(random(num_rows, depth), random(num_columns, depth))
    assert y.shape == (num_rows, num_columns)
    assert not y.any()


def test_results_are_rounded_to_even_and_overflow_to_infinity():
    x = torch.tensor([[1.0, 2**-8], [1.0, 3 * 2**-8], [3e38, 3e38], [-3e38, -3e38]]).bfloat16()
    y = linear(x, torch.ones(1, 2).bfloat16())
    assert y.flatten().tolist() == [1.0, 1.015625, math.inf, -math.inf]


def test_nan_stays_in_its_row_and_its_column():
    x, weight = random(9, 70), random(40, 70)
    expected = linear(x, weight)
    x[4, 69] = math.nan
    weight[7, 3] = math.nan
    y = linear(x, weight)
    assert y[4].isnan().all()
    assert y[:, 7].isnan().all()
    y[4], y[:, 7] = expected[4], expected[:, 7]
    assert torch.equal(y, expected)
