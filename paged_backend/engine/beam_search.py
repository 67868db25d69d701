"""Beam search: which continuations go on, which are finished, and when the search is over.

The rules are those of transformers' `generate(num_beams=...)`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from paged_backend.beam_search_params import BeamSearchParams

Candidate = tuple[int, float]
"""A token that may come next, and its log-probability after penalties."""


class Continuation(NamedTuple):
    """A live beam goes on with a token."""

    parent: int
    """Which one, counted from the best."""
    token_id: int
    logprob: float
    """Of all generated tokens together."""


class Hypothesis(NamedTuple):
    """A finished output."""

    token_ids: list[int]
    """Generated ones."""
    logprob: float
    score: float


class BeamSearch:
    """The state of one search: the log-probabilities of its live beams, and its best finished outputs.

    All live beams have the same number of tokens. Of the continuations of all of them, only the `beam_width` best may
    end an output; the `beam_width` best of those that do not end are the next live beams.
    """

    def __init__(self, params: BeamSearchParams, *, max_tokens: int, end_token_ids: frozenset[int]) -> None:
        self.params = params
        self.logprobs = [0.0]
        """Of the live beams, best first."""
        self.hypotheses: list[Hypothesis] = []
        """Best first, at most `beam_width`."""
        self._max_tokens = max_tokens
        self._end_token_ids = end_token_ids

    @property
    def num_candidates(self) -> int:
        """How many of its best tokens each live beam must name: all that end an output might be among them."""
        return self.params.beam_width + len(self._end_token_ids)

    def select(self, outputs: Sequence[list[int]], candidates: Sequence[list[Candidate]]) -> list[Continuation]:
        """The next live beams, best first; none if the search is over. `outputs` are the tokens of the live beams."""
        width, num_tokens = self.params.beam_width, len(outputs[0]) + 1
        ranked = self._ranked(candidates)
        ends = [num_tokens >= self._max_tokens or item.token_id in self._end_token_ids for item in ranked]
        for item, is_end in zip(ranked[:width], ends, strict=False):
            if is_end:
                self.add(Hypothesis([*outputs[item.parent], item.token_id], item.logprob, 0.0))
        alive = [item for item, is_end in zip(ranked, ends, strict=True) if not is_end][:width]
        if not alive or not self._may_improve(alive[0].logprob, num_tokens):
            return []
        self.logprobs = [item.logprob for item in alive]
        return alive

    def add(self, hypothesis: Hypothesis) -> None:
        """Keep an output, scored by its length, unless `beam_width` better ones are there."""
        score = self._score(hypothesis.logprob, len(hypothesis.token_ids))
        self.hypotheses.append(hypothesis._replace(score=score))
        self.hypotheses.sort(key=lambda item: -item.score)  # stable: of equal ones, the first found stays
        del self.hypotheses[self.params.beam_width :]

    def _ranked(self, candidates: Sequence[list[Candidate]]) -> list[Continuation]:
        continuations = [
            Continuation(parent, token_id, so_far + logprob)
            for parent, (so_far, named) in enumerate(zip(self.logprobs, candidates, strict=True))
            for token_id, logprob in named
        ]
        return sorted(continuations, key=lambda item: -item.logprob)

    def _may_improve(self, best_logprob: float, num_tokens: int) -> bool:
        params = self.params
        if len(self.hypotheses) < params.beam_width:
            return True
        if params.early_stopping is True or params.beam_width == 1:
            return False  # one beam ends where greedy decoding does
        looks_ahead = params.early_stopping == "never" and params.length_penalty > 0
        length = self._max_tokens if looks_ahead else num_tokens
        return self._score(best_logprob, length) > self.hypotheses[-1].score

    def _score(self, logprob: float, num_tokens: int) -> float:
        return logprob / math.pow(max(num_tokens, 1), self.params.length_penalty)
