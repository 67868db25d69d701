"""Sequences and logits for the sampler, and what other code makes of them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from paged_backend.engine.request import Request, Sequence
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
