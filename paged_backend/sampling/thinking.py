"""`thinking_token_budget`: which token must come next because there was enough reasoning."""

from __future__ import annotations

import torch

from paged_backend.engine.request import ReasoningMarks

_REPLACEMENT = "\ufffd"
_MAX_OPEN = 3
"""Tokens past the budget that may be needed to end a character."""
_MAX_OPENING = 64
"""Tokens within which a model opens its reasoning, if it does."""


class ThinkingBudget:
    """Follows one output. Derived from its tokens alone, so that it may be made anew at any time."""

    def __init__(self, marks: ReasoningMarks, budget: int, num_prompt_tokens: int) -> None:
        self._marks = marks
        self._budget = budget
        self._num_prompt_tokens = num_prompt_tokens
        self._start: int | None = num_prompt_tokens if marks.is_open else None
        """Where the reasoning begins, once that is known."""
        self._forced_from: int | None = num_prompt_tokens if marks.is_open and not budget else None
        """Where its forced end begins, once that is known."""
        self._num_checked = num_prompt_tokens
        self._is_over = False
        self._num_end_tokens = len(marks.end.encode()) + 1
        """That many tokens hold the end mark, however the model spells it."""

    def next_token(self, token_ids: list[int]) -> int | None:
        """The token that must follow the prompt and the output, or None if any may."""
        while self._num_checked < len(token_ids) and not self._is_over:
            self._num_checked += 1
            self._check(token_ids, self._num_checked)
        if self._is_over or self._forced_from is None:
            return None
        num_forced = len(token_ids) - self._forced_from
        return self._marks.closing_ids[num_forced] if num_forced < len(self._marks.closing_ids) else None

    def _check(self, token_ids: list[int], end: int) -> None:
        """Look at what there was when token `end - 1` came."""
        if self._start is None:
            self._look_for_start(self._marks.decode(token_ids[self._num_prompt_tokens : end]).lstrip(), end)
        elif self._forced_from is None:
            tail = self._marks.decode(token_ids[max(self._start, end - self._num_end_tokens) : end])
            num_beyond = end - self._start - self._budget
            self._is_over = self._marks.end in tail
            if num_beyond >= 0 and (not tail.endswith(_REPLACEMENT) or num_beyond >= _MAX_OPEN):
                self._forced_from = end

    def _look_for_start(self, text: str, end: int) -> None:
        if text.startswith(self._marks.start):
            self._start = end
            self._forced_from = None if self._budget else end
        elif not self._marks.start.startswith(text) or end - self._num_prompt_tokens > _MAX_OPENING:
            self._is_over = True  # it goes without


def force_tokens(logits: torch.Tensor, forced: dict[int, int]) -> None:
    """Changes `logits` [S, V] in place: in each of these rows, its token alone is possible."""
    rows, token_ids = list(forced), list(forced.values())
    logits[rows] = -torch.inf
    logits[rows, token_ids] = 0.0
