"""The draw: a uniform number per row, a pure function of (seed, position), and where it falls in a distribution."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

_MASK = 2**64 - 1
_STEP = np.uint64(0x9E3779B97F4A7C15)

_BLOCK = 256
"""Weights summed in float32 before the rest of a draw over the whole vocabulary is done in float64."""


def uniforms(seeds: Sequence[int], positions: Sequence[int]) -> Floats:
    """Uniform numbers in [0, 1), one per (seed, position); seeds are any integers and count modulo 2**64.

    SplitMix64 as a counter-based generator: the seed is mixed first, so that neighbouring seeds (the samples of one
    request) start at unrelated points, and the position is the counter.
    """
    keys = _mix(np.array([seed & _MASK for seed in seeds], dtype=np.uint64) + _STEP)
    bits = _mix(keys + (np.array(positions, dtype=np.uint64) + np.uint64(1)) * _STEP)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(z: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Stafford's variant 13 of the MurmurHash3 finaliser: every input bit flips every output bit half of the time."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def first_above(cumulative: Floats, shares: Floats) -> Ints:
    """Per row, the first column whose cumulative weight exceeds the row's share, in [0, 1], of the last one.

    Such a column adds to the sum, so one of weight 0 is never returned, however the product rounds. A row without
    any weight, or of NaN, gives column 0.
    """
    totals = cumulative[:, -1]
    targets = np.minimum(shares * totals, np.nextafter(totals, 0.0))
    columns: Ints = (cumulative > targets[:, None]).argmax(axis=1)
    return columns


def draw_from_all(logits: torch.Tensor, temperatures: Floats, shares: Floats) -> Ints:
    """A token per row, each as likely as its softmax at the row's temperature, in the order of ids.

    Sums are taken in two levels: float32 within blocks of tokens, float64 over the blocks and inside the chosen one.
    """
    probabilities = softmax(logits, temperatures)  # [R, V]
    sums = _block_sums(probabilities)
    cumulative = np.cumsum(sums, axis=1)
    blocks = first_above(cumulative, shares)
    rows = np.arange(len(blocks))
    in_block = sums[rows, blocks]
    with np.errstate(invalid="ignore"):
        shares = (shares * cumulative[:, -1] - cumulative[rows, blocks] + in_block) / in_block

    ids = blocks[:, None] * _BLOCK + np.arange(_BLOCK)
    index = torch.from_numpy(np.minimum(ids, logits.shape[1] - 1)).to(logits.device)
    weights = np.where(ids < logits.shape[1], probabilities.gather(1, index).cpu().numpy(), 0.0)
    return blocks * _BLOCK + first_above(np.cumsum(weights, axis=1), np.clip(shares, 0.0, 1.0))


def _block_sums(weights: torch.Tensor) -> Floats:
    """Sums of each block of `weights` [R, V], and of the shorter one at the end, which may be empty."""
    num_whole = weights.shape[1] // _BLOCK
    whole = weights[:, : num_whole * _BLOCK].view(len(weights), num_whole, _BLOCK).sum(dim=2)
    rest = weights[:, num_whole * _BLOCK :].sum(dim=1, keepdim=True)
    sums: Floats = torch.cat([whole, rest], dim=1).double().cpu().numpy()
    return sums


def softmax(logits: torch.Tensor, temperatures: Floats) -> torch.Tensor:
    """Softmax of `logits` [R, V] at each row's temperature, computed row by row, so that a row's result is its own.

    The best logit is subtracted before the division: a low temperature would magnify the rounding of large logits.
    """
    scaled = logits - logits.amax(dim=1, keepdim=True)
    if (temperatures != 1.0).any():
        scaled.div_(torch.from_numpy(temperatures).to(logits.device, torch.float32)[:, None])
    return scaled.softmax(dim=1)
