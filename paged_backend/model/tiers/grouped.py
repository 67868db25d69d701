"""Runs a step call by call, and puts the results in the order of a pack."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from paged_backend.engine.scheduler import SchedulerOutput
from paged_backend.model.attention_backends import AttentionBackend
from paged_backend.model.kv_cache import KVShape, LayerCache
from paged_backend.model.pooling import PooledStep
from paged_backend.model.tiers.calls import Piece, cut_into_calls

InCall = Callable[[list[Piece], list[int]], AbstractContextManager[None]]
"""Gets a call's pieces, and of which rows it computes logits: all of them if it is none or the model chooses so."""


class Tier(Protocol):
    """A way to run a model on calls."""

    implementation: str | None
    """Which attention the model is to use; None: its own choice."""
    state_bytes: int
    """What a sequence keeps besides its pages, whatever its length."""
    token_bytes: int
    """What it keeps per token besides its pages."""

    def record(self, token_ids: Tensor) -> Sequence[KVShape]:
        """Run one sequence [1, S] to see what the model keeps; returns what needs pages."""
        ...

    def attach(self, specs: Sequence[KVShape], kv_cache: list[LayerCache], attention: AttentionBackend | None) -> None:
        """These are the layers, as `record` has returned them but for their groups, their pages, and who attends to
        them if the model's own code does not."""
        ...

    def compute(self, pieces: list[Piece], keep: Tensor | None) -> Tensor:
        """Logits of the rows `keep` of one call, [B * S] counted through the batch."""
        ...


class GroupedRun:
    """What a step's calls are, is decided here; what a call is, by the tier."""

    def __init__(
        self, tier: Tier, *, whole_prompts: bool, one_by_one: bool, head: Callable[[], nn.Module | None]
    ) -> None:
        self._tier = tier
        self._whole_prompts, self._one_by_one = whole_prompts, one_by_one
        self._head = head

    def execute(self, output: SchedulerOutput, device: torch.device, in_call: InCall) -> Tensor:
        """As ModelRunner.execute; each call is inside of what `in_call` gives for it."""
        calls = cut_into_calls(output.scheduled, whole_prompts=self._whole_prompts, one_by_one=self._one_by_one)
        hidden: list[tuple[list[Piece], Tensor]] = []
        rows: list[int] = []
        parts: list[Tensor] = []
        for pieces in calls:
            size = len(pieces[0].token_ids)
            wanted = [index * size + i for index, piece in enumerate(pieces) for i in piece.wanted]
            if output.pools:
                with in_call(pieces, []):
                    logits, states = self._with_hidden(pieces)
                hidden.append((pieces, states))
                parts.append(logits[torch.tensor(wanted, dtype=torch.long, device=device)])
            else:
                # A model that computes no logits at all is not worth a special case in its code.
                keep = wanted or [index * size for index in range(len(pieces))]
                with in_call(pieces, keep):
                    logits = self._tier.compute(pieces, torch.tensor(keep, device=device))
                parts.append(logits[: len(wanted)])
            rows += [piece.row + i for piece in pieces for i in piece.wanted]
        if output.pools:
            _pool(output, hidden)
        logits = parts[0] if len(parts) == 1 else torch.cat(parts)
        order = np.argsort(rows, kind="stable")
        return logits if (np.diff(rows) > 0).all() else logits[torch.from_numpy(order).to(device)]

    def _with_hidden(self, pieces: list[Piece]) -> tuple[Tensor, Tensor]:
        """All logits and last hidden states of a call, [B * S, ...] both."""
        taken: list[Tensor] = []

        def take(module: nn.Module, arguments: tuple[Any, ...]) -> None:
            taken.append(arguments[0].flatten(0, -2))

        head = self._head()
        assert head is not None, "the model has no head to take hidden states from"
        hook = head.register_forward_pre_hook(take)
        try:
            return self._tier.compute(pieces, None), taken[-1]
        finally:
            hook.remove()


def _pool(output: SchedulerOutput, hidden: list[tuple[list[Piece], Tensor]]) -> None:
    packed: Tensor | None = None
    for pieces, states in hidden:
        size = len(pieces[0].token_ids)
        packed = states.new_empty(output.num_tokens, states.shape[1]) if packed is None else packed
        for index, piece in enumerate(pieces):
            packed[piece.row : piece.row + size] = states[index * size : (index + 1) * size]
    pooled = PooledStep(output.scheduled)
    assert packed is not None
    pooled.collect(packed[torch.tensor(pooled.rows, dtype=torch.long, device=packed.device)])
