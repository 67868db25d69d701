"""Convolutions, recurrences and linear attention: a state per sequence, beside paged attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from paged_backend.model.attention import PAGED, LayerRecorder, LayerSpec, PagedLayers, attention_layers
from paged_backend.model.attention_backends import AttentionBackend
from paged_backend.model.kv_cache import KVShape, LayerCache
from paged_backend.model.linear import unpack_projections
from paged_backend.model.model_call import ModelCall
from paged_backend.model.tiers.calls import CallInputs, Piece
from paged_backend.model.tiers.module_states import ModuleStates
from paged_backend.model.tiers.step_cache import SequenceState, StepCache


class StatefulTier:
    """The model's attention layers use pages; `sequence.model_state` has the states of its other layers."""

    implementation: str | None = PAGED
    token_bytes = 0

    def __init__(self, model: Any, call: ModelCall, block_size: int, *, latents: bool) -> None:
        self._model, self._config, self._device = model, model.config, model.device
        self._call = call
        self._block_size, self._keeps_latents = block_size, latents
        self._specs: list[LayerSpec] = []
        self._kv_cache: list[LayerCache] = []
        self._in_modules = ModuleStates(model)
        self.state_bytes = 0

    def record(self, token_ids: Tensor) -> list[LayerSpec]:
        recorder = LayerRecorder(latents=self._keeps_latents)
        num_tokens = token_ids.shape[1]
        cache = StepCache(self._config, recorder, num_before=0, num_new=num_tokens, states=[None])
        self._in_modules = ModuleStates(self._model)
        with attention_layers(recorder):
            self._call(token_ids, torch.arange(num_tokens, device=self._device)[None], cache=cache)
        self._in_modules.find()
        self.state_bytes = cache.states()[0]._replace(in_modules=self._in_modules.take(1)[0]).num_bytes
        unpack_projections(self._model)
        return recorder.specs

    def attach(self, specs: Sequence[KVShape], kv_cache: list[LayerCache], attention: AttentionBackend | None) -> None:
        assert attention is not None
        self._specs = cast("list[LayerSpec]", specs)
        self._kv_cache, self._attention = kv_cache, attention

    def compute(self, pieces: list[Piece], keep: Tensor | None) -> Tensor:
        inputs = CallInputs(pieces, self._device)
        layers = PagedLayers(self._specs, self._kv_cache, inputs.metadata(self._block_size), self._attention)
        states: list[SequenceState | None] = [piece.sequence.model_state if piece.start else None for piece in pieces]
        cache = StepCache(self._config, layers, num_before=inputs.longest_before, num_new=inputs.num_new, states=states)
        self._in_modules.put([None if state is None else state.in_modules for state in states])
        with attention_layers(layers):
            logits = self._call(inputs.input_ids, inputs.positions, keep, cache=cache)
        for piece, state, own in zip(pieces, cache.states(), self._in_modules.take(len(pieces)), strict=True):
            piece.sequence.model_state = state._replace(in_modules=own)
        return logits
