"""Hidden states to embeddings: over the chunks of a paged step, and over padded batches."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from paged_backend.engine.request import Sequence
from paged_backend.engine.scheduler import ScheduledSequence
from paged_backend.pooling_params import PoolingParams


class _Rows(NamedTuple):
    sequence: Sequence
    num_rows: int
    is_last: bool
    """Whether this step computes the end of the prompt."""


class PooledStep:
    """The embedding requests of one step: which tokens' hidden states they need, and what becomes of them.

    A mean is kept as a running sum over the chunks of its prompt. A preempted sequence begins its prompt again, and so
    its sum.
    """

    def __init__(self, scheduled: list[ScheduledSequence]) -> None:
        self.rows: list[int] = []
        """Where in the pack the tokens are."""
        self._items: list[_Rows] = []
        start = 0
        for sequence, num_tokens, _ in scheduled:
            if sequence.request.pooling is not None:
                self._add(sequence, start, num_tokens, sequence.request.pooling)
            start += num_tokens

    def _add(self, sequence: Sequence, start: int, num_tokens: int, params: PoolingParams) -> None:
        is_last = sequence.num_computed_tokens + num_tokens == sequence.num_tokens
        num_rows = num_tokens if params.needs_every_token else int(is_last)
        self.rows += range(start + num_tokens - num_rows, start + num_tokens)
        self._items.append(_Rows(sequence, num_rows, is_last))

    def collect(self, hidden: Tensor) -> None:
        """Hidden states [P, E] of `rows`; the requests whose prompt ends here have their embedding afterwards."""
        for (sequence, _, is_last), states in zip(
            self._items, torch.split(hidden, [item.num_rows for item in self._items]), strict=True
        ):
            params = sequence.request.pooling
            assert params is not None
            total = states.float().sum(dim=0)
            if sequence.num_computed_tokens and sequence.pooling_state is not None:
                total += sequence.pooling_state
            sequence.pooling_state = total
            if is_last:
                vector = total / sequence.num_tokens if params.needs_every_token else total
                sequence.request.embedding = finished(vector, params)
                sequence.pooling_state = None


def pooled(hidden: Tensor, mask: Tensor, params: PoolingParams) -> Tensor:
    """A vector [E] from one row of a padded batch: hidden states [T, E], of which mask [T] tells the real ones."""
    states = hidden[mask.bool()].float()
    if params.pooling == "mean":
        return states.mean(dim=0)
    return states[0 if params.pooling == "cls" else -1]


def finished(vector: Tensor, params: PoolingParams) -> list[float]:
    """Cut and scaled as asked for."""
    vector = vector[: params.dimensions]
    if params.normalize:
        vector = torch.nn.functional.normalize(vector, dim=0)
    values: list[float] = vector.tolist()
    return values
