"""Penalties on tokens that a sequence has already: repetition, frequency and presence."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

import paged_kernels
from paged_backend.sampling_params import SamplingParams
from paged_kernels.transfers import to_device

_LOWEST_REPETITION, _HIGHEST_REPETITION = 1e-30, 1e30
"""Beyond these a penalty turns float32 logits into infinities; within, it has long forced or banned the token."""


class TokenCounts:
    """The distinct tokens of one sequence, and how often each was generated.

    Derived from the tokens alone: it counts those that it has not counted yet, so it may be dropped and made anew at
    any time. Prompt tokens are held with a count of 0, and only if they are asked for.
    """

    def __init__(self, vocab_size: int, *, include_prompt: bool) -> None:
        self._vocab_size = vocab_size
        self._include_prompt = include_prompt
        self._num_counted = 0
        self._ids = array("q")
        self._counts = array("f")
        self._slot_of_id: dict[int, int] = {}

    def catch_up(self, token_ids: Sequence[int], num_prompt_tokens: int) -> None:
        if self._num_counted == 0:
            if self._include_prompt:
                self._add(dict.fromkeys(token_ids[:num_prompt_tokens]), 0.0)
            self._num_counted = num_prompt_tokens
        self._add(token_ids[self._num_counted :], 1.0)
        self._num_counted = len(token_ids)

    def _add(self, token_ids: Sequence[int] | dict[int, None], times: float) -> None:
        for token_id in token_ids:
            if token_id >= self._vocab_size:
                continue  # a placeholder of another modality: it has no logit
            slot = self._slot_of_id.setdefault(token_id, len(self._ids))
            if slot == len(self._ids):
                self._ids.append(token_id)
                self._counts.append(0.0)
            self._counts[slot] += times

    @property
    def ids(self) -> npt.NDArray[np.int64]:
        return np.array(self._ids, dtype=np.int64)

    @property
    def counts(self) -> npt.NDArray[np.float32]:
        return np.array(self._counts, dtype=np.float32)


class PenalisedRow(NamedTuple):
    """A row of the logits, the tokens counted for it, and its penalties."""

    row: int
    tokens: TokenCounts
    params: SamplingParams


def has_penalties(params: SamplingParams) -> bool:
    return params.repetition_penalty != 1.0 or params.frequency_penalty != 0.0 or params.presence_penalty != 0.0


def apply_penalties(logits: torch.Tensor, penalised: Sequence[PenalisedRow]) -> None:
    """Changes `logits` [S, V] in place: first repetition, as in CTRL (arXiv:1909.05858), then OpenAI's other two.

    Positive logits of the row's tokens are divided by the repetition penalty and negative ones multiplied; then
    frequency times the count, and presence for a count above 0, are subtracted.
    """
    ids = [item.tokens.ids for item in penalised]
    sizes = [len(row_ids) for row_ids in ids]
    subtracted = [_subtracted(item) for item in penalised]
    repetition = [
        min(max(item.params.repetition_penalty, _LOWEST_REPETITION), _HIGHEST_REPETITION) for item in penalised
    ]

    columns = (
        np.repeat([item.row for item in penalised], sizes),
        np.concatenate(ids),
        np.repeat(np.array(repetition, dtype=np.float32), sizes),
        np.concatenate(subtracted),
    )
    paged_kernels.penalise(logits, *(to_device(column, logits.device) for column in columns))


def _subtracted(item: PenalisedRow) -> npt.NDArray[np.float32]:
    counts = item.tokens.counts
    amounts = item.params.frequency_penalty * counts + item.params.presence_penalty * (counts > 0)
    return amounts.astype(np.float32)
