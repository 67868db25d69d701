"""A step cut into calls, for models that cannot take a pack: each call has sequences with equally many new tokens."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from paged_backend.engine.request import Sequence
from paged_backend.engine.scheduler import ScheduledSequence
from paged_backend.model.attention import StepMetadata


class Piece(NamedTuple):
    """Consecutive tokens of one sequence that one call computes."""

    sequence: Sequence
    start: int
    """The first token's position."""
    token_ids: list[int]
    row: int
    """Where the first one would be in a pack of the whole step."""
    num_wanted: int
    """Of how many of the last ones the logits are wanted."""

    @property
    def wanted(self) -> range:
        return range(len(self.token_ids) - self.num_wanted, len(self.token_ids))


def cut_into_calls(scheduled: list[ScheduledSequence], *, whole_prompts: bool, one_by_one: bool) -> list[list[Piece]]:
    """Chunks of prompts share a call if they are equally long, begin at the same position and want logits of the same
    tokens; sequences that compute one token share one.

    With `whole_prompts`, a model goes on from what it has only one token at a time, so that what follows a first chunk
    is cut into tokens. With `one_by_one`, no two sequences share a call.
    """
    calls: dict[tuple[int, ...], list[Piece]] = {}
    rounds: dict[int, list[Piece]] = {}  # round i: the i-th single tokens
    row = 0
    for number, item in enumerate(scheduled):
        piece = Piece(item.sequence, item.sequence.num_computed_tokens, item.token_ids, row, item.num_logits)
        row += item.num_tokens
        own = (number,) if one_by_one else ()
        if piece.start == 0 or (item.num_tokens > 1 and not whole_prompts):
            calls.setdefault((piece.start, item.num_tokens, item.num_logits, *own), []).append(piece)
            continue
        for index, single in enumerate(_single_tokens(piece)):
            if one_by_one:
                calls[single.start, 1, single.num_wanted, *own] = [single]
            else:
                rounds.setdefault(index, []).append(single)
    return [*calls.values(), *rounds.values()]


def _single_tokens(piece: Piece) -> list[Piece]:
    return [
        Piece(piece.sequence, piece.start + i, [token_id], piece.row + i, int(i in piece.wanted))
        for i, token_id in enumerate(piece.token_ids)
    ]


class CallInputs:
    """The tensors of one call of B sequences with S new tokens each."""

    def __init__(self, pieces: list[Piece], device: torch.device) -> None:
        self._pieces, self._device = pieces, device
        self.num_new = len(pieces[0].token_ids)
        self.longest_before = max(piece.start for piece in pieces)
        self.input_ids = self._tensor(np.array([piece.token_ids for piece in pieces], np.int64))
        """[B, S]"""
        self._positions = np.array([[piece.start] for piece in pieces], np.int64) + np.arange(self.num_new)
        self.positions = self._tensor(self._positions)
        """[B, S]"""

    def metadata(self, block_size: int) -> StepMetadata:
        """Where they are in the pages, as if they were packed."""
        tables = [piece.sequence.tables for piece in self._pieces]
        num_groups, num_rows = len(tables[0]), len(tables)
        width = max(len(table.blocks) for groups in tables for table in groups)
        block_tables = np.zeros((num_groups, num_rows, width), np.int32)
        for row, groups in enumerate(tables):
            for group, table in enumerate(groups):
                block_tables[group, row, : len(table.blocks)] = table.blocks
        blocks = block_tables[:, np.arange(num_rows)[:, None], self._positions // block_size].astype(np.int64)
        starts = np.arange(num_rows + 1, dtype=np.int32) * np.int32(self.num_new)
        lengths = self._positions[:, -1].astype(np.int32) + 1
        slot_mapping = (blocks * block_size + self._positions % block_size).reshape(num_groups, -1)
        return StepMetadata.of(slot_mapping, block_tables, starts, lengths, self._device)

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device, non_blocking=True)
