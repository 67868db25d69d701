"""Log-probabilities of chosen tokens and of the best ones, with their ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import torch

import paged_kernels

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
    vocab_size = logits.shape[1]
    nums = [vocab_size if num < 0 else min(num, vocab_size) for num in nums]
    ids = torch.tensor(chosen, device=logits.device)
    normalisers, ranks, *best = paged_kernels.best_logits(logits, ids, max(nums, default=0))
    of_chosen = logits.gather(1, ids[:, None])[:, 0].float() - normalisers
    rows = zip(chosen, of_chosen.tolist(), ranks.tolist(), strict=True)
    result: list[Logprobs] = [{token_id: (logprob, rank)} for token_id, logprob, rank in rows]
    values, best_ids = (column.cpu().numpy() for column in best)
    logprobs = values - normalisers.cpu().numpy()[:, None]
    best_rows = zip(result, nums, best_ids.tolist(), logprobs.tolist(), _ranks(values).tolist(), strict=True)
    for row_result, num, *columns in best_rows:
        _add(row_result, *(column[:num] for column in columns))
    for row, extra in enumerate(extra_ids):
        if extra:
            _add_extra(logits[row], extra, normalisers[row], result[row])
    return result


def _ranks(values: npt.NDArray[np.float32]) -> npt.NDArray[np.int64]:
    """Ranks of values in falling order [R, C]; equal values share the rank of the first of them."""
    starts = np.zeros(values.shape, np.int64)
    starts[:, 1:] = np.where(values[:, 1:] != values[:, :-1], np.arange(1, values.shape[1]), 0)
    ranks: npt.NDArray[np.int64] = np.maximum.accumulate(starts, axis=1) + 1
    return ranks


def _add_extra(logits: torch.Tensor, ids: Sequence[int], normaliser: torch.Tensor, result: Logprobs) -> None:
    ids = [token_id for token_id in ids if token_id < len(logits)]
    logits = logits.float()
    wanted = logits[torch.tensor(ids, dtype=torch.int64, device=logits.device)]
    ranks = 1 + (logits > wanted[:, None]).sum(dim=1)
    _add(result, ids, (wanted - normaliser).tolist(), ranks.tolist())


def _add(result: Logprobs, ids: Iterable[int], values: Iterable[float], ranks: Iterable[int]) -> None:
    for token_id, value, rank in zip(ids, values, ranks, strict=False):
        result.setdefault(token_id, (value, rank))
