"""Tokens that must, must not, or should come next: allowed ids, bad words, `min_tokens` and `logit_bias`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from paged_backend.engine.request import Request
from paged_kernels.transfers import to_device

Ids = npt.NDArray[np.int64]

FORCED_BIAS = 1e5
"""What a `logit_bias` of 100 adds: more than any difference of logits, and than any sum of frequency penalties."""
_BANNED_BELOW = -100.0
_NO_IDS: Ids = np.empty(0, np.int64)


class Constraints:
    """What a request's parameters say about token ids, as arrays; ids outside the vocabulary are left out."""

    def __init__(self, request: Request, vocab_size: int) -> None:
        params = request.params
        self._min_tokens = params.min_tokens
        self.allowed: Ids | None = None
        if params.allowed_token_ids is not None:
            self.allowed = _in_vocabulary(params.allowed_token_ids, vocab_size)
        bias = params.logit_bias or {}
        self.biased = _in_vocabulary([i for i, value in bias.items() if value > _BANNED_BELOW], vocab_size)
        self.biases = np.array([_effective_bias(bias[i]) for i in self.biased.tolist()], np.float32)
        words = request.bad_words_token_ids
        banned = [word[0] for word in words if len(word) == 1] + [i for i, b in bias.items() if b <= _BANNED_BELOW]
        if request.grammar is not None and params.ignore_eos:
            banned += request.eos_token_ids  # the one way to end that a grammar offers as long as it may go on
        self._banned = _in_vocabulary(banned, vocab_size)
        ends = request.end_token_ids | request.eos_token_ids if params.min_tokens else ()
        self._banned_early = np.concatenate([self._banned, _in_vocabulary(ends, vocab_size)])
        self._words_by_tail: dict[int, list[tuple[int, ...]]] = {}
        for word in words:
            if len(word) > 1 and word[-1] < vocab_size:
                self._words_by_tail.setdefault(word[-2], []).append(word)

        arrays = (self.biased, self._banned_early)
        self._are_any = self.allowed is not None or bool(self._words_by_tail) or any(len(ids) for ids in arrays)

    @property
    def fallback(self) -> int:
        """The token of a row in which everything is banned: the lowest allowed one."""
        return int(self.allowed[0]) if self.allowed is not None and len(self.allowed) else 0

    def __bool__(self) -> bool:
        return self._are_any

    @property
    def need_tokens(self) -> bool:
        """Whether what is banned depends on the tokens before, and not on their number alone."""
        return bool(self._words_by_tail)

    def banned(self, token_ids: list[int], num_output_tokens: int) -> Ids:
        """Ids that must not follow `token_ids`, end tokens too while fewer than `min_tokens` are generated."""
        banned = self._banned_early if num_output_tokens < self._min_tokens else self._banned
        if not self._words_by_tail:
            return banned
        completing = [word[-1] for word in self._words_by_tail.get(token_ids[-1], ()) if _ends_in(token_ids, word[:-1])]
        return np.concatenate([banned, np.array(completing, np.int64)])


class ConstrainedRow(NamedTuple):
    """A row of the logits, its constraints, the ids banned from it in this step, and the one to take if all are."""

    row: int
    constraints: Constraints
    banned: Ids
    fallback: int


def apply_constraints(logits: torch.Tensor, constrained: Sequence[ConstrainedRow]) -> None:
    """Changes `logits` [S, V] in place: what is not allowed or banned becomes -inf, then biases are added."""
    restricted = [(item.row, item.constraints.allowed) for item in constrained if item.constraints.allowed is not None]
    if restricted:
        index = _index(restricted, logits.device)
        kept = logits[index]
        logits[to_device(np.array([row for row, _ in restricted]), logits.device)] = -torch.inf
        logits[index] = kept
    logits[_index([(item.row, item.banned) for item in constrained], logits.device)] = -torch.inf
    biases = np.concatenate([item.constraints.biases for item in constrained])
    if len(biases):
        index = _index([(item.row, item.constraints.biased) for item in constrained], logits.device)
        logits[index] += to_device(biases, logits.device)


def _index(rows_and_ids: Sequence[tuple[int, Ids]], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    rows = np.repeat([row for row, _ in rows_and_ids], [len(ids) for _, ids in rows_and_ids])
    ids = np.concatenate([ids for _, ids in rows_and_ids])
    return to_device(rows, device), to_device(ids, device)


def _in_vocabulary(ids: Iterable[int], vocab_size: int) -> Ids:
    """Sorted, each once; an id past the end of its row would land in another request's."""
    kept = {token_id for token_id in ids if 0 <= token_id < vocab_size}
    return np.array(sorted(kept), dtype=np.int64) if kept else _NO_IDS


def _effective_bias(bias: float) -> float:
    return FORCED_BIAS if bias >= 100.0 else bias


def _ends_in(token_ids: list[int], tail: tuple[int, ...]) -> bool:
    return tuple(token_ids[-len(tail) :]) == tail
