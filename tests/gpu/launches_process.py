"""Prints what is launched on a pretend GPU for steps with real numbers: {name of the step: its launches}, as JSON.

To be run without TRITON_INTERPRET.
"""

import json
import sys

import numpy as np
import torch

from gpu_cases import layer
from paged_kernels.adapters import ExchangeableAdapters, Extent, LowRankAdapters, Piece, RowIndex
from paged_kernels.triton_attention import AttentionPlan, paged_attention, store_kv
from paged_kernels.triton_lora import add_low_rank
from paged_kernels.triton_sampling import best_logits, draw, mask_logits
from pretend_gpu import pretend_gpu


def attend(query_lens, seq_lens, num_decodes, *, width=32, num_padding=0, cache_dtype=torch.bfloat16):
    """One layer of a step. Padding is at the end of the decodes: sequences of length 0, tokens in slot -1."""
    num_tokens, num_sequences = sum(query_lens), len(seq_lens)
    shape = (64, 2, 16)
    caches = [torch.zeros(*shape, 64, dtype=cache_dtype) for _ in "kv"]
    scales = (
        {f"{x}_scales": torch.zeros(shape, dtype=torch.bfloat16) for x in "kv"} if cache_dtype.itemsize == 1 else {}
    )
    slots = torch.randint(0, 1024, (num_tokens,))
    slots[num_decodes - num_padding : num_decodes] = -1
    key = torch.randn(num_tokens, 2, 64, dtype=torch.bfloat16)
    store_kv(key, key, *caches, slots, **scales)
    paged_attention(
        torch.randn(num_tokens, 8, 64, dtype=torch.bfloat16),
        *caches,
        torch.randint(0, 64, (num_sequences, width), dtype=torch.int32),
        torch.tensor([0, *query_lens]).cumsum(0).int(),
        torch.tensor(seq_lens, dtype=torch.int32),
        scale=0.125,
        plan=AttentionPlan(num_decodes, 512),
        **scales,
    )


def sample(temperatures, top_k, top_p):
    """Draws and log-probabilities of rows with these parameters, the first one with a mask."""
    num_rows, vocab_size = len(temperatures), 1000
    logits, chosen = torch.randn(num_rows, vocab_size), torch.randint(0, vocab_size, (num_rows,))
    floats = [torch.tensor(values, dtype=torch.float64) for values in (temperatures, top_p)]
    mask_logits(logits, torch.tensor([0]), torch.randint(-9, 9, (1, 32), dtype=torch.int32))
    draw(logits, floats[0], torch.zeros_like(floats[0]), torch.tensor(top_k), floats[1], torch.rand_like(floats[0]))
    best_logits(logits, chosen, 5)


def adapt(numbers):
    """A layer for rows with these of two adapters."""
    pieces = [[Piece(0, torch.randn(8, 64), torch.randn(8, 48))] for _ in range(2)]
    rows = RowIndex(np.array(numbers, np.int32), 2)
    add_low_rank(torch.zeros(len(numbers), 48), torch.randn(len(numbers), 64), LowRankAdapters(pieces), rows)


SLOTS = ExchangeableAdapters(2, Extent(2, 40, 48, True), torch.float32, torch.device("cpu"))
TILES = {}


def adapt_in_slots(numbers, *ranks):
    """A layer for rows with these of two adapters, which have taken the slots; of these ranks for its two modules."""
    made = [[Piece(48 * i, torch.randn(r, 64), torch.randn(r, 48)) for i, r in enumerate(rank) if r] for rank in ranks]
    SLOTS.exchange(made)
    rows = RowIndex(np.array(numbers, np.int32), 2, TILES)
    add_low_rank(torch.zeros(len(numbers), 96), torch.randn(len(numbers), 64), SLOTS, rows)


STEPS = {
    "decode": lambda: attend([1, 1, 1, 1], [5, 9, 100, 7], 4),
    "decode of others": lambda: attend([1, 1, 1, 1], [300, 2, 0, 0], 4, num_padding=2),
    "mixed": lambda: attend([1, 1, 30, 8], [5, 9, 100, 8], 2),
    "mixed with others": lambda: attend([1, 1, 7, 31], [500, 1, 7, 400], 2),
    "draws": lambda: sample([0.0, 1.0, 0.7], [0, 0, 50], [1.0, 1.0, 0.9]),
    "draws of others": lambda: sample([2.0, 0.0, 1.0], [3, 0, 0], [0.5, 1.0, 1.0]),
    "adapters": lambda: adapt([0, 0, -1, 1, 1, 1]),
    "other adapters": lambda: adapt([-1, 1, -1, -1, -1, -1]),
    "slots": lambda: adapt_in_slots([0, 0, -1, 1, 1, 1], (8, 40), (0, 3)),
    "slots of others": lambda: adapt_in_slots([-1, 1, -1, -1, -1, -1], (4, 0), (4, 16)),
    **{f"batch of {n}": lambda n=n: attend([1] * n, [20] * n, n, width=3 * n) for n in (1, 2, 3, 8, 17)},
    **{f"layer for {n}": lambda n=n: layer(n, 64, (4, 2), 16, 128) for n in (1, 2, 3, 8, 17)},
}


def launches_of(step):
    with pretend_gpu("sm_90") as gpu:
        step()
    return gpu.launches


if __name__ == "__main__":
    json.dump({name: launches_of(step) for name, step in STEPS.items()}, sys.stdout)
