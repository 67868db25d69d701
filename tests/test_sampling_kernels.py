"""Draws and log-probabilities by the kernels for CPUs are what their definitions in plain torch say."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import paged_kernels
from helpers_draws import FILTERS
from paged_kernels import reference

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def make_logits(num_rows: int, vocab_size: int, *, seed: int = 0, scale: float = 3.0) -> Tensor:
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * scale


def draw(
    logits: Tensor,
    shares: list[float],
    *,
    temperature: float = 1.0,
    min_p: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    by: Any = paged_kernels,
) -> list[int]:
    filters = [torch.full((len(logits),), value, dtype=torch.float64) for value in (temperature, min_p)]
    filters += [torch.full((len(logits),), top_k), torch.full((len(logits),), top_p, dtype=torch.float64)]
    tokens: list[int] = by.draw(logits, *filters, torch.tensor(shares, dtype=torch.float64)).tolist()
    return tokens


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("filters", FILTERS, ids=str)
@pytest.mark.parametrize("vocab_size", [1, 63, 5000, 49152])
def test_draws_are_as_defined(vocab_size: int, filters: dict[str, Any], dtype: torch.dtype) -> None:
    logits = make_logits(12, vocab_size).to(dtype)
    shares = torch.rand(12, generator=torch.Generator().manual_seed(1)).tolist()
    assert draw(logits, shares, **filters) == draw(logits, shares, **filters, by=reference)


@settings(deadline=None)
@given(
    values=st.lists(st.integers(-8, 8) | st.just(-1000), min_size=2, max_size=300),
    filters=st.sampled_from(FILTERS),
    share=st.floats(0, 1, exclude_max=True),
)
def test_draws_with_many_ties_are_as_defined(values: list[int], filters: dict[str, Any], share: float) -> None:
    logits = torch.tensor([values], dtype=torch.float32) / 2
    (actual,), (expected,) = (draw(logits, [share], **filters, by=by) for by in (paged_kernels, reference))
    # A share that falls on the border of two tokens may round to either.
    nearby = {draw(logits, [min(max(share + d, 0), 1)], **filters, by=reference)[0] for d in (-1e-6, 1e-6)}
    assert actual in {expected} | nearby


@pytest.mark.parametrize("filters", FILTERS, ids=str)
@pytest.mark.parametrize("share", [0.0, 0.5, 1 - 2**-53, 1.0])
def test_a_token_of_probability_zero_is_never_drawn(share: float, filters: dict[str, Any]) -> None:
    logits = torch.full((1, 5000), -torch.inf)
    logits[0, 700:900:2] = torch.arange(100) * 0.1
    (token_id,) = draw(logits, [share], **filters)
    assert logits[0, token_id] > -torch.inf


@pytest.mark.parametrize("filters", FILTERS, ids=str)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_row_without_numbers_gives_some_token_and_leaves_the_others_alone(
    value: float, filters: dict[str, Any]
) -> None:
    logits = make_logits(3, 1000)
    expected = draw(logits, [0.3] * 3, **filters)
    logits[1] = value
    tokens = draw(logits, [0.3] * 3, **filters)
    assert 0 <= tokens[1] < 1000
    assert [tokens[0], tokens[2]] == [expected[0], expected[2]]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num", [0, 1, 5, 100, 700])
def test_best_logits_are_as_defined(num: int, dtype: torch.dtype) -> None:
    logits = make_logits(9, 700).to(dtype)
    chosen = torch.arange(9) * 70
    actual = paged_kernels.best_logits(logits, chosen, num)
    expected = reference.best_logits(logits, chosen, num)
    torch.testing.assert_close(actual[0], expected[0])
    for ours, defined in zip(actual[1:], expected[1:], strict=True):
        assert torch.equal(ours, defined)


@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_the_number_of_threads_changes_nothing(num_threads: int) -> None:
    logits, shares = make_logits(11, 3000), torch.linspace(0, 1, 11).tolist()
    expected = draw(logits, shares, top_p=0.9)
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        assert draw(logits, shares, top_p=0.9) == expected
    finally:
        torch.set_num_threads(before)
