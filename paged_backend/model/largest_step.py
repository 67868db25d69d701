"""The step that takes most memory, made up, so that what it takes can be measured before anybody asks for it."""

from __future__ import annotations

from array import array

import torch
from torch import Tensor

import paged_kernels
from paged_backend.config import EngineConfig
from paged_backend.engine.request import BlockTable, Request
from paged_backend.engine.scheduler import ScheduledSequence, SchedulerOutput
from paged_backend.sampling_params import SamplingParams

_NUM_BEST = 20
"""Tokens whose log-probabilities are usually wanted at most."""


def largest_lengths(config: EngineConfig, max_model_len: int) -> list[int]:
    """How many tokens each sequence computes in a step of `max_num_batched_tokens` tokens of as many sequences as
    there may be: the first ones have long prompts, the others a token each."""
    lengths: list[int] = []
    left = config.max_num_batched_tokens
    for num_others in reversed(range(min(config.max_num_seqs, left))):
        lengths.append(min(left - num_others, max_model_len))
        left -= lengths[-1]
    return lengths


def largest_step(lengths: list[int], vocab_size: int, block_size: int, num_groups: int) -> SchedulerOutput:
    """All of them in the same blocks, from the first one on, since nobody looks at what they compute."""
    table = array("i", range(-(-max(lengths) // block_size)))
    output = SchedulerOutput(num_tokens=sum(lengths))
    for number, length in enumerate(lengths):
        request = Request(
            request_id=str(number),
            prompt_token_ids=[(number + position) % vocab_size for position in range(length)],
            params=SamplingParams(max_tokens=1),
            max_tokens=1,
            seed=0,
        )
        (sequence,) = request.sequences
        sequence.tables = [BlockTable(table[: -(-length // block_size)])] * num_groups
        output.scheduled.append(ScheduledSequence(sequence, length, 1))
    return output


def sample_all(logits: Tensor) -> None:
    """What sampling takes that changes logits, draws from some of them and wants log-probabilities."""
    num_rows, vocab_size = logits.shape
    changed = logits.to(torch.float32, copy=True)

    def column(value: float, dtype: torch.dtype = torch.float64) -> Tensor:
        return torch.full((num_rows,), value, dtype=dtype, device=logits.device)

    drawn = paged_kernels.draw(changed, column(1.0), column(0.01), column(50, torch.int64), column(0.9), column(0.5))
    paged_kernels.best_logits(logits, drawn, min(_NUM_BEST, vocab_size))
