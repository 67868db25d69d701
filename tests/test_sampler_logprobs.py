"""Log-probabilities of what was chosen, of the best, and of prompts."""

from __future__ import annotations

import math

import pytest
import torch

from helpers_sampler import VOCAB_SIZE, make_logits, make_ramp, make_sequence
from paged_backend.sampling.sampler import Sampler

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
