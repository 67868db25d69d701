"""How the Triton kernels are launched on each architecture: the one place where that is chosen, and its reasons."""

import math
from typing import NamedTuple

import torch
import triton

_MOST_SPLITS = 64


class AttentionConfig(NamedTuple):
    """One launch of `attend`."""

    rows: int
    """Query heads times queries in a tile; a power of two from 16 on."""
    keys: int
    """Keys in a tile, likewise."""
    num_warps: int
    num_stages: int
    """Keys and values are loaded `num_stages - 1` tiles ahead on NVIDIA's devices."""
    keys_per_split: int = 256
    """A multiple of `keys`; fewer are not worth merging."""

    def num_splits(self, num_programs: int, max_keys: int, num_processors: int) -> int:
        """Into how many parts the keys of a sequence may be cut, a power of two.

        Sequences that decode are cut finely, since one that is longer than its batch mates would else go on alone, with
        a fraction of the memory's bandwidth; the short ones leave most of their programs nothing to do. Tiles of many
        queries have large partial results, so that no more are made than keep each processor busy.

        Args:
            num_programs: how many there are if keys are not split.
            max_keys: the most keys that a query may see.
        """
        programs_per_processor = 8 if self.rows <= 16 else 1
        wanted = triton.cdiv(programs_per_processor * num_processors, max(num_programs, 1))
        possible = triton.cdiv(max_keys, self.keys_per_split)
        return int(triton.next_power_of_2(max(1, min(wanted, possible, _MOST_SPLITS))))


_INTERPRETED = AttentionConfig(16, 16, 4, 2, 16)  # small, so that short sequences have many tiles

# By the larger of a key's and a value's sizes, at most: for batches of few queries per sequence, which wait for memory
# and want many programs side by side, each with loads under way; and for those of many, which compute. "sm_86" and
# "sm_89" stand for all that have no more than 99 KiB of shared memory per program, before and since float8_e4m3fn.
_SizedConfigs = dict[int, tuple[int, int, int, int]]
_FEW_ON_SMALL: _SizedConfigs = {128: (16, 64, 4, 3), 256: (16, 32, 4, 3), 576: (16, 16, 4, 2)}
_FEW_ON_LARGE: _SizedConfigs = {128: (16, 64, 4, 3), 256: (16, 32, 4, 4), 576: (16, 32, 4, 3)}
_FEW_ON_AMD: _SizedConfigs = {128: (16, 64, 4, 2), 256: (16, 32, 4, 2), 576: (16, 16, 4, 2)}
_FEW_QUERIES: dict[str, _SizedConfigs] = {
    "sm_80": {128: (16, 64, 4, 3), 256: (16, 32, 4, 3), 576: (16, 16, 4, 3)},
    "sm_86": _FEW_ON_SMALL,
    "sm_89": _FEW_ON_SMALL,
    "sm_90": _FEW_ON_LARGE,
    "sm_100": _FEW_ON_LARGE,
    "gfx942": _FEW_ON_AMD,
    "gfx950": _FEW_ON_AMD,
}
_MANY_ON_SMALL: _SizedConfigs = {128: (64, 32, 4, 2), 256: (64, 32, 8, 2), 576: (16, 16, 4, 2)}
_MANY_ON_AMD: _SizedConfigs = {128: (64, 64, 4, 2), 256: (64, 32, 8, 2), 576: (32, 16, 8, 2)}
_MANY_QUERIES: dict[str, _SizedConfigs] = {
    "sm_80": {128: (128, 32, 8, 3), 256: (64, 32, 8, 3), 576: (32, 16, 8, 2)},
    "sm_86": _MANY_ON_SMALL,
    "sm_89": _MANY_ON_SMALL,
    "sm_90": {128: (128, 64, 8, 3), 256: (128, 32, 8, 3), 576: (32, 32, 8, 2)},
    "sm_100": {128: (128, 64, 8, 3), 256: (64, 32, 8, 3), 576: (32, 32, 8, 2)},
    "gfx942": _MANY_ON_AMD,
    "gfx950": _MANY_ON_AMD,
}


# Where queries are float32: their products are not the tensor cores', and take registers by the size of a tile.
_WITHOUT_TENSOR_CORES: _SizedConfigs = {128: (16, 32, 8, 2), 576: (16, 16, 8, 2)}
_SMALL = ("sm_86", "sm_89", "gfx942")  # too little shared memory for larger heads than 256 in float32


def attention_config(
    architecture: str, head_size: int, num_rows: float, dtype: torch.dtype, cache_dtype: torch.dtype
) -> AttentionConfig:
    """How to launch `attend` for sequences that have `num_rows` rows on average: queries, in `dtype`, times heads of a
    group.

    `head_size` is the larger of a key's and a value's; ValueError if it is too large, above 576 at the latest.
    """
    if architecture == "interpreter":
        return _INTERPRETED
    if dtype == torch.float32 and head_size > 256 and architecture in _SMALL:
        raise ValueError(
            f"this GPU has too little shared memory for heads of {head_size} float32; use dtype='bfloat16'"
        )
    if dtype == torch.float32:
        table = _WITHOUT_TENSOR_CORES
    else:
        table = (_FEW_QUERIES if num_rows <= 16 else _MANY_QUERIES)[architecture]
    config = _row_for(table, head_size)
    if cache_dtype.itemsize == 1 and architecture.startswith("sm_"):  # to convert them takes registers
        config = config._replace(keys=max(16, config.keys // 2))
    rows = min(config.rows, max(16, int(triton.next_power_of_2(math.ceil(num_rows)))))
    return config._replace(rows=rows, num_warps=max(4, config.num_warps * rows // config.rows))


def _row_for(table: _SizedConfigs, head_size: int) -> AttentionConfig:
    for most, row in table.items():
        if head_size <= most:
            return AttentionConfig(*row)
    raise ValueError(f"a head size of {head_size} is above 576, the largest that the Triton kernels take; use a CPU")


def check_cache_dtype(architecture: str, dtype: torch.dtype) -> None:
    """ValueError if kernels cannot read a cache of this type."""
    if dtype == torch.float8_e4m3fn and architecture in ("sm_80", "sm_86"):
        raise ValueError("this GPU has no float8_e4m3fn (compute capability 8.9 is the first); use float8_e5m2 or int8")
