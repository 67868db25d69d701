"""The sampler: which token comes next, and that it depends on nothing but its own sequence."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import paged_kernels
from helpers_sampler import (
    VOCAB_SIZE,
    chi_square,
    make_logits,
    make_ramp,
    make_sequence,
    reference_probabilities,
    sample,
    sample_often,
)
from paged_backend.engine.request import Request, Sequence
from paged_backend.sampling.draw import uniforms
from paged_backend.sampling.sampler import Sampler
from paged_backend.sampling_params import SamplingParams

# Greedy


def test_greedy_takes_the_best_token_whatever_the_filters() -> None:
    logits = make_logits(5)
    sequences = [make_sequence(temperature=0, top_p=0.3, top_k=3, min_p=0.2) for _ in range(5)]
    assert sample(logits, *sequences) == logits.argmax(-1).tolist()


@pytest.mark.parametrize("params", [{"temperature": 1}, {"min_p": 1}, {"top_p": 1}], ids=str)
def test_whole_numbers_compile_no_second_kernel(params: dict[str, Any]) -> None:
    told: list[str] = []
    sample(make_logits(), make_sequence(temperature=0.7, min_p=0.1, top_p=0.9))
    with paged_kernels.telling_of_compilation(lambda: told.append("compiling")):
        sample(make_logits(), make_sequence(**params))

    assert told == []


@pytest.mark.parametrize("params", [{"temperature": 0}, {"top_k": 1}, {"min_p": 1.0}])
def test_what_means_greedy_takes_the_lowest_id_of_equal_ones(params: dict[str, Any]) -> None:
    logits = torch.zeros(1, VOCAB_SIZE)
    logits[0, [7, 9, 30]] = 2.0
    assert set(sample_often(logits, 50, **params)) == {7}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("top_k", [-1, 0, 1, VOCAB_SIZE, 10**6])
@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 1e-6},
        {"temperature": 1e-5},
        {"temperature": 1e-4},
        {"temperature": 1e-3},
        {"top_p": 1e-8},
        {"top_p": 1e-3},
        {"min_p": 1.0},
        {"temperature": 1e-5, "top_p": 1e-8, "min_p": 1.0},
        {"temperature": 2.0, "top_p": 1e-8},
    ],
)
def test_extreme_parameters_give_the_greedy_token(dtype: torch.dtype, top_k: int, params: dict[str, Any]) -> None:
    logits = (make_logits(seed=4) * 10).to(dtype)
    assert set(sample_often(logits, 20, top_k=top_k, **params)) == {int(logits.argmax())}


@pytest.mark.parametrize("params", [{"temperature": 0.01}, {"temperature": 2.0}, {"top_p": 1e-8}, {"min_p": 0.9999}])
def test_tied_logits_give_a_token_of_the_vocabulary(params: dict[str, Any]) -> None:
    for token_id in sample_often(torch.zeros(1, VOCAB_SIZE), 100, **params):
        assert 0 <= token_id < VOCAB_SIZE


# Temperature, min_p, top_k and top_p


@pytest.mark.parametrize("top_k", [0, -1, None, VOCAB_SIZE, 10**6])
def test_top_k_that_is_off_or_beyond_the_vocabulary_keeps_all(top_k: int | None) -> None:
    logits = make_logits()
    assert sample_often(logits, 200, top_k=top_k) == sample_often(logits, 200)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 1.0},
        {"temperature": 0.5},
        {"temperature": 2.0},
        {"temperature": 1.0, "top_k": 5},
        {"temperature": 1.0, "top_p": 0.7},
        {"temperature": 1.5, "min_p": 0.05},
        {"temperature": 1.5, "top_k": 8, "top_p": 0.8},
        {"temperature": 1.5, "min_p": 0.02, "top_k": 12, "top_p": 0.9},
    ],
)
@pytest.mark.parametrize("vocab_size", [VOCAB_SIZE, 2000])
def test_draws_follow_the_distribution_of_the_huggingface_warpers(
    params: dict[str, Any], dtype: torch.dtype, vocab_size: int
) -> None:
    logits = make_logits(vocab_size=vocab_size, seed=1, scale=1.5).to(dtype)
    num = 10000 if vocab_size == VOCAB_SIZE else 2000
    _, group_of_id = np.unique(logits.float().numpy(), return_inverse=True)  # which of equal logits top_p keeps is open
    groups = group_of_id.ravel()
    observed = np.bincount(groups[sample_often(logits, num, **params)], minlength=vocab_size)
    expected = np.bincount(groups, reference_probabilities(logits.float(), **params), minlength=vocab_size)
    assert abs(chi_square(observed, expected * num)) < 5


@given(
    values=st.lists(st.integers(-8, 8), min_size=2, max_size=200),
    temperature=st.floats(0.05, 2.0),
    top_k=st.integers(0, 30),
    top_p=st.floats(0.01, 1.0),
    min_p=st.one_of(st.just(0.0), st.floats(0.0, 1.0)),
    seed=st.integers(0, 2**32),
)
def test_every_draw_is_one_that_the_huggingface_warpers_keep(
    values: list[int], temperature: float, top_k: int, top_p: float, min_p: float, seed: int
) -> None:
    logits = torch.tensor([values], dtype=torch.float32) / 2
    params: dict[str, Any] = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    lenient = params | {"top_p": min(1.0, top_p + 1e-4), "min_p": max(0.0, min_p - 1e-4)}
    kept = np.unique(logits[0].numpy()[reference_probabilities(logits, **lenient) > 0])
    for token_id in sample_often(logits, 10, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p):
        assert values[token_id] / 2 in kept


def test_top_k_keeps_all_that_tie_with_the_last_one() -> None:
    logits = make_ramp(4)
    logits[0, [11, 20, 33]] = 9.5
    assert set(sample_often(logits, 300, top_k=2)) == {4, 11, 20, 33}


def test_top_k_keeps_ties_even_if_they_are_very_many() -> None:
    logits = torch.zeros(1, 1000)
    logits[0, 5] = 1.0
    assert len(set(sample_often(logits, 1000, top_k=2))) > 500


def test_top_p_keeps_the_token_that_crosses_it_and_none_after() -> None:
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    assert set(sample_often(logits, 500, top_p=0.4)) == {0}
    assert set(sample_often(logits, 500, top_p=0.6)) == {0, 1}
    assert set(sample_often(logits, 500, top_p=0.9)) == {0, 1, 2}


def test_top_p_counts_only_what_top_k_left() -> None:
    logits = torch.tensor([[0.4, 0.2, 0.2, 0.2]]).log()
    logits[0, 1] += 0.01
    assert set(sample_often(logits, 500, top_k=2, top_p=0.6)) == {0}
    assert set(sample_often(logits, 500, top_p=0.6)) == {0, 1}


def test_min_p_looks_at_the_tempered_probabilities() -> None:
    logits = torch.tensor([[0.5, 0.25, 0.25]]).log()
    assert set(sample_often(logits, 300, min_p=0.6)) == {0}
    assert set(sample_often(logits, 300, min_p=0.6, temperature=2.0)) == {0, 1, 2}


@pytest.mark.parametrize("params", [{"top_p": 0.9}, {"min_p": 0.1}, {"top_k": 700}, {"top_k": 700, "top_p": 0.9}])
def test_filters_that_keep_very_many_tokens_are_exact(params: dict[str, Any]) -> None:
    logits = make_logits(vocab_size=1000, scale=0.5)
    kept = reference_probabilities(logits, temperature=1.0, **params) > 0
    drawn = np.bincount(sample_often(logits, 2000, **params), minlength=1000)
    assert 300 < kept.sum() < 900
    assert not drawn[~kept].any()
    assert (drawn[kept] > 0).mean() > 0.6


def draw_from_full_sort(logits: torch.Tensor, sequence: Sequence) -> int:
    """What the sampler promises, in the plainest way: all tokens sorted, filtered and summed in float64."""
    params = sequence.request.params
    values = logits[0].double().numpy()
    order = np.lexsort((np.arange(len(values)), -values))
    scaled = (values[order] - values[order[0]]) / params.temperature
    weights = np.exp(scaled)
    kept = weights >= params.min_p
    if params.top_k:
        kept &= values[order] >= values[order][min(params.top_k, len(values)) - 1]
    weights = np.where(kept, weights, 0.0)
    before = np.cumsum(weights) - weights
    weights = np.where(before < params.top_p * weights.sum(), weights, 0.0)
    cumulative = np.cumsum(weights)
    share = uniforms([sequence.seed], [sequence.num_tokens])[0]
    return int(order[(cumulative > share * cumulative[-1]).argmax()])


@pytest.mark.parametrize("vocab_size", [700, 4096, 10007])
@pytest.mark.parametrize("scale", [0.5, 4.0])
@pytest.mark.parametrize(
    "params",
    [
        {"top_k": 2},
        {"top_k": 50, "top_p": 0.9},
        {"top_k": 500},
        {"top_p": 0.3},
        {"top_p": 0.95, "temperature": 0.7},
        {"top_p": 0.999, "temperature": 2.0},
        {"min_p": 0.05},
        {"min_p": 0.3, "top_k": 300, "top_p": 0.9, "temperature": 1.7},
    ],
)
def test_draws_equal_those_from_a_full_sort(vocab_size: int, scale: float, params: dict[str, Any]) -> None:
    for seed in range(6):
        logits = make_logits(vocab_size=vocab_size, seed=seed, scale=scale).bfloat16().float()  # for many ties
        sequence = make_sequence(seed=seed, **params)
        assert sample(logits, sequence) == [draw_from_full_sort(logits, sequence)]


# The draw


@pytest.mark.parametrize("along", ["seeds", "positions"])
def test_uniform_numbers_are_uniform_and_uncorrelated(along: str) -> None:
    num = 100_000
    counting, same = range(num), [12345] * num
    numbers = uniforms(counting, same) if along == "seeds" else uniforms(same, counting)
    assert numbers.min() >= 0.0
    assert numbers.max() < 1.0
    expected = np.full(256, num / 256)
    assert abs(chi_square(np.bincount((numbers * 256).astype(int), minlength=256), expected)) < 4
    cells = (numbers[:-1] * 16).astype(int) * 16 + (numbers[1:] * 16).astype(int)
    assert abs(chi_square(np.bincount(cells, minlength=256), expected)) < 4
    for lag in (1, 2, 3, 7, 64):
        assert abs(np.corrcoef(numbers[:-lag], numbers[lag:])[0, 1]) < 0.015


def test_samples_of_one_request_are_independent() -> None:
    cells = np.zeros((16, 16))
    for seed in range(0, 4000, 2):
        first, second = (uniforms([seed + index] * 20, range(20)) for index in range(2))
        np.add.at(cells, ((first * 16).astype(int), (second * 16).astype(int)), 1)
    assert abs(chi_square(cells.ravel(), np.full(256, cells.sum() / 256))) < 4


def test_seeds_count_modulo_two_to_the_64() -> None:
    assert uniforms([-1], [3]) == uniforms([2**64 - 1], [3])
    assert uniforms([2**64 + 5], [3]) == uniforms([5], [3])
    assert uniforms([-(2**63)], [0]) != uniforms([0], [0])


def test_uniform_numbers_stay_the_same_between_releases() -> None:
    assert uniforms([0, 1, 2**63], [0, 7, 4096]).tolist() == [
        0.6524484863740322,
        0.24696520214533768,
        0.902569828456659,
    ]


def test_a_masked_last_token_is_never_drawn_from_a_large_vocabulary() -> None:
    logits = torch.zeros(1, 262144)
    logits[0, ::2] = -torch.inf
    logits[0, 1000:] = -torch.inf
    for token_id in sample_often(logits, 100):
        assert token_id % 2 == 1
        assert token_id < 1000


def test_rare_tokens_of_a_large_vocabulary_are_as_likely_as_they_should_be() -> None:
    vocab_size = 262144
    logits = torch.zeros(1, vocab_size)
    drawn = np.concatenate([sample_often(logits, 32, prompt=tuple(range(1, n))) for n in range(2, 18)])
    counts = np.bincount(drawn * 16 // vocab_size, minlength=16)
    assert abs(chi_square(counts, np.full(16, len(drawn) / 16))) < 4


def test_the_draw_moves_on_with_the_position() -> None:
    logits = make_logits(scale=0.1)
    drawn = [sample(logits, make_sequence(output=(5,) * num))[0] for num in range(20)]
    assert len(set(drawn)) > 5


# A row of a batch


MIXED: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 1.0, "seed": 1},
    {"temperature": 0.7, "seed": 2},
    {"top_k": 1},
    {"top_k": 20, "seed": 3},
    {"top_k": 200, "top_p": 0.9, "seed": 4},
    {"top_p": 0.95, "temperature": 2.0, "seed": 5},
    {"top_p": 0.3, "seed": 6},
    {"min_p": 0.001, "seed": 7},
    {"logit_bias": {17: 100}},
    {"logit_bias": {17: -100, 3: 2.5}, "seed": 8},
    {"temperature": 0, "repetition_penalty": 1.3, "output": (5, 6, 6)},
    {"frequency_penalty": 1.0, "presence_penalty": 0.5, "output": (5, 6, 6), "seed": 9},
    {"min_tokens": 5, "eos": (0, 2), "seed": 10},
    {"allowed_token_ids": [3, 9, 12], "seed": 11},
    {"bad_words": ((9,), (2, 3), (3, 5)), "seed": 12},
    {"logprobs": 2, "seed": 13},
    {"logprobs": -1, "logprob_token_ids": [3], "temperature": 0},
]


def make_mixed() -> list[Sequence]:
    return [make_sequence(**row) for row in MIXED]


@pytest.mark.parametrize("vocab_size", [VOCAB_SIZE, 1001, 4096])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_row_of_a_mixed_batch_equals_the_row_alone_in_any_order(vocab_size: int, dtype: torch.dtype) -> None:
    sampler = Sampler(vocab_size)
    for trial in range(4):
        logits = make_logits(len(MIXED), vocab_size, seed=trial, scale=1.0 + trial).to(dtype)
        alone = [sampler.sample(logits[row : row + 1].clone(), [item])[0] for row, item in enumerate(make_mixed())]
        order = np.random.default_rng(trial).permutation(len(MIXED))
        sequences = make_mixed()
        together = sampler.sample(logits[order], [sequences[row] for row in order])
        assert together == [alone[row] for row in order]


def test_the_state_kept_with_a_sequence_changes_nothing() -> None:
    sampler = Sampler(VOCAB_SIZE)
    params: dict[str, Any] = {"repetition_penalty": 1.5, "frequency_penalty": 0.7, "min_tokens": 4, "eos": (0,)}
    kept = make_sequence(**params)
    for step in range(12):
        logits = make_logits(seed=step, scale=1.0)
        fresh = make_sequence(output=tuple(kept.token_ids[3:]), **params)
        token = sampler.sample(logits.clone(), [kept])[0]
        assert token == sampler.sample(logits.clone(), [fresh])[0]
        kept.token_ids.append(token.token_id)


def test_samples_of_one_request_draw_with_their_own_seeds() -> None:
    request = Request(request_id="r", prompt_token_ids=[1], params=SamplingParams(n=8), max_tokens=4, seed=2**64 - 1)
    for child in request.sequences[1:]:
        child.token_ids = [1]
    tokens = sample(torch.zeros(8, VOCAB_SIZE), *request.sequences)
    assert len(set(tokens)) > 3
    assert tokens[1:] == [sample(torch.zeros(1, VOCAB_SIZE), make_sequence(prompt=(1,), seed=i))[0] for i in range(7)]


def test_an_empty_batch_gives_no_tokens() -> None:
    assert Sampler(VOCAB_SIZE).sample(torch.zeros(0, VOCAB_SIZE), []) == []


@pytest.mark.parametrize("params", [{"temperature": 0}, {}, {"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}])
@pytest.mark.parametrize("value", [math.nan, -math.inf, math.inf])
def test_logits_without_a_best_token_give_one_of_the_vocabulary(params: dict[str, Any], value: float) -> None:
    logits = make_logits(2, 200)
    logits[0] = value
    first, second = sample(logits, make_sequence(**params), make_sequence(**params))
    assert 0 <= first < 200
    assert second == sample(logits[1:], make_sequence(**params))[0]
