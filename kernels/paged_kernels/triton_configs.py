"""How the Triton kernels are launched on each architecture: the one place where that is chosen, and its reasons."""

import math
from typing import NamedTuple

import torch
import triton

SHARED_MEMORY = {
    "sm_80": 166912,
    "sm_86": 101376,
    "sm_90": 232448,
    "sm_100": 232448,
    "gfx942": 65536,
    "gfx950": 163840,
}
"""Bytes of shared memory that one program may have. "sm_86" stands for 8.6, 8.9 and 12.x, which have as little."""

_KEYS_PER_SPLIT = 256  # fewer are not worth merging
_PROGRAMS_PER_PROCESSOR = 2
_MOST_SPLITS = 128


class AttentionConfig(NamedTuple):
    """One launch of `attend`."""

    rows: int
    """Query heads times queries in a tile; a power of two from 16 on."""
    keys: int
    """Keys in a tile, likewise."""
    num_warps: int
    num_stages: int
    """Keys and values are loaded `num_stages - 1` tiles ahead on NVIDIA's devices."""


_INTERPRETED = AttentionConfig(16, 16, 4, 2)  # small, so that short sequences have many tiles

# By the larger of a key's and a value's padded sizes, at most: for batches of few queries per sequence, which wait for
# memory and want many programs side by side, each with loads under way; and for those of many, which compute.
_FEW_QUERIES = {
    "sm_80": {128: (16, 64, 4, 3), 256: (16, 32, 4, 3), 512: (16, 16, 4, 3)},
    "sm_86": {128: (16, 64, 4, 3), 256: (16, 32, 4, 3), 512: (16, 16, 4, 2)},
    "sm_90": {128: (16, 64, 4, 3), 256: (16, 64, 4, 3), 512: (16, 32, 4, 3)},
    "sm_100": {128: (16, 64, 4, 3), 256: (16, 64, 4, 3), 512: (16, 32, 4, 3)},
    "gfx942": {128: (16, 64, 4, 2), 256: (16, 32, 4, 2), 512: (16, 16, 4, 2)},
    "gfx950": {128: (16, 64, 4, 2), 256: (16, 32, 4, 2), 512: (16, 16, 4, 2)},
}
_MANY_QUERIES = {
    "sm_80": {128: (128, 64, 8, 3), 256: (64, 32, 8, 3), 512: (32, 16, 8, 2)},
    "sm_86": {128: (64, 64, 4, 2), 256: (64, 32, 8, 2), 512: (16, 16, 4, 2)},
    "sm_90": {128: (128, 64, 8, 3), 256: (128, 32, 8, 3), 512: (64, 16, 8, 2)},
    "sm_100": {128: (128, 64, 8, 3), 256: (128, 32, 8, 3), 512: (64, 16, 8, 2)},
    "gfx942": {128: (64, 64, 4, 2), 256: (64, 32, 8, 2), 512: (32, 16, 8, 2)},
    "gfx950": {128: (64, 64, 4, 2), 256: (64, 32, 8, 2), 512: (32, 16, 8, 2)},
}


def attention_config(architecture: str, head_size: int, num_rows: float) -> AttentionConfig:
    """How to launch `attend` for sequences that have `num_rows` rows on average: queries times heads of a group.

    `head_size` is the larger of a key's and a value's; ValueError if it is above 768.
    """
    if architecture == "interpreter":
        return _INTERPRETED
    if num_rows <= 16:
        return _row_for(_FEW_QUERIES, architecture, head_size)
    config = _row_for(_MANY_QUERIES, architecture, head_size)
    rows = min(config.rows, int(triton.next_power_of_2(math.ceil(num_rows))))
    return config._replace(rows=rows, num_warps=max(4, config.num_warps * rows // config.rows))


def _row_for(table: dict[str, dict[int, tuple[int, int, int, int]]], architecture: str, size: int) -> AttentionConfig:
    for most, row in table[architecture].items():
        if size <= most * 1.5:
            return AttentionConfig(*row)
    raise ValueError(f"a head size of {size} is above the largest that the Triton kernels take, 768; use a CPU")


def num_splits_for(num_programs: int, max_keys: int, num_processors: int) -> int:
    """Into how many parts to cut the keys of each sequence, a power of two: enough to keep all processors busy.

    Args:
        num_programs: how many there are if keys are not split.
        max_keys: the most keys that a query may see.
    """
    wanted = triton.cdiv(_PROGRAMS_PER_PROCESSOR * num_processors, max(num_programs, 1))
    possible = triton.cdiv(max_keys, _KEYS_PER_SPLIT)
    return int(triton.next_power_of_2(max(1, min(wanted, possible, _MOST_SPLITS))))


def check_cache_dtype(architecture: str, dtype: torch.dtype) -> None:
    """ValueError if kernels cannot read a cache of this type."""
    if dtype == torch.float8_e4m3fn and architecture in ("sm_80", "sm_86"):
        raise ValueError("this GPU has no float8_e4m3fn (compute capability 8.9 is the first); use float8_e5m2 or int8")
