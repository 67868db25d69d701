"""From processed logits to one token per row, each by the cheapest way that the row's parameters allow."""

from __future__ import annotations

import numpy as np
import torch

from paged_backend.engine.request import Sequence
from paged_backend.sampling.candidates import take_rows
from paged_backend.sampling.draw import Ints, draw_from_all, uniforms
from paged_backend.sampling.warpers import draw_from_best
from paged_backend.sampling_params import SamplingParams


def choose(logits: torch.Tensor, sequences: list[Sequence]) -> Ints:
    """A token per row of float32 `logits` [S, V]: the best one, or one drawn with (seed, number of tokens before it).

    What means greedy is greedy even where the best token ties with others: temperature 0, `top_k` 1 and `min_p` 1
    take the lowest id of them.
    """
    params = [sequence.request.params for sequence in sequences]
    ways = np.array([_way(item, logits.shape[1]) for item in params])
    tokens = np.zeros(len(sequences), np.int64)
    for way in set(ways.tolist()):
        rows = np.flatnonzero(ways == way)
        part = take_rows(logits, rows)
        if way == _BEST:
            tokens[rows] = _best_tokens(part)
            continue
        drawn = uniforms([sequences[row].seed for row in rows], [sequences[row].num_tokens for row in rows])
        if way == _ALL:
            tokens[rows] = draw_from_all(part, np.array([params[row].temperature for row in rows]), drawn)
        else:
            tokens[rows] = draw_from_best(part, [params[row] for row in rows], drawn)
    return tokens


_BEST, _ALL, _SOME = "best", "all", "some"


def _way(params: SamplingParams, vocab_size: int) -> str:
    if params.is_greedy or params.top_k == 1 or params.min_p == 1.0:
        return _BEST
    keeps_all = not 0 < params.top_k < vocab_size and params.top_p == 1.0 and params.min_p == 0.0
    return _ALL if keeps_all else _SOME


def _best_tokens(logits: torch.Tensor) -> Ints:
    """The largest logit's id per row of `logits` [R, V], the lowest id where several are."""
    if logits.device.type == "cpu":
        best: Ints = logits.numpy().argmax(axis=1)  # several times faster than torch's
        return best
    return logits.argmax(dim=1).cpu().numpy()
