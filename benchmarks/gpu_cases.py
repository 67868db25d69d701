"""Calls of the kernels around attention on a pretend GPU, as an engine makes them: what is compiled for the tests."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from paged_kernels import triton_fused, triton_lora, triton_sampling
from paged_kernels.adapters import LowRankAdapters, Piece, RowIndex

VOCAB_SIZE = 128256


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def layer(num_tokens: int, hidden_size: int, heads: tuple[int, int], head_size: int, intermediate_size: int) -> None:
    """What is between the matrix products of a layer of Llama."""
    x, residual = meta(num_tokens, hidden_size), meta(num_tokens, hidden_size)
    triton_fused.add_rms_norm(x, residual, meta(hidden_size), 1e-5)
    qkv = meta(num_tokens, (heads[0] + 2 * heads[1]) * head_size).unflatten(1, (-1, head_size))
    query, key, _ = qkv.split([heads[0], heads[1], heads[1]], dim=1)
    cos, sin = meta(num_tokens, head_size), meta(num_tokens, head_size)
    triton_fused.rotary(query, key, cos, sin)
    triton_fused.silu_and_mul(meta(num_tokens, 2 * intermediate_size))


def normalise_heads(num_tokens: int, num_heads: int, head_size: int) -> None:
    """As Qwen 3 does."""
    triton_fused.add_rms_norm(meta(num_tokens * num_heads, head_size), None, meta(head_size), 1e-5)


def interleaved_layer(num_tokens: int) -> None:
    """Cohere's way to turn heads, and Gemma's norm and activation."""
    query, key = meta(num_tokens, 32, 128), meta(num_tokens, 8, 128)
    angles = meta(num_tokens, 128, dtype=torch.float32)
    triton_fused.rotary(query, key, angles, angles, interleaved=True)
    triton_fused.add_rms_norm(meta(num_tokens, 3584), None, meta(3584), 1e-5, offset=1.0)
    triton_fused.silu_and_mul(meta(num_tokens, 2 * 14336), activation="gelu_tanh")


def sample(num_rows: int, dtype: torch.dtype) -> None:
    """Draws, with log-probabilities, penalties and a grammar."""
    logits = meta(num_rows, VOCAB_SIZE, dtype=dtype)
    temperatures, min_p, top_p, shares = (meta(num_rows, dtype=torch.float64) for _ in range(4))
    top_k = meta(num_rows, dtype=torch.int64)
    triton_sampling.draw(logits, temperatures, min_p, top_k, top_p, shares)
    triton_sampling.best_logits(logits, top_k, 20)
    if dtype == torch.float32:
        ids, numbers = meta(1000, dtype=torch.int64), meta(1000, dtype=torch.float32)
        triton_sampling.penalise(logits, ids, ids, numbers, numbers)
        triton_sampling.mask_logits(logits, top_k, meta(num_rows, -(-VOCAB_SIZE // 32), dtype=torch.int32))


def adapt(
    num_tokens: int, rank: int, widths: tuple[int, ...], *, depth: int = 4096, dtype: torch.dtype = torch.bfloat16
) -> None:
    """Eight adapters of a merged layer, half of the tokens without one."""
    pieces = [
        Piece(sum(widths[:i]), meta(rank, depth, dtype=dtype), meta(rank, width, dtype=dtype))
        for i, width in enumerate(widths)
    ]
    index = np.arange(num_tokens, dtype=np.int32) % 16
    rows = RowIndex(np.where(index < 8, index, -1).astype(np.int32), 8)
    out, x = meta(num_tokens, sum(widths), dtype=dtype), meta(num_tokens, depth, dtype=dtype)
    triton_lora.add_low_rank(out, x, LowRankAdapters([pieces] * 8), rows)


AROUND_ATTENTION: dict[str, Callable[[], None]] = {
    "layer of 4096": lambda: layer(8, 4096, (32, 8), 128, 14336),
    "layer of 576": lambda: layer(8, 576, (9, 3), 64, 1536),
    "heads of 128": lambda: normalise_heads(8, 32, 128),
    "turned in pairs, as Gemma": lambda: interleaved_layer(8),
    "float32 logits": lambda: sample(8, torch.float32),
    "bfloat16 logits": lambda: sample(8, torch.bfloat16),
    "decode, adapters of rank 16": lambda: adapt(64, 16, (4096, 1024, 1024)),
    "prefill, adapters of rank 64": lambda: adapt(2048, 64, (4096, 1024, 1024)),
    "prefill, adapters of uneven width": lambda: adapt(2048, 8, (1001,)),
    "prefill, float32 adapters of rank 64": lambda: adapt(2048, 64, (4096, 1024, 1024), dtype=torch.float32),
}
