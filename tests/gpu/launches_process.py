"""Prints what is launched on a pretend GPU for steps with real numbers: {name of the step: its launches}, as JSON.

To be run without TRITON_INTERPRET.
"""

import json
import sys

import torch

from paged_kernels.triton_attention import AttentionPlan, paged_attention, store_kv
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


STEPS = {
    "decode": lambda: attend([1, 1, 1, 1], [5, 9, 100, 7], 4),
    "decode of others": lambda: attend([1, 1, 1, 1], [300, 2, 0, 0], 4, num_padding=2),
    "mixed": lambda: attend([1, 1, 30, 8], [5, 9, 100, 8], 2),
    "mixed with others": lambda: attend([1, 1, 7, 31], [500, 1, 7, 400], 2),
    **{f"batch of {n}": lambda n=n: attend([1] * n, [20] * n, n, width=3 * n) for n in (1, 2, 3, 8, 17)},
}


def launches_of(step):
    with pretend_gpu("sm_90") as gpu:
        step()
    return gpu.launches


if __name__ == "__main__":
    json.dump({name: launches_of(step) for name, step in STEPS.items()}, sys.stdout)
