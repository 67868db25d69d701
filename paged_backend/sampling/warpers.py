"""`min_p`, `top_k` and `top_p`, and the draw among what they keep, without sorting the vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from paged_backend.sampling.candidates import Candidates, at_least, largest, take_rows
from paged_backend.sampling.draw import Floats, Ints, first_above, softmax
from paged_backend.sampling_params import SamplingParams

_MIN_CANDIDATES = 64
"""`topk` costs hardly more for these many than for one."""
_WIDENED_LOGITS = 2**21
"""Logits widened at a time: each of their tokens may be a candidate, which takes some 50 bytes."""


def draw_from_best(logits: torch.Tensor, params: Sequence[SamplingParams], shares: Floats) -> Ints:
    """A token per row, each as likely as its softmax among those that `min_p`, `top_k` and `top_p` keep.

    The thresholds are those of the Hugging Face warpers: `min_p` and `top_k` keep all tokens that tie with the last
    one kept; `top_p` keeps the fewest, of equal ones the lower ids. The order of the draw is that of falling logits.
    Nothing is sorted but the largest logits; rows for which these turn out not to hold every token kept are done again
    with all tokens that could be.
    """
    filters = _Filters.of(params, logits)
    tokens = np.zeros(len(params), np.int64)
    for num, rows in _rows_by_num_candidates(filters.top_k, logits.shape[1]).items():
        candidates = largest(take_rows(logits, rows), num)
        tokens[rows], lowest = _draw(candidates, filters.rows(rows), shares[rows])
        last = candidates.values[:, -1]
        settled = (last < lowest) | np.isneginf(last) | (num >= logits.shape[1])
        unsettled, values = rows[~settled], candidates.values[~settled]
        step = max(1, _WIDENED_LOGITS // logits.shape[1])
        for start in range(0, len(unsettled), step):
            part = unsettled[start : start + step]
            cuts = _cuts(values[start : start + step], filters.rows(part), logits.shape[1])
            tokens[part], _ = _draw(at_least(take_rows(logits, part), cuts), filters.rows(part), shares[part])
    return tokens


class _Filters(NamedTuple):
    """The parameters of each row, [R] each; a `top_k` of 0 and a `top_p` of infinity keep all."""

    temperature: Floats
    min_p: Floats
    top_k: Ints
    top_p: Floats
    mass: Floats
    """What `top_p` is a share of, in weights of which the best token has 1; NaN: of what min_p and top_k keep."""

    @classmethod
    def of(cls, params: Sequence[SamplingParams], logits: torch.Tensor) -> _Filters:
        vocab_size = logits.shape[1]
        filters = cls(
            np.array([item.temperature for item in params]),
            np.array([item.min_p for item in params]),
            np.array([item.top_k if item.top_k < vocab_size else 0 for item in params]),
            np.array([item.top_p if item.top_p < 1.0 else np.inf for item in params]),
            np.full(len(params), np.nan),
        )
        nucleus = np.flatnonzero((filters.min_p == 0.0) & (filters.top_k == 0))
        if len(nucleus):
            best = softmax(take_rows(logits, nucleus), filters.temperature[nucleus]).amax(dim=1)
            filters.mass[nucleus] = 1.0 / best.double().cpu().numpy()
        return filters

    def rows(self, rows: Ints) -> _Filters:
        return _Filters(*(column[rows] for column in self))  # type: ignore[arg-type]


def _rows_by_num_candidates(top_k: Ints, vocab_size: int) -> dict[int, Ints]:
    """How many of the largest to look at: more than `top_k`, since bfloat16 logits have many ties."""
    nums = [max(_MIN_CANDIDATES, 1 << (int(k) * 5 // 4).bit_length()) for k in top_k]
    nums = [min(num, vocab_size) for num in nums]
    return {num: np.flatnonzero(np.array(nums) == num) for num in set(nums)}


def _draw(candidates: Candidates, filters: _Filters, shares: Floats) -> tuple[Ints, npt.NDArray[np.float32]]:
    """A token per row, and the lowest value that all tokens of the row must be known down to for it to be right."""
    values, ids = candidates
    rows, num_columns = np.arange(len(values)), values.shape[1]
    with np.errstate(invalid="ignore"):
        scaled = (values.astype(np.float64) - values[:, :1]) / filters.temperature[:, None]
        weights = np.exp(scaled)
    cumulative = np.cumsum(weights, axis=1)
    kth = np.where(filters.top_k > 0, np.minimum(filters.top_k, num_columns), num_columns) - 1
    nums = np.minimum(_count(weights >= filters.min_p[:, None]), _count(values >= values[rows, kth][:, None]))
    nums = np.maximum(nums, 1)
    totals = cumulative[rows, nums - 1]
    mass = np.where(np.isnan(filters.mass), totals, filters.mass)
    before = np.concatenate([np.zeros((len(values), 1)), cumulative[:, :-1]], axis=1)
    nucleus = np.minimum(nums, _count(before < (filters.top_p * mass)[:, None]))
    nucleus = np.maximum(nucleus, 1)
    needed = np.where(np.isnan(filters.mass), nums, nucleus)
    kept = np.minimum(cumulative, cumulative[rows, nucleus - 1][:, None])
    return ids[rows, first_above(kept, shares)], values[rows, needed - 1]


def _cuts(values: npt.NDArray[np.float32], filters: _Filters, vocab_size: int) -> npt.NDArray[np.float32]:
    """Per row, a logit below which no token can be kept."""
    kth = np.where(filters.top_k > 0, values[np.arange(len(values)), filters.top_k - 1], -np.inf)
    # Tokens lighter than this add up to less than what top_p leaves out, however many there are.
    negligible = (1.0 - filters.top_p) * filters.mass / vocab_size
    lightest = np.where(np.isnan(filters.mass), filters.min_p, negligible) * 0.99
    with np.errstate(divide="ignore", invalid="ignore"):
        cuts = values[:, 0] + filters.temperature * np.log(lightest)
    return np.maximum(kth, cuts).astype(np.float32)


def _count(mask: npt.NDArray[np.bool_]) -> Ints:
    counts: Ints = np.count_nonzero(mask, axis=1)
    return counts
