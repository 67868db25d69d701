"""Speculative tokens: guesses at how sequences go on, and which of them a step checks.

A guess costs a row of a step and, if it is right, gives one token more. It cannot change an output: the token at its
place is drawn as it would have been without it, and only then compared.
"""

from __future__ import annotations

from collections.abc import Iterator

from paged_backend.config import SpeculativeConfig
from paged_backend.engine.ngram import NgramIndex
from paged_backend.engine.request import Sequence

_FIRST_ACCEPTANCE = 0.5
_WEIGHT_OF_NEWEST = 0.15
_ROWS_PER_READ = 12.0
"""With this many rows, a step's arithmetic takes as long as reading the weights, which is the same for any number."""


class Drafter:
    """Guesses the next tokens of one sequence, and keeps how often its guesses are right.

    Every guess is compared with what came, whether a step has checked it or not. So it costs nothing to find out that a
    sequence has begun, or ceased, to repeat itself. Derived from the tokens: preemption does not touch it.
    """

    def __init__(self, config: SpeculativeConfig) -> None:
        self.acceptance = _FIRST_ACCEPTANCE
        """Of a guess that follows right ones, from 0 to 1; newer guesses weigh more."""
        self._index = NgramIndex(config.lookup_sizes)
        self._num_guesses = config.num_speculative_tokens
        self._guessed: list[int] = []
        self._num_tokens = 0
        """How many there were before the guess."""

    def guess(self, token_ids: list[int]) -> list[int]:
        for guessed, token_id in zip(self._guessed, token_ids[self._num_tokens :], strict=False):
            self.acceptance += _WEIGHT_OF_NEWEST * ((guessed == token_id) - self.acceptance)
            if guessed != token_id:
                break
        self._guessed = self._index.continuation(token_ids, self._num_guesses)
        self._num_tokens = len(token_ids)
        return self._guessed


class Speculator:
    """Decides whose guesses a step checks."""

    def __init__(self, config: SpeculativeConfig) -> None:
        self._config = config

    def drafts(
        self, sequences: list[Sequence], limits: list[int], num_rows: int, max_rows: int
    ) -> Iterator[tuple[int, list[int]]]:
        """Index and draft tokens of each sequence that gets some, `limits[index]` at most; the step has `num_rows` rows
        without them, and may have `max_rows`.

        Another row makes more tokens per second if the chance that it gives one is above the share of the step's time
        that grows with its rows. With few rows that is little, with many it is nearly all.
        """
        drafters = [self._drafter(sequence) for sequence in sequences]
        guesses = [drafter.guess(sequence.token_ids) for drafter, sequence in zip(drafters, sequences, strict=True)]
        for index in sorted(range(len(sequences)), key=lambda index: -drafters[index].acceptance):
            most = min(len(guesses[index]), limits[index], max_rows - num_rows)
            num = _num_worth_checking(drafters[index].acceptance, num_rows, most)
            if num > 0:
                num_rows += num
                yield index, guesses[index][:num]

    def _drafter(self, sequence: Sequence) -> Drafter:
        if not isinstance(sequence.drafter, Drafter):
            sequence.drafter = Drafter(self._config)
        return sequence.drafter


def _num_worth_checking(acceptance: float, num_rows: int, most: int) -> int:
    """The k-th guess is right only if those before it are, which has a chance of `acceptance ** k`."""
    num = 0
    while num < most and acceptance ** (num + 1) > (num_rows + num) / (num_rows + num + _ROWS_PER_READ):
        num += 1
    return num
