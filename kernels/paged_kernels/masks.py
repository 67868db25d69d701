"""Masks over a vocabulary, one bit per token, applied by a CPU: torch's masked operations take ten times as long."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paged_kernels.compiled import compile_kernel


def mask_logits(logits: Tensor, rows: Tensor, bitmask: Tensor) -> None:
    """See `reference.mask_logits`."""
    assert logits.dtype == torch.float32 and bitmask.shape[1] * 32 >= logits.shape[1]
    _mask_rows(logits.numpy(), rows.numpy(), bitmask.numpy())


@compile_kernel
def _mask_rows(logits: NDArray[np.float32], rows: NDArray[np.int64], bitmask: NDArray[np.int32]) -> None:
    banned = np.float32(-np.inf)
    width = logits.shape[1]
    for i in range(len(rows)):
        row: NDArray[Any] = logits[rows[i]]
        for word in range((width + 31) // 32):
            bits, start = bitmask[i, word], 32 * word
            if bits == 0:
                row[start : start + 32] = banned
            elif bits != -1:
                for token in range(min(32, width - start)):  # without a branch, since the bits follow no pattern
                    row[start + token] = row[start + token] if (bits >> token) & 1 else banned
