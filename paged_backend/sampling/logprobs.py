"""Log-probabilities of chosen tokens and of the best ones, with their ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import torch

import paged_kernels
from paged_kernels.transfers import HostCopies, to_device

Logprobs = dict[int, tuple[float, int]]
"""Token id to (log-probability, rank), the chosen token first. The rank is 1 + how many tokens are more likely."""


def token_logprobs(
    logits: torch.Tensor,
    chosen: Sequence[int],
    nums: Sequence[int],
    extra_ids: Sequence[Sequence[int] | None],
) -> list[Logprobs]:
    """Per row of `logits` [R, V]: the chosen token, the `num` best (-1: all), and the extra ones.

    `nums` and `extra_ids` hold one entry per row. Of tokens that tie for the last place, the lower ids are preferred.
    """
    return LogprobsOnDevice(logits, torch.tensor(chosen, device=logits.device), nums, extra_ids).result(chosen)


class LogprobsOnDevice:
    """What `token_logprobs` returns, launched and not waited for."""

    def __init__(
        self,
        logits: torch.Tensor,
        chosen: torch.Tensor,
        nums: Sequence[int],
        extra_ids: Sequence[Sequence[int] | None],
    ) -> None:
        """The chosen tokens [R] are on the device of the logits."""
        vocab_size = logits.shape[1]
        self._nums = [vocab_size if num < 0 else min(num, vocab_size) for num in nums]
        normalisers, ranks, *best = paged_kernels.best_logits(logits, chosen, max(self._nums, default=0))
        of_chosen = logits.gather(1, chosen[:, None])[:, 0].float() - normalisers
        self._extra: list[tuple[int, list[int]]] = []
        """Rows with extra tokens, and these."""
        of_extra: list[torch.Tensor] = []
        for row, extra in enumerate(extra_ids):
            if extra:
                ids = [token_id for token_id in extra if token_id < vocab_size]
                self._extra.append((row, ids))
                of_extra += _described(logits[row], ids, normalisers[row])
        self._copies = HostCopies([of_chosen, normalisers, ranks, *best, *of_extra])

    def result(self, chosen: Sequence[int]) -> list[Logprobs]:
        """The chosen tokens, which are known now; waits for the device."""
        of_chosen, normalisers, ranks, *rest = self._copies.wait()
        rows = zip(chosen, of_chosen.tolist(), ranks.tolist(), strict=True)
        result: list[Logprobs] = [{token_id: (logprob, rank)} for token_id, logprob, rank in rows]
        values, best_ids = (column.numpy() for column in rest[:2])
        logprobs = values - normalisers.numpy()[:, None]
        best_rows = zip(result, self._nums, best_ids.tolist(), logprobs.tolist(), _ranks(values).tolist(), strict=True)
        for row_result, num, *columns in best_rows:
            _add(row_result, *(column[:num] for column in columns))
        for number, (row, ids) in enumerate(self._extra):
            of_ids, ranks_of_ids = rest[2 + 2 * number : 4 + 2 * number]
            _add(result[row], ids, of_ids.tolist(), ranks_of_ids.tolist())
        return result


def _ranks(values: npt.NDArray[np.float32]) -> npt.NDArray[np.int64]:
    """Ranks of values in falling order [R, C]; equal values share the rank of the first of them."""
    starts = np.zeros(values.shape, np.int64)
    starts[:, 1:] = np.where(values[:, 1:] != values[:, :-1], np.arange(1, values.shape[1]), 0)
    ranks: npt.NDArray[np.int64] = np.maximum.accumulate(starts, axis=1) + 1
    return ranks


def _described(logits: torch.Tensor, ids: Sequence[int], normaliser: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The log-probabilities of these tokens of a row, and their ranks."""
    logits = logits.float()
    wanted = logits[to_device(np.array(ids, np.int64), logits.device)]
    return wanted - normaliser, 1 + (logits > wanted[:, None]).sum(dim=1)


def _add(result: Logprobs, ids: Iterable[int], values: Iterable[float], ranks: Iterable[int]) -> None:
    for token_id, value, rank in zip(ids, values, ranks, strict=False):
        result.setdefault(token_id, (value, rank))
