"""Scheduled sequences to the arrays of one step: what the model reads, and where its keys and values go."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from paged_backend.engine.request import BlockTable
from paged_backend.engine.scheduler import ScheduledSequence

Ints32 = npt.NDArray[np.int32]
Ints64 = npt.NDArray[np.int64]


class StepInputs(NamedTuple):
    """T tokens of S sequences, packed one sequence after the other; R of them have logits that are wanted."""

    input_ids: Ints64
    """[T]; -1 - row for a token that the device alone knows yet, in this row of what it has drawn: see `known`"""
    positions: Ints64
    """[T]"""
    keep: Ints64
    """[R]: where in the pack the tokens are whose logits are wanted."""
    slot_mapping: Ints64
    """[G, T]: where each token's key and value go, in each of G groups of layers."""
    block_tables: Ints32
    """[G, S, most blocks], padded with 0."""
    query_start_loc: Ints32
    """[S + 1]: where each sequence's tokens begin in the pack."""
    seq_lens: Ints32
    """[S]: tokens of each sequence so far, those of this step included."""


def step_inputs(scheduled: list[ScheduledSequence], block_size: int) -> StepInputs:
    """The arrays of a step. What is done sequence by sequence costs a large batch most: hence one plain loop."""
    starts, lengths, nums_logits, tables, token_ids = [], [], [], [], list[int]()
    for item in scheduled:
        sequence, num_tokens, num_logits = item
        first = sequence.num_computed_tokens
        starts.append(first)
        lengths.append(num_tokens)
        nums_logits.append(num_logits)
        tables.append(sequence.tables)
        if num_tokens == 1:
            token_ids.append(sequence.pending_id if sequence.num_pending_tokens else sequence.token_ids[first])
        else:
            token_ids += item.token_ids
    starts_, lengths_ = np.array(starts, np.int64), np.array(lengths, np.int64)
    ends = lengths_.cumsum()
    query_start_loc = np.zeros(len(scheduled) + 1, np.int32)
    query_start_loc[1:] = ends
    block_tables = _block_tables(tables)
    if len(token_ids) == len(scheduled):  # each of them computes one
        rows, positions = np.arange(len(scheduled)), starts_
    else:
        rows, positions = np.repeat(np.arange(len(scheduled)), lengths_), _ranges(starts_, lengths_)
    blocks, offsets = np.divmod(positions, block_size)
    slot_mapping = block_tables[:, rows, blocks] * np.int64(block_size)
    slot_mapping += offsets
    nums_kept = np.array(nums_logits, np.int64)
    return StepInputs(
        input_ids=np.array(token_ids, np.int64),
        positions=positions,
        keep=ends - 1 if (nums_kept == 1).all() else _ranges(ends - nums_kept, nums_kept),
        slot_mapping=slot_mapping,
        block_tables=block_tables,
        query_start_loc=query_start_loc,
        seq_lens=(starts_ + lengths_).astype(np.int32),
    )


def known(input_ids: Tensor, drawn: Tensor | None) -> Tensor:
    """The ids [T] on the device, those that stand for rows of what was drawn there replaced by what these hold."""
    if drawn is None:
        return input_ids
    drawn = drawn.to(input_ids.device)
    return torch.where(input_ids < 0, drawn[(-1 - input_ids).clamp_(min=0)], input_ids)


def decodes_first(scheduled: list[ScheduledSequence]) -> tuple[list[ScheduledSequence], Ints64] | None:
    """The sequences that compute one token before all others, and which of the rows of logits that they then have are
    those that they have in the order given; None if they come first already."""
    are_many = np.array([item.num_tokens != 1 for item in scheduled])
    order = are_many.argsort(kind="stable")
    if (np.diff(order) > 0).all():
        return None
    nums_logits = np.array([item.num_logits for item in scheduled], np.int64)
    starts = np.empty_like(nums_logits)
    starts[order] = nums_logits[order].cumsum() - nums_logits[order]
    return [scheduled[index] for index in order], _ranges(starts, nums_logits)


def _block_tables(of_sequences: list[list[BlockTable]]) -> Ints32:
    """The sequences' tables [G, S, most blocks], padded with 0; their memory is joined, not read number by number."""
    num_groups = len(of_sequences[0])
    tables = [tables[group].blocks for group in range(num_groups) for tables in of_sequences]
    lengths = np.array([len(table) for table in tables])
    joined = np.frombuffer(bytearray().join(tables), np.int32)
    width = int(lengths.max())
    if len(joined) != len(tables) * width:
        padded = np.zeros((len(tables), width), np.int32)
        padded[np.arange(width) < lengths[:, None]] = joined
        joined = padded
    return joined.reshape(num_groups, len(of_sequences), width)


def _ranges(starts: Ints64, lengths: Ints64) -> Ints64:
    """`range(start, start + length)` of each, one after the other."""
    ends = lengths.cumsum()
    return np.arange(ends[-1]) + np.repeat(starts - (ends - lengths), lengths)
