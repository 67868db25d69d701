"""A model's own cache, kept whole with each sequence: for models whose caches are like no other's."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from paged_backend.errors import ModelError
from paged_backend.model.attention_backends import AttentionBackend
from paged_backend.model.kv_cache import KVShape, LayerCache
from paged_backend.model.model_call import ModelCall
from paged_backend.model.tiers.calls import CallInputs, Piece
from paged_backend.model.tiers.gathered import GatheredSpec

# What models call the cache that they return; the same name gives it back to them.
_NAMES = ("cache", "past_key_values", "state", "cache_params", "mems", "past_buckets_states")


class OwnCache(NamedTuple):
    """What a model returned with its last token. It changes it as it computes."""

    name: str
    content: Any

    def copy(self) -> Self:
        return self._replace(content=copy.deepcopy(self.content))


class OwnCacheTier:
    """Nothing is paged: blocks only count how much the sequences' caches take."""

    def __init__(self, model: Any, call: ModelCall) -> None:
        self._device = model.device
        self._call = call
        self.implementation: str | None = None
        self.token_bytes = self.state_bytes = 0

    def record(self, token_ids: Tensor) -> list[GatheredSpec]:
        long = token_ids.shape[1]
        short = (long + 1) // 2
        few, many = (self._cache_bytes(token_ids[:, :length]) for length in (short, long))
        self.token_bytes = max(0, many - few) // max(1, long - short)
        self.state_bytes = max(0, many - long * self.token_bytes)
        return []

    def _cache_bytes(self, token_ids: Tensor) -> int:
        positions = torch.arange(token_ids.shape[1], device=self._device)[None]
        return _num_bytes(self._run(token_ids, positions, None, None)[1].content, set())

    def attach(self, specs: Sequence[KVShape], kv_cache: list[LayerCache], attention: AttentionBackend | None) -> None:
        assert not kv_cache

    def compute(self, pieces: list[Piece], keep: Tensor | None) -> Tensor:
        (piece,) = pieces
        inputs = CallInputs(pieces, self._device)
        before = piece.sequence.model_state if piece.start else None
        logits, piece.sequence.model_state = self._run(inputs.input_ids, inputs.positions, keep, before)
        return logits

    def _run(
        self, input_ids: Tensor, positions: Tensor, keep: Tensor | None, before: OwnCache | None
    ) -> tuple[Tensor, OwnCache]:
        given = {} if before is None else {before.name: before.content}
        logits, output = self._call.with_arguments(input_ids, positions, keep, use_cache=True, **given)
        for name in _NAMES:
            content = getattr(output, name, None)
            if content is not None:
                return logits, OwnCache(name, content)
        raise ModelError("it returns no cache to go on from")


def _num_bytes(value: Any, seen: set[int]) -> int:
    """Of all tensors in it, however nested."""
    if id(value) in seen:
        return 0
    seen.add(id(value))
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, dict):
        parts = list(value.values())
    elif isinstance(value, (list, tuple)):
        parts = list(value)
    else:
        parts = list(getattr(value, "__dict__", {}).values())
    return sum(_num_bytes(part, seen) for part in parts)
