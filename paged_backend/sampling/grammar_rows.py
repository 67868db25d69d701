"""The rows of a step whose outputs follow a grammar: masked before the draw, and moved on after it."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from collections.abc import Sequence as Items
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from paged_backend.engine.request import Sequence
from paged_backend.errors import GrammarError
from paged_backend.sampling.grammar import Bitmask, GrammarMatcher
from paged_kernels import mask_logits


class Verdict(NamedTuple):
    """What a row's grammar says to the token that was chosen."""

    is_complete: bool = False
    """Nothing may follow."""
    error: GrammarError | None = None


class _Row:
    """One output and its matcher. A row that fails goes on without a mask until the step is over."""

    def __init__(self, row: int, sequence: Sequence, matcher: GrammarMatcher) -> None:
        self.row = row
        self._matcher = matcher
        self._output = sequence.token_ids[sequence.num_prompt_tokens :]
        self._stop_token_ids = sequence.request.stop_token_ids
        self.num_words = matcher.num_words
        self._added: set[int] = set()
        self._error: GrammarError | None = None

    def fill(self, bitmask: Bitmask) -> None:
        try:
            self._matcher.catch_up(self._output)
            self._matcher.fill(bitmask)
        except GrammarError as error:
            self._error = error
            bitmask.fill(-1)
        if self._stop_token_ids and self._matcher.may_end:
            self._allow_stop_tokens(bitmask.view(np.uint32))

    def _allow_stop_tokens(self, words: np.ndarray[tuple[int], np.dtype[np.uint32]]) -> None:
        """Where the output may end, it may end by the user's stop tokens as well."""
        for token_id in self._stop_token_ids:
            bit = np.uint32(1 << token_id % 32)
            if not words[token_id // 32] & bit:
                words[token_id // 32] |= bit
                self._added.add(token_id)

    def advance(self, token_id: int) -> Verdict:
        if self._error is not None:
            return Verdict(error=self._error)
        if token_id in self._added:
            return Verdict(is_complete=True)
        try:
            self._matcher.catch_up([*self._output, token_id])
        except GrammarError as error:
            return Verdict(error=error)
        return Verdict(self._matcher.is_complete)


class GrammarRows:
    """One step's rows with a grammar. An error of one of them is that row's verdict, and changes no other row."""

    def __init__(self, rows: Iterable[tuple[int, Sequence, GrammarMatcher]]) -> None:
        self._rows = [_Row(*row) for row in rows]
        self._num_words = self._rows[0].num_words if self._rows else 0

    def mask(self, logits: torch.Tensor) -> None:
        """Changes `logits` [S, V] in place: what a row's grammar does not allow becomes -inf."""
        if self._rows:
            rows = torch.tensor([row.row for row in self._rows])
            mask_logits(logits, rows, torch.from_numpy(self._bitmask))

    @functools.cached_property
    def _bitmask(self) -> npt.NDArray[np.int32]:
        """What the rows allow [R, W]."""
        bitmask = np.empty((len(self._rows), self._num_words), np.int32)
        for row, words in zip(self._rows, bitmask, strict=True):
            row.fill(words)
        return bitmask

    def advance(self, chosen: Items[int]) -> dict[int, Verdict]:
        """Reads the token chosen in each row of the step; verdicts by row."""
        return {row.row: row.advance(chosen[row.row]) for row in self._rows}
