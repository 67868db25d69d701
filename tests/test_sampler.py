"""The sampler: which token comes next, and that it depends on nothing but its own sequence."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from paged_backend.engine.request import Request, Sequence
from paged_backend.sampling.draw import uniforms
from paged_backend.sampling.sampler import Sampler
from paged_backend.sampling_params import SamplingParams

VOCAB_SIZE = 40


def make_sequence(
    *,
    prompt: tuple[int, ...] = (1, 2, 3),
    output: tuple[int, ...] = (),
    seed: int = 0,
    eos: tuple[int, ...] = (),
    bad_words: tuple[tuple[int, ...], ...] = (),
    **params: Any,
) -> Sequence:
    request = Request(
        request_id="r",
        prompt_token_ids=list(prompt),
        params=SamplingParams(**params),
        max_tokens=100,
        seed=seed,
        eos_token_ids=frozenset(eos),
        bad_words_token_ids=bad_words,
    )
    sequence = request.sequences[0]
    sequence.token_ids += output
    return sequence


def make_logits(num_rows: int = 1, vocab_size: int = VOCAB_SIZE, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * scale


def make_ramp(*best: int, vocab_size: int = VOCAB_SIZE) -> torch.Tensor:
    """One row in which `best` are the most likely tokens, in this order, and all others less so."""
    logits = torch.zeros(1, vocab_size)
    for place, token_id in enumerate(best):
        logits[0, token_id] = 10.0 - place
    return logits


def sample(logits: torch.Tensor, *sequences: Sequence) -> list[int]:
    tokens = Sampler(logits.shape[1]).sample(logits.clone(), list(sequences))
    return [token.token_id for token in tokens]


def sample_often(logits: torch.Tensor, num: int = 4000, **sequence: Any) -> list[int]:
    """What `num` seeds draw from the same row."""
    sequences = [make_sequence(seed=seed, **sequence) for seed in range(num)]
    return sample(logits.expand(num, -1).contiguous(), *sequences)


def chi_square(observed: np.ndarray, expected: np.ndarray) -> float:
    """In standard deviations above what chance gives; cells that are expected to be rare are put together."""
    rare = expected < 5
    observed = np.append(observed[~rare], observed[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    used = expected > 1e-9
    assert not observed[~used].any()
    freedom = max(1, int(used.sum()) - 1)
    statistic = ((observed - expected)[used] ** 2 / expected[used]).sum()
    return float((statistic - freedom) / math.sqrt(2 * freedom))


def reference_probabilities(logits: torch.Tensor, **params: Any) -> np.ndarray:
    """Of the one row of `logits` by Hugging Face's warpers, in vLLM's order."""
    warpers = LogitsProcessorList([TemperatureLogitsWarper(float(params["temperature"]))])
    if params.get("min_p"):
        warpers.append(MinPLogitsWarper(params["min_p"]))
    if params.get("top_k"):
        warpers.append(TopKLogitsWarper(params["top_k"]))
    if params.get("top_p", 1.0) < 1.0:
        warpers.append(TopPLogitsWarper(params["top_p"]))
    return warpers(torch.zeros(1, 1, dtype=torch.long), logits.clone()).double().softmax(-1)[0].numpy()


# Greedy


def test_greedy_takes_the_best_token_whatever_the_filters() -> None:
    logits = make_logits(5)
    sequences = [make_sequence(temperature=0, top_p=0.3, top_k=3, min_p=0.2) for _ in range(5)]
    assert sample(logits, *sequences) == logits.argmax(-1).tolist()


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


# Penalties


@pytest.mark.parametrize("penalty", [1.5, 0.6])
def test_repetition_penalty_equals_huggingface_from_the_first_step_on(penalty: float) -> None:
    logits = make_logits(seed=3)
    for output in ((), (7, 7, 30), (5,)):
        sequence = make_sequence(prompt=(1, 1, 4, 9), output=output, repetition_penalty=penalty, temperature=0)
        expected = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([sequence.token_ids]), logits.clone())
        scored = logits.clone()
        Sampler(VOCAB_SIZE).sample(scored, [sequence])
        torch.testing.assert_close(scored, expected)


@pytest.mark.parametrize("params", [{"presence_penalty": 2.0}, {"frequency_penalty": 2.0}])
def test_presence_and_frequency_leave_prompt_tokens_alone(params: dict[str, Any]) -> None:
    sequence = make_sequence(prompt=(7, 7, 7), temperature=0, **params)
    assert sample(make_ramp(7, 8), sequence) == [7]


def test_frequency_counts_each_time_and_presence_once() -> None:
    logits = torch.zeros(1, VOCAB_SIZE)
    sequence = make_sequence(
        prompt=(5, 6), output=(6, 6, 8), frequency_penalty=0.5, presence_penalty=0.25, temperature=0
    )
    Sampler(VOCAB_SIZE).sample(logits, [sequence])
    expected = torch.zeros(1, VOCAB_SIZE)
    expected[0, 6], expected[0, 8] = -1.25, -0.75
    torch.testing.assert_close(logits, expected)


def test_negative_penalties_favour_what_is_there() -> None:
    logits = make_ramp(7, 8)
    assert sample(logits, make_sequence(output=(8, 8), frequency_penalty=-1.0, temperature=0)) == [8]


def test_all_penalties_together_follow_the_order_repetition_frequency_presence() -> None:
    logits = make_logits(seed=8)
    raw = logits[0].tolist()
    sequence = make_sequence(
        prompt=(1, 2),
        output=(2, 3, 3),
        repetition_penalty=1.7,
        frequency_penalty=0.3,
        presence_penalty=0.9,
        temperature=0,
    )
    Sampler(VOCAB_SIZE).sample(logits, [sequence])
    for token_id, count in ((1, 0), (2, 1), (3, 2), (4, None)):
        score = raw[token_id]
        if count is not None:
            score = score * 1.7 if score < 0 else score / 1.7
            score -= 0.3 * count + 0.9 * (count > 0)
        assert logits[0, token_id].item() == pytest.approx(score, rel=1e-5)


@pytest.mark.parametrize("penalty", [1e-45, 1e-300, 1e45, 1e300])
@pytest.mark.parametrize("params", [{"temperature": 0}, {"temperature": 0.01}, {"top_p": 0.5}])
def test_absurd_repetition_penalties_do_not_give_nan(penalty: float, params: dict[str, Any]) -> None:
    logits = make_ramp(9)
    logits[0, 1:3] = torch.tensor([5.0, -5.0])
    expected = 1 if penalty < 1 else 9
    assert sample(logits, make_sequence(prompt=(1, 2, 3), repetition_penalty=penalty, **params)) == [expected]


def test_tokens_past_the_vocabulary_are_not_counted() -> None:
    sequence = make_sequence(prompt=(1, VOCAB_SIZE + 7), repetition_penalty=2.0, temperature=0)
    assert sample(make_ramp(8, 1).repeat(2, 1), sequence, make_sequence(temperature=0)) == [8, 8]


# Constraints


def test_only_allowed_ids_are_chosen() -> None:
    assert sample(make_ramp(1, 2, 3), make_sequence(allowed_token_ids=[30, 3, 20], temperature=0)) == [3]
    assert set(sample_often(make_ramp(1, 2, 3), 300, allowed_token_ids=[30, 20], temperature=2.0)) == {20, 30}


def test_where_every_allowed_id_is_banned_the_lowest_of_them_is_taken() -> None:
    params: dict[str, Any] = {"allowed_token_ids": [30, 20], "logit_bias": {20: -100, 30: -100}}
    for way in ({"temperature": 0}, {}, {"top_p": 0.9}, {"top_k": 4}, {"min_p": 0.1}):
        assert sample(make_logits(), make_sequence(**params, **way)) == [20]


@pytest.mark.parametrize("way", [{"temperature": 0}, {"temperature": 2.0}, {"temperature": 2.0, "top_k": 30}])
def test_bias_bans_at_minus_100_and_forces_at_100(way: dict[str, Any]) -> None:
    logits = make_logits() * 100  # differences far above 100
    best, worst = int(logits.argmax()), int(logits.argmin())
    assert best not in sample_often(logits, 100, logit_bias={best: -100}, **way)
    assert set(sample_often(logits, 100, logit_bias={worst: 100}, **way)) == {worst}


def test_a_banned_id_stays_banned_under_a_bias_of_100() -> None:
    sequence = make_sequence(logit_bias={7: 100}, bad_words=((7,),), temperature=0)
    assert sample(make_ramp(3), sequence) == [3]


def test_a_bias_between_is_added() -> None:
    logits = torch.zeros(1, VOCAB_SIZE)
    Sampler(VOCAB_SIZE).sample(logits, [make_sequence(logit_bias={"4": 2.5, 5: -7}, temperature=0)])
    assert logits[0, 3:7].tolist() == [0.0, 2.5, -7.0, 0.0]


@pytest.mark.parametrize("ends", [{"eos": (0, 2)}, {"stop_token_ids": [0, 2]}, {"eos": (0,), "stop_token_ids": [2]}])
def test_end_tokens_are_masked_until_min_tokens(ends: dict[str, Any]) -> None:
    for num_output_tokens, expected in ((0, 5), (2, 5), (3, 0)):
        sequence = make_sequence(output=(9,) * num_output_tokens, min_tokens=3, temperature=0, **ends)
        assert sample(make_ramp(0, 2, 5), sequence) == [expected]


def test_ignored_end_tokens_may_be_generated_but_not_before_min_tokens() -> None:
    assert sample(make_ramp(0, 5), make_sequence(eos=(0,), ignore_eos=True, temperature=0)) == [0]
    assert sample(make_ramp(0, 5), make_sequence(eos=(0,), ignore_eos=True, min_tokens=2, temperature=0)) == [5]


@pytest.mark.parametrize("far", [VOCAB_SIZE + 5, 2**40])
def test_ids_past_the_vocabulary_never_reach_another_row(far: int) -> None:
    first = make_sequence(
        stop_token_ids=[far], min_tokens=5, logit_bias={far: -100.0}, bad_words=((far,), (3, far)), temperature=0
    )
    logits = make_ramp(7, 5).repeat(2, 1)
    assert sample(logits, first, make_sequence(temperature=0)) == [7, 7]
    assert sample(logits, make_sequence(allowed_token_ids=[far, 5], temperature=0), first) == [5, 7]


def test_a_bad_word_of_one_token_is_never_generated() -> None:
    assert sample(make_ramp(7, 8, 9), make_sequence(bad_words=((7,), (8,)), temperature=0)) == [9]


def test_of_a_longer_bad_word_only_the_last_token_is_banned_and_only_after_the_others() -> None:
    new_york = (11, 12)
    assert sample(make_ramp(11, 9), make_sequence(bad_words=(new_york,), temperature=0)) == [11]
    assert sample(make_ramp(12, 9), make_sequence(bad_words=(new_york,), temperature=0)) == [12]
    assert sample(make_ramp(12, 9), make_sequence(output=(11,), bad_words=(new_york,), temperature=0)) == [9]


def test_a_bad_word_may_begin_in_the_prompt() -> None:
    sequence = make_sequence(prompt=(4, 11), output=(12,), bad_words=((11, 12, 13),), temperature=0)
    assert sample(make_ramp(13, 9), sequence) == [9]
    short = make_sequence(prompt=(12,), bad_words=((11, 12, 13),), temperature=0)
    assert sample(make_ramp(13, 9), short) == [13]


@given(
    token_ids=st.lists(st.integers(0, 3), min_size=1, max_size=6),
    words=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=3), min_size=1, max_size=4),
)
def test_bad_words_equal_huggingface(token_ids: list[int], words: list[list[int]]) -> None:
    logits = make_logits(vocab_size=5)
    expected = NoBadWordsLogitsProcessor(words)(torch.tensor([token_ids]), logits.clone())
    bad_words = tuple(map(tuple, words))
    Sampler(5).sample(logits, [make_sequence(prompt=tuple(token_ids), bad_words=bad_words, temperature=0)])
    assert torch.equal(logits, expected)


# Log-probabilities


def test_logprobs_are_of_the_raw_logits_with_the_chosen_token_first() -> None:
    logits = make_logits()
    expected = logits.log_softmax(-1)[0]
    order = expected.argsort(descending=True).tolist()
    sequence = make_sequence(logprobs=3, temperature=0, repetition_penalty=1.5, logit_bias={order[9]: 100})
    token = Sampler(VOCAB_SIZE).sample(logits.clone(), [sequence])[0]
    assert token.token_id == order[9]
    assert token.logprobs is not None
    assert list(token.logprobs) == [order[9], *order[:3]]
    assert [rank for _, rank in token.logprobs.values()] == [10, 1, 2, 3]
    for token_id, (logprob, _) in token.logprobs.items():
        assert logprob == pytest.approx(expected[token_id].item(), abs=1e-6)


def test_logprobs_come_only_to_rows_that_asked() -> None:
    sequences = [make_sequence(temperature=0, logprobs=asked) for asked in (None, 0, 2, None)]
    tokens = Sampler(VOCAB_SIZE).sample(make_logits(4), sequences)
    assert [token.logprobs and len(token.logprobs) for token in tokens] == [None, 1, 2, None]


def test_logprobs_of_minus_one_are_the_whole_vocabulary() -> None:
    logits = make_logits()
    (logprobs,) = [token.logprobs for token in Sampler(VOCAB_SIZE).sample(logits.clone(), [make_sequence(logprobs=-1)])]
    assert logprobs is not None
    assert sorted(logprobs) == list(range(VOCAB_SIZE))
    assert sum(math.exp(logprob) for logprob, _ in logprobs.values()) == pytest.approx(1.0, abs=1e-5)


def test_more_logprobs_than_tokens_are_the_whole_vocabulary() -> None:
    token = Sampler(VOCAB_SIZE).sample(make_logits(), [make_sequence(logprobs=1000)])[0]
    assert token.logprobs is not None
    assert len(token.logprobs) == VOCAB_SIZE


def test_equal_tokens_share_their_rank_and_the_lower_ids_come_first() -> None:
    logits = make_ramp(20)
    logits[0, [3, 30, 31]] = 9.0
    token = Sampler(VOCAB_SIZE).sample(logits, [make_sequence(temperature=0, logprobs=3, logit_bias={31: 100})])[0]
    assert token.logprobs is not None
    assert [(token_id, rank) for token_id, (_, rank) in token.logprobs.items()] == [(31, 2), (20, 1), (3, 2), (30, 2)]


def test_extra_ids_are_added_with_their_ranks() -> None:
    logits = make_ramp(20, 21, 22, 23)
    sequence = make_sequence(temperature=0, logprobs=1, logprob_token_ids=[23, 5, 20, VOCAB_SIZE + 3])
    token = Sampler(VOCAB_SIZE).sample(logits, [sequence])[0]
    assert token.logprobs is not None
    assert {token_id: rank for token_id, (_, rank) in token.logprobs.items()} == {20: 1, 23: 4, 5: 5}


@pytest.mark.parametrize("num", [0, 2, -1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_prompt_logprobs_are_those_of_each_token_and_the_best(num: int, dtype: torch.dtype) -> None:
    token_ids = [index * 7 % VOCAB_SIZE for index in range(150)]
    logits = make_logits(len(token_ids)).to(dtype)
    expected = logits.float().log_softmax(-1)
    result = Sampler(VOCAB_SIZE).prompt_logprobs(logits, token_ids, num)
    assert len(result) == len(token_ids)
    for row, (token_id, logprobs) in enumerate(zip(token_ids, result, strict=True)):
        assert next(iter(logprobs)) == token_id
        assert len(logprobs) in ({VOCAB_SIZE} if num == -1 else {num, num + 1})
        for other, (logprob, rank) in logprobs.items():
            assert logprob == pytest.approx(expected[row, other].item(), rel=1e-6, abs=1e-6)
            assert rank == 1 + int((expected[row] > expected[row, other]).sum())


def test_no_prompt_tokens_give_no_logprobs() -> None:
    assert Sampler(VOCAB_SIZE).prompt_logprobs(torch.zeros(0, VOCAB_SIZE), [], 1) == []
