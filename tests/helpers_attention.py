"""Batches for attention kernels: ragged sequences in a paged cache, and what they compare with."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from paged_kernels import reference
from paged_kernels.reference import LARGEST_STORED

TOLERANCE = {torch.float32: 4e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}
GARBAGE_BLOCK = -(2**31)


class Batch:
    """Random ragged sequences whose keys and values were stored in shuffled blocks of a cache full of NaN.

    The dense keys and values are kept to compare with. Where values are in keys, they have no cache of their own.
    """

    def __init__(
        self,
        query_lens,
        seq_lens,
        *,
        heads=(4, 2),
        head_sizes=(16, 16),
        block_size=4,
        dtype=torch.float32,
        cache_dtype=None,
        values_in_keys=False,
    ):
        num_heads, num_kv_heads = heads
        generator = torch.Generator().manual_seed(sum(seq_lens))

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(dtype)

        self.query_lens, self.seq_lens = query_lens, seq_lens
        self.query = random(sum(query_lens), num_heads, head_sizes[0])
        self.keys = [random(n, num_kv_heads, head_sizes[0]) for n in seq_lens]
        if values_in_keys:
            self.values = [keys[..., : head_sizes[1]] for keys in self.keys]
        else:
            self.values = [random(n, num_kv_heads, head_sizes[1]) for n in seq_lens]
        self.scale = 1 / math.sqrt(head_sizes[0])

        num_blocks = [-(-n // block_size) for n in seq_lens]
        free = torch.randperm(sum(num_blocks) + 3, generator=generator).int()
        self.block_tables = torch.full(
            (len(seq_lens), max(num_blocks, default=0) + 2), GARBAGE_BLOCK, dtype=torch.int32
        )
        slots = (len(free), num_kv_heads, block_size)
        self.k_cache, self.v_cache = (garbage_cache(*slots, size, dtype=cache_dtype or dtype) for size in head_sizes)
        self.scales, self.value_size = {}, None
        if values_in_keys:
            self.v_cache, self.value_size = None, head_sizes[1]
        if cache_dtype in LARGEST_STORED:
            stored = "k" if values_in_keys else "kv"
            self.scales = {f"{x}_scales": torch.full(slots, math.nan, dtype=torch.bfloat16) for x in stored}
        for s, n in enumerate(num_blocks):
            self.block_tables[s, :n], free = free[:n], free[n:]
            value = None if values_in_keys else self.values[s]
            reference.store_kv(self.keys[s], value, self.k_cache, self.v_cache, self.slots(s), **self.scales)

    def slots(self, s: int) -> Tensor:
        block_size = self.k_cache.shape[2]
        positions = torch.arange(self.seq_lens[s])
        return self.block_tables[s, positions // block_size].long() * block_size + positions % block_size

    def attend(self, attention, **options: Any) -> Tensor:
        query_start_loc = torch.tensor([0, *self.query_lens]).cumsum(0).int()
        seq_lens = torch.tensor(self.seq_lens, dtype=torch.int32)
        caches = (self.k_cache, self.v_cache, self.block_tables)
        options = {"scale": self.scale, "value_size": self.value_size} | self.scales | options
        return attention(self.query, *caches, query_start_loc, seq_lens, **options)

    def assert_same(self, attention, *, plan=None, **options: Any) -> None:
        """`attention` computes what the definition does."""
        expected = self.attend(reference.paged_attention, **options)
        actual = self.attend(attention, **options, **({} if plan is None else {"plan": plan}))
        assert actual.dtype == self.query.dtype
        assert_close(actual, expected)


def garbage_cache(*shape: int, dtype: torch.dtype) -> Tensor:
    """NaN, or a number that no test expects."""
    return torch.full(shape, 99 if dtype == torch.int8 else math.nan).to(dtype)


def assert_close(actual: Tensor, expected: Tensor) -> None:
    tolerance = TOLERANCE[actual.dtype]
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


OPTIONS = {
    "causal": {},
    "window": {"window": 5},
    "window of one": {"window": 1},
    "chunk": {"chunk": 8},
    "softcap": {"softcap": 2.0},
    "sinks": {"sinks": torch.tensor([-1.0, 0.5, 2.0, 4.0])},
    "ALiBi": {"alibi_slopes": torch.tensor([0.5, 0.25, 0.1, -0.1])},
    "all": {
        "window": 300,
        "softcap": 30.0,
        "sinks": torch.tensor([-1.0, 0.5, 2.0, 4.0]),
        "alibi_slopes": torch.tensor([0.5, 0.25, 0.1, 0.01]),
    },
}
