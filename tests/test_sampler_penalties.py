"""Penalties, allowed and banned tokens, biases, bad words: what they do to a row of logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.generation.logits_process import NoBadWordsLogitsProcessor, RepetitionPenaltyLogitsProcessor

from helpers_sampler import VOCAB_SIZE, make_logits, make_ramp, make_sequence, sample, sample_often
from paged_backend.sampling.sampler import Sampler

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
