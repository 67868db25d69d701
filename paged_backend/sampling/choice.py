"""From processed logits to one token per row."""

from __future__ import annotations

import numpy as np
import torch

import paged_kernels
from paged_backend.engine.request import Sequence
from paged_backend.sampling.draw import uniforms
from paged_kernels.transfers import to_device


def choose(logits: torch.Tensor, sequences: list[Sequence]) -> torch.Tensor:
    """A token per row of `logits` [S, V]: the best one, or one drawn with (seed, number of tokens before it).

    What means greedy is greedy even where the best token ties with others: temperature 0, `top_k` 1 and `min_p` 1
    take the lowest id of them.
    """
    params = [sequence.request.params for sequence in sequences]
    if all(item.is_greedy for item in params):
        shares = np.zeros(len(params))
    else:
        positions = [sequence.num_drawn_tokens for sequence in sequences]
        shares = uniforms([sequence.seed for sequence in sequences], positions)
    filters = (
        np.array([0.0 if item.is_greedy else item.temperature for item in params], np.float64),
        np.array([item.min_p for item in params], np.float64),
        np.array([min(item.top_k, logits.shape[1]) for item in params], np.int64),
        np.array([item.top_p for item in params], np.float64),
        shares,
    )
    return paged_kernels.draw(logits, *(to_device(column, logits.device) for column in filters))
