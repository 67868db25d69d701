"""What a draw falls on: a uniform number per row, a pure function of (seed, position)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

_MASK = 2**64 - 1
_STEP = np.uint64(0x9E3779B97F4A7C15)


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
