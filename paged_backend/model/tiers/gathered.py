"""A model's own attention, such as one with ALiBi in it: keys and values are in pages, and gathered for each call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paged_backend.model.attention import AttentionMetadata
from paged_backend.model.attention_backends import AttentionBackend
from paged_backend.model.kv_cache import KVShape, LayerCache
from paged_backend.model.model_call import ModelCall
from paged_backend.model.tiers.calls import CallInputs, Piece
from paged_backend.model.tiers.step_cache import StepCache, keeps_state


class GatheredSpec(NamedTuple):
    """What one layer keeps per token."""

    num_kv_heads: int
    head_size: int
    value_head_size: int
    source: None = None

    @property
    def has_own_values(self) -> bool:
        return True

    @property
    def is_stored(self) -> bool:
        return True


class GatheredTier:
    """The model gets a cache that stores what its layers give and returns all of it; states are kept as in
    StatefulTier."""

    implementation: str | None = "eager"
    token_bytes = 0

    def __init__(self, model: Any, call: ModelCall, block_size: int) -> None:
        self._config, self._device = model.config, model.device
        self._call = call
        self._block_size = block_size
        self._layers: list[int] = []
        self._kv_cache: dict[int, LayerCache] = {}
        self._keeps_state = keeps_state(model.config)
        self.state_bytes = 0

    def record(self, token_ids: Tensor) -> list[GatheredSpec]:
        recorder = _ShapeRecorder()
        num_tokens = token_ids.shape[1]
        cache = StepCache(self._config, recorder, num_before=0, num_new=num_tokens, states=[None])
        self._call(token_ids, torch.arange(num_tokens, device=self._device)[None], cache=cache)
        if self._keeps_state:
            self.state_bytes = cache.states()[0].num_bytes
        self._layers = list(recorder.specs)
        return list(recorder.specs.values())

    def attach(self, specs: Sequence[KVShape], kv_cache: list[LayerCache], attention: AttentionBackend | None) -> None:
        self._kv_cache = dict(zip(self._layers, kv_cache, strict=True))

    def compute(self, pieces: list[Piece], keep: Tensor | None) -> Tensor:
        inputs = CallInputs(pieces, self._device)
        (metadata,) = inputs.metadata(self._block_size).groups
        pages = _GatheredPages(self._kv_cache, metadata, self._block_size)
        cache = StepCache(
            self._config,
            pages,
            num_before=inputs.longest_before,
            num_new=inputs.num_new,
            states=[piece.sequence.model_state if piece.start else None for piece in pieces],
        )
        mask = pages.is_token.long() if pages.is_padded else None
        logits = self._call(inputs.input_ids, inputs.positions, keep, cache=cache, attention_mask=mask)
        if self._keeps_state:
            for piece, state in zip(pieces, cache.states(), strict=True):
                piece.sequence.model_state = state
        return logits


class _ShapeRecorder:
    """Writes down the shapes of keys and values, in the order in which layers first give theirs."""

    def __init__(self) -> None:
        self.specs: dict[int, GatheredSpec] = {}

    def update(self, layer_idx: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        assert layer_idx not in self.specs, f"layer {layer_idx} gives its keys twice"
        self.specs[layer_idx] = GatheredSpec(key.shape[1], key.shape[3], value.shape[3])
        return key, value


class _GatheredPages:
    """For one call: what layers give is stored in their pages; what they get is all that their sequences have there,
    [B, K, longest, D], shorter sequences padded on the left with zeros."""

    def __init__(self, kv_cache: dict[int, LayerCache], metadata: AttentionMetadata, block_size: int) -> None:
        self._kv_cache = kv_cache
        self._new_blocks = metadata.slot_mapping // block_size
        self._new_offsets = metadata.slot_mapping % block_size
        lengths = metadata.seq_lens.long()[:, None]
        longest = int(lengths.max())
        positions = torch.arange(longest, device=lengths.device) - (longest - lengths)  # below 0 in the padding
        self.is_token = positions >= 0
        """[B, longest]"""
        self.is_padded = not bool(self.is_token.all())
        positions = positions.clamp_min(0)
        self._blocks = metadata.block_tables.long().gather(1, positions // block_size)
        self._offsets = positions % block_size

    def update(self, layer_idx: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        cache = self._kv_cache[layer_idx]
        assert cache.values is not None
        return self._stored(cache.keys, key), self._stored(cache.values, value)

    def _stored(self, cache: Tensor, new: Tensor) -> Tensor:
        cache[self._new_blocks, :, self._new_offsets] = new.transpose(1, 2).flatten(0, 1).to(cache.dtype)
        gathered = cache[self._blocks, :, self._offsets]  # [B, longest, K, D]
        if self.is_padded:
            gathered = gathered.masked_fill(~self.is_token[:, :, None, None], 0)
        # Some models take views that only a contiguous tensor has.
        return gathered.transpose(1, 2).to(new.dtype).contiguous()
