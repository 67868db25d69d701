"""One layer's attention: gigabytes of keys and values per second in decoding, arithmetic per second in a prefill.

    python benchmarks/attention.py --rounds 5

Beside it torch's `scaled_dot_product_attention` on the same numbers, in dense tensors: what a paged kernel has to be
measured by. The three take turns, call by call; each goes through many layers in turn, as a model does, so that keys
and values come from memory and not from the processor's caches.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import paged_kernels
from rounds import versions

BLOCK_SIZE = 16
LAYERS_BYTES = 200_000_000


class Case(NamedTuple):
    """So many sequences, each with so many new tokens and so many altogether."""

    num_sequences: int
    num_queries: int
    length: int

    @property
    def name(self) -> str:
        return f"{self.num_sequences} x {self.num_queries} queries, {self.length} keys"

    @property
    def num_pairs(self) -> int:
        """Queries times the keys they see."""
        return self.num_sequences * self.num_queries * (2 * self.length - self.num_queries + 1) // 2


CASES = (
    Case(1, 1, 4096),
    Case(8, 1, 4096),
    Case(64, 1, 100),
    Case(1, 512, 512),
    Case(1, 512, 2048),
    Case(1, 512, 4096),
)


def paged(case: Case, shape: argparse.Namespace, kv_dtype: torch.dtype) -> Callable[[], Any]:
    """A call of the kernel, on blocks in random order."""
    num_blocks = -(-case.length // BLOCK_SIZE)
    slots = (case.num_sequences * num_blocks, shape.kv_heads, BLOCK_SIZE)
    sizes = [torch.Size((*slots, shape.head_size))] * 2
    scales: dict[str, Tensor] = {}
    if kv_dtype == torch.int8:
        caches = [torch.randint(-127, 128, size, dtype=torch.int8) for size in sizes]
        scales = {name: torch.full(slots, 0.01, dtype=torch.bfloat16) for name in ("k_scales", "v_scales")}
    else:
        caches = [torch.randn(size, dtype=torch.float32).to(kv_dtype) for size in sizes]
    query = torch.randn(case.num_sequences * case.num_queries, shape.heads, shape.head_size).to(torch.bfloat16)
    block_tables = torch.randperm(slots[0]).int().view(case.num_sequences, num_blocks)
    query_start_loc = torch.arange(case.num_sequences + 1, dtype=torch.int32) * case.num_queries
    lengths = torch.full((case.num_sequences,), case.length, dtype=torch.int32)
    layers, scale = copies(caches), shape.head_size**-0.5
    return lambda: paged_kernels.paged_attention(
        query, *next(layers), block_tables, query_start_loc, lengths, scale=scale, **scales
    )


def copies(tensors: list[Tensor]) -> Iterator[list[Tensor]]:
    num_bytes = sum(tensor.nbytes for tensor in tensors)
    return itertools.cycle([[tensor.clone() for tensor in tensors] for _ in range(1 + LAYERS_BYTES // num_bytes)])


def dense(case: Case, shape: argparse.Namespace) -> Callable[[], Any]:
    query = torch.randn(case.num_sequences, shape.heads, case.num_queries, shape.head_size).to(torch.bfloat16)
    size = (case.num_sequences, shape.kv_heads, case.length, shape.head_size)
    layers = copies([torch.randn(size).to(torch.bfloat16) for _ in range(2)])
    mask = torch.ones(case.num_queries, case.length, dtype=torch.bool).tril(case.length - case.num_queries)
    return lambda: scaled_dot_product_attention(
        query, *next(layers), attn_mask=None if case.num_queries == 1 else mask, enable_gqa=True
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=int, default=9)
    parser.add_argument("--kv-heads", type=int, default=3)
    parser.add_argument("--head-size", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    shape = parser.parse_args()

    print(f"{versions()}, {shape.heads} heads on {shape.kv_heads} of {shape.head_size}, {shape.rounds} rounds")
    for case in CASES:
        runs = {
            "bfloat16": paged(case, shape, torch.bfloat16),
            "int8": paged(case, shape, torch.int8),
            "SDPA": dense(case, shape),
        }
        times: dict[str, list[float]] = {name: [] for name in runs}
        for round_ in range(shape.rounds + 1):
            for name, run in list(runs.items())[:: 1 if round_ % 2 else -1]:
                start = time.perf_counter()
                run()
                times[name].append(time.perf_counter() - start)
        for name, each in times.items():
            seconds = statistics.median(each[1:])
            num_bytes = 2 * case.num_sequences * case.length * shape.kv_heads * shape.head_size
            num_bytes *= 1 if name == "int8" else 2
            operations = 4 * case.num_pairs * shape.heads * shape.head_size
            print(
                f"{case.name:28} {name:9} {1e3 * seconds:8.3f} ms, {num_bytes / seconds / 1e9:6.1f} GB/s, "
                f"{operations / seconds / 1e9:6.1f} GFLOP/s",
                flush=True,
            )


if __name__ == "__main__":
    main()
