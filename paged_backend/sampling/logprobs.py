"""Log-probabilities of chosen tokens and of the best ones, with their ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from paged_backend.sampling.candidates import largest

Logprobs = dict[int, tuple[float, int]]
"""Token id to (log-probability, rank), the chosen token first. The rank is 1 + how many tokens are more likely."""


def token_logprobs(
    log_probs: torch.Tensor,
    chosen: Sequence[int],
    nums: Sequence[int],
    extra_ids: Sequence[Sequence[int] | None],
) -> list[Logprobs]:
    """Per row of `log_probs` [R, V]: the chosen token, the `num` best (-1: all), and the extra ones.

    `nums` and `extra_ids` hold one entry per row. Of tokens that tie for the last place, the lower ids are preferred.
    """
    of_chosen = log_probs.gather(1, torch.tensor(chosen, device=log_probs.device)[:, None])
    ranks = (log_probs > of_chosen).count_nonzero(dim=1) + 1
    rows = zip(chosen, of_chosen[:, 0].tolist(), ranks.tolist(), strict=True)
    result: list[Logprobs] = [{token_id: (logprob, rank)} for token_id, logprob, rank in rows]
    for num in set(nums) - {0}:
        _add_best(log_probs, num, [row for row, wanted in enumerate(nums) if wanted == num], result)
    for row, ids in enumerate(extra_ids):
        if ids:
            _add_extra(log_probs[row], ids, result[row])
    return result


def _add_best(log_probs: torch.Tensor, num: int, rows: list[int], result: list[Logprobs]) -> None:
    vocab_size = log_probs.shape[1]
    num = vocab_size if num < 0 else min(num, vocab_size)
    # A few more than asked for, since models in bfloat16 often have ties at the last place.
    best = largest(log_probs if len(rows) == len(log_probs) else log_probs[rows], num + 12)
    ranks = _ranks(best.values)
    for row, ids, values, row_ranks in zip(
        rows, best.ids[:, :num].tolist(), best.values[:, :num].tolist(), ranks.tolist(), strict=True
    ):
        _add(result[row], ids, values, row_ranks)


def _ranks(values: npt.NDArray[np.float32]) -> npt.NDArray[np.int64]:
    """Ranks of values in falling order [R, C]; equal values share the rank of the first of them."""
    starts = np.zeros(values.shape, np.int64)
    starts[:, 1:] = np.where(values[:, 1:] != values[:, :-1], np.arange(1, values.shape[1]), 0)
    ranks: npt.NDArray[np.int64] = np.maximum.accumulate(starts, axis=1) + 1
    return ranks


def _add_extra(log_probs: torch.Tensor, ids: Sequence[int], result: Logprobs) -> None:
    values = log_probs.cpu().numpy()
    wanted = values[np.array([i for i in ids if i < len(values)], dtype=np.int64)]
    ranks = len(values) - np.searchsorted(np.sort(values), wanted, side="right") + 1
    _add(result, [i for i in ids if i < len(values)], wanted.tolist(), ranks.tolist())


def _add(result: Logprobs, ids: Iterable[int], values: Iterable[float], ranks: Iterable[int]) -> None:
    for token_id, value, rank in zip(ids, values, ranks, strict=False):
        result.setdefault(token_id, (value, rank))
