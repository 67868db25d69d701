"""Draws and log-probabilities by the Triton kernels, interpreted, are what their definitions in plain torch say."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from helpers_draws import FILTERS
from helpers_triton import poisoned_empty, watched_memory
from paged_kernels import reference, triton_sampling

pytestmark = [pytest.mark.timeout(200), pytest.mark.filterwarnings("ignore:.*encountered in")]


@pytest.fixture(autouse=True)
def memory(monkeypatch):
    poisoned_empty(monkeypatch)
    with watched_memory() as launches:
        yield launches


def make_logits(num_rows: int, vocab_size: int, *, dtype: torch.dtype = torch.float32, scale: float = 3.0) -> Tensor:
    return (torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(0)) * scale).to(dtype)


def make_filters(num_rows: int, *, temperature: float = 1.0, min_p: float = 0.0, top_k: int = 0, top_p: float = 1.0):
    wide = [torch.full((num_rows,), value, dtype=torch.float64) for value in (temperature, min_p, top_p)]
    return [*wide[:2], torch.full((num_rows,), top_k), wide[2]]


def make_shares(*shares: float) -> Tensor:
    return torch.tensor(shares, dtype=torch.float64)


each_filter = pytest.mark.parametrize("filters", FILTERS, ids=str)


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)], ids=str)
def test_each_row_is_drawn_by_its_own_filters(dtype):
    many = [make_filters(1, **filters) for filters in FILTERS]
    filters = [torch.cat(column) for column in zip(*many, strict=True)]
    arguments = (make_logits(len(many), 1000, dtype=dtype), *filters, torch.linspace(0, 1, len(many)).double())
    assert torch.equal(triton_sampling.draw(*arguments), reference.draw(*arguments))


@pytest.mark.slow
@each_filter
def test_draws_are_as_defined(filters):
    arguments = (make_logits(3, 1500), *make_filters(3, **filters), make_shares(0.1, 0.55, 0.93))
    assert torch.equal(triton_sampling.draw(*arguments), reference.draw(*arguments))


LAST = 1 - 2**-53
"""Falls on the last token that is kept."""


def test_the_last_token_that_is_kept_can_be_drawn_and_none_behind_it():
    many = [{"top_k": k} for k in (2, 3, 50, 900)] + [{"top_p": p} for p in (0.3, 0.5, 0.95)] + [{"min_p": 0.1}]
    filters = [torch.cat(column) for column in zip(*(make_filters(1, **one) for one in many), strict=True)]
    arguments = (make_logits(len(many), 1000), *filters, make_shares(*[LAST] * len(many)))
    assert torch.equal(triton_sampling.draw(*arguments), reference.draw(*arguments))


@pytest.mark.parametrize("min_p", [0.1, 0.3, 0.5, 0.7])
def test_the_border_of_min_p_is_exact(min_p):
    logits = torch.full((1, 40), -30.0)
    border = torch.tensor(min_p, dtype=torch.float64).log().float()
    logits[0, 7], logits[0, 11] = 0.0, border
    logits[0, 12], logits[0, 13] = border.nextafter(logits[0, 7]), border.nextafter(logits[0, 0])
    arguments = (logits, *make_filters(1, min_p=min_p), make_shares(LAST))
    assert torch.equal(triton_sampling.draw(*arguments), reference.draw(*arguments))


def test_zeros_of_either_sign_are_equal():
    logits = torch.tensor([[0.0, -0.0, -0.0, 0.0, -1.0]])
    for share in (0.1, 0.3, 0.6, 0.9):
        arguments = (logits, *make_filters(1, top_p=0.8), make_shares(share))
        assert torch.equal(triton_sampling.draw(*arguments), reference.draw(*arguments))


@pytest.mark.parametrize("vocab_size", [1, 2, 63])
def test_small_vocabularies_work(vocab_size):
    arguments = (make_logits(1, vocab_size), *make_filters(1, top_k=2, top_p=0.9), make_shares(0.5))
    assert torch.equal(triton_sampling.draw(*arguments), reference.draw(*arguments))


@pytest.mark.parametrize("share", [0.52, *(pytest.param(one, marks=pytest.mark.slow) for one in (0.0, 0.21, 0.999))])
@pytest.mark.parametrize("filters", [{}, {"top_k": 50}, {"top_p": 0.5}, {"min_p": 0.02}], ids=str)
def test_of_equal_logits_the_lower_ids_come_first(filters, share):
    arguments = (make_logits(1, 300, scale=1.0).round(), *make_filters(1, **filters), make_shares(share))
    assert torch.equal(triton_sampling.draw(*arguments), reference.draw(*arguments))


@pytest.mark.slow
@pytest.mark.parametrize("filters", [{"top_k": 18000}, {"top_p": 0.9999, "temperature": 9.0}, {"min_p": 1e-9}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_more_tokens_may_be_left_than_there_is_room_for_notes(dtype, filters):
    arguments = (make_logits(1, 20000, dtype=dtype), *make_filters(1, **filters), make_shares(0.7))
    assert torch.equal(triton_sampling.draw(*arguments), reference.draw(*arguments))


@pytest.mark.slow
@each_filter
def test_draws_from_a_large_vocabulary_are_as_defined(filters):
    arguments = (make_logits(2, 49152), *make_filters(2, **filters), make_shares(0.31, 0.77))
    assert torch.equal(triton_sampling.draw(*arguments), reference.draw(*arguments))


@pytest.mark.parametrize(
    "filters", [{}, *(pytest.param(one, marks=pytest.mark.slow) for one in FILTERS if len(one) == 1)], ids=str
)
def test_a_token_of_probability_zero_is_never_drawn(filters):
    logits = torch.full((3, 1000), -torch.inf)
    logits[:, 700:900:2] = torch.arange(100) * 0.1
    tokens = triton_sampling.draw(logits, *make_filters(3, **filters), make_shares(0.0, 1 - 2**-53, 1.0))
    assert (logits.gather(1, tokens[:, None]) > -torch.inf).all()


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("filters", [{}, {"temperature": 0.0}, {"top_k": 50}, {"top_p": 0.9}, {"min_p": 0.1}], ids=str)
def test_a_row_without_numbers_gives_some_token(filters, value):
    (token,) = triton_sampling.draw(torch.full((1, 300), value), *make_filters(1, **filters), make_shares(0.3)).tolist()
    assert 0 <= token < 300


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num", [0, 1, 20, 100])
def test_best_logits_are_as_defined(num, dtype):
    logits, chosen = make_logits(3, 700, dtype=dtype), torch.tensor([0, 699, 70])
    normalisers, *actual = triton_sampling.best_logits(logits, chosen, num)
    expected_normalisers, *expected = reference.best_logits(logits, chosen, num)
    torch.testing.assert_close(normalisers, expected_normalisers)
    for ours, defined in zip(actual, expected, strict=True):
        assert torch.equal(ours, defined) and ours.dtype == defined.dtype


def test_a_mask_changes_the_rows_that_it_is_for():
    actual, expected = make_logits(4, 5000), make_logits(4, 5000)
    rows = torch.tensor([2, 0])
    bitmask = torch.randint(-(2**31), 2**31, (2, 157), dtype=torch.int32, generator=torch.Generator().manual_seed(0))
    triton_sampling.mask_logits(actual, rows, bitmask)
    reference.mask_logits(expected, rows, bitmask)
    assert torch.equal(actual, expected) and expected.isneginf().any()


def test_penalties_are_as_defined():
    actual, expected = make_logits(3, 1000), make_logits(3, 1000)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randperm(1000, generator=generator)[:300].repeat(2)
    rows = torch.tensor([0, 2]).repeat_interleave(300)
    repetition, subtracted = torch.rand(2, 600, generator=generator) + 0.5
    triton_sampling.penalise(actual, rows, ids, repetition, subtracted)
    reference.penalise(expected, rows, ids, repetition, subtracted)
    assert torch.equal(actual, expected) and not torch.equal(expected, make_logits(3, 1000))


def test_nothing_is_done_without_rows():
    empty, floats = torch.empty(0, dtype=torch.int64), torch.empty(0)
    logits = make_logits(0, 100)
    assert triton_sampling.draw(logits, *make_filters(0), make_shares()).shape == (0,)
    assert triton_sampling.best_logits(logits, empty, 3)[2].shape == (0, 3)
    triton_sampling.penalise(logits, empty, empty, floats, floats)
    triton_sampling.mask_logits(logits, empty, torch.empty(0, 4, dtype=torch.int32))
