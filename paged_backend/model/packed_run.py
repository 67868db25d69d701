"""A step as one pack of tokens: by the fused decoder, launched or replayed, or by transformers' code."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn

from paged_backend.config import EngineConfig
from paged_backend.engine.scheduler import SchedulerOutput
from paged_backend.errors import ModelError
from paged_backend.model.attention import (
    AttentionLayers,
    LayerRecorder,
    LayerSpec,
    PagedLayers,
    StepMetadata,
    attention_layers,
)
from paged_backend.model.attention_backends import AttentionBackend
from paged_backend.model.decoder import FusedDecoder
from paged_backend.model.graphs import DecodeGraphs, DecodeInputs, cuda_capture
from paged_backend.model.inputs import StepInputs, known
from paged_backend.model.kv_cache import KVShape, LayerCache
from paged_backend.model.linear import unpack_projections
from paged_backend.model.lora import AdapterSlots, LoadedAdapter, StepAdapters, adapted
from paged_backend.model.model_call import ModelCall
from paged_backend.model.pooling import PooledStep
from paged_backend.model.shards import ArrivedLayers, arrived
from paged_backend.model.tiers.step_cache import StepCache
from paged_kernels.transfers import to_device


class _Discarded(NamedTuple):
    """The place of a `PooledStep` where nobody asks for its hidden states."""

    rows: list[int]

    def collect(self, hidden: Tensor) -> None:
        pass


class PackedRun:
    """Runs a model on packs: `record` what its layers are, `attach` pages for them, then `execute` steps.

    It runs by the decoder where it is given one, else by the model's own code.
    """

    def __init__(self, model: Any, call: ModelCall, *, is_sharded: bool) -> None:
        self._model, self._call, self._is_sharded = model, call, is_sharded
        self._device: torch.device = model.device
        self._has_latents = False
        self._specs: list[LayerSpec] = []
        self._kv_cache: list[LayerCache] = []
        self._attention: AttentionBackend | None = None
        self.decoder: FusedDecoder | None = None
        self.graphs: DecodeGraphs | None = None
        self._step_adapters: StepAdapters | None = None
        self._adapted_decoder: FusedDecoder | None = None
        self._slots: AdapterSlots | None = None
        """Of captured steps."""
        self._captured_decoder: FusedDecoder | None = None
        """With the adapters of the slots."""

    def record(self, token_ids: list[int], *, latents: bool) -> list[LayerSpec]:
        """With LoRA there are no latents: an adapter adds to the outputs of a layer that they do without. Nor are there
        in shards, which have a part of that layer's weights only."""
        recorder = LayerRecorder()
        ids, positions = self._tensor(np.array(token_ids)), self._tensor(np.arange(len(token_ids)))
        self._has_latents = latents and any(hasattr(module, "kv_b_proj") for module in self._model.modules())
        self._forward(recorder, ids, positions, positions)
        if not recorder.specs:
            raise ModelError("its attention is code of its own")
        self._has_latents = any(spec.latent is not None for spec in recorder.specs)
        unpack_projections(self._model)
        return recorder.specs

    def attach(self, specs: Sequence[KVShape], kv_cache: list[LayerCache], attention: AttentionBackend | None) -> None:
        """These are the layers, as `record` has returned them but for their groups, their pages, and who attends to
        them."""
        self._specs = cast("list[LayerSpec]", specs)
        self._kv_cache, self._attention = kv_cache, attention
        self._stack_layers()

    def use(self, decoder: FusedDecoder | None) -> None:
        """From now on run by this decoder; None: by the model's own code."""
        self.decoder = decoder
        self._stack_layers()

    def add_adapters(self, config: EngineConfig) -> None:
        self._step_adapters = StepAdapters(self._model.dtype, self._device)
        if self.decoder is not None:
            self._adapted_decoder = adapted(self.decoder, self._model, self._step_adapters)
        if self.decoder is not None and self.graphs is not None:
            self._slots = AdapterSlots(config.max_loras, self._model.dtype, self._device)
            self._captured_decoder = adapted(self.decoder, self._model, self._slots)

    def make_graphs(self, config: EngineConfig, max_model_len: int, block_size: int, num_groups: int) -> None:
        """For steps of the fused decoder, where device and attention know graphs."""
        self.graphs = None
        capture = None if config.enforce_eager else cuda_capture(self._device)
        plain, attention = self.decoder, self._attention
        if capture is None or plain is None or attention is None or not attention.is_capturable:
            return

        def compute(inputs: DecodeInputs, layout: int) -> Tensor:
            decoder = self._captured_decoder if layout else plain
            assert decoder is not None
            layers = PagedLayers(self._specs, self._kv_cache, inputs.metadata(block_size), attention)
            return decoder.logits(decoder(layers, inputs.input_ids, inputs.positions, inputs.rows))

        self.graphs = DecodeGraphs(
            compute,
            capture,
            max_num_seqs=config.max_num_seqs,
            max_num_blocks=-(-max_model_len // block_size),
            num_groups=num_groups,
            vocab_size=int(self._model.config.get_text_config().vocab_size),
            dtype=self._model.dtype,
            device=self._device,
        )

    def execute(self, output: SchedulerOutput, inputs: StepInputs) -> Tensor:
        """Logits [R, V] of the rows that are kept."""
        adapters = [item.sequence.request.adapter for item in output.scheduled] if self._step_adapters else []
        has_adapters = any(adapters)
        if self.graphs is not None and not output.pools and self.graphs.can_compute(inputs):
            layout = self._fill_slots(self.graphs, adapters) if has_adapters else 0
            return self.graphs(inputs, output.pending_tokens, variant=layout)
        layers = self._layers(inputs)
        if not has_adapters:
            return self._compute(output, layers, inputs, self.decoder)
        assert self._step_adapters is not None
        pooled = PooledStep(output.scheduled).rows if output.pools else []
        keep = np.concatenate([inputs.keep, np.array(pooled, np.int64)])
        hooked = self._model if self._adapted_decoder is None else None
        parts = [(item.sequence.request.adapter, item.num_tokens) for item in output.scheduled]
        with self._step_adapters.of(parts, keep, len(inputs.keep), hooked):
            return self._compute(output, layers, inputs, self._adapted_decoder)

    def _fill_slots(self, graphs: DecodeGraphs, adapters: list[LoadedAdapter | None]) -> int:
        """The layout of the slots, which have the adapters of a step's sequences."""
        assert self._slots is not None
        self._slots.begin(adapters, graphs.num_rows(len(adapters)))
        return self._slots.layout

    def follow(self, inputs: StepInputs, pooled_rows: list[int]) -> None:
        """Compute a rank's part of a step; these are the rows of the pack whose hidden states rank 0 wants."""
        layers = self._layers(inputs)
        input_ids = self._tensor(inputs.input_ids)
        if pooled_rows:
            self._pool(_Discarded(pooled_rows), layers, inputs, input_ids, None)
        else:
            self._forward(layers, input_ids, self._tensor(inputs.positions), self._tensor(inputs.keep))

    def _stack_layers(self) -> None:
        if self.decoder is not None and self._attention is not None and self._attention.name == "cpu":
            self.decoder.stack_layers(self._specs, self._kv_cache)

    def _compute(
        self, output: SchedulerOutput, layers: PagedLayers, inputs: StepInputs, decoder: FusedDecoder | None
    ) -> Tensor:
        """By this decoder, or by transformers' code."""
        input_ids = known(self._tensor(inputs.input_ids), output.pending_tokens)
        if output.pools:
            return self._pool(PooledStep(output.scheduled), layers, inputs, input_ids, decoder)
        positions, keep = self._tensor(inputs.positions), self._tensor(inputs.keep)
        if decoder is not None:
            return decoder.logits(decoder(layers, input_ids, positions, keep))
        return self._forward(layers, input_ids, positions, keep)

    def _pool(
        self,
        pooled: PooledStep | _Discarded,
        layers: PagedLayers,
        inputs: StepInputs,
        input_ids: Tensor,
        decoder: FusedDecoder | None,
    ) -> Tensor:
        """A step that also leaves hidden states to those who want embeddings; the logits are those of `keep`."""
        num_logits = len(inputs.keep)
        positions = self._tensor(inputs.positions)
        keep = self._tensor(np.concatenate([inputs.keep, np.array(pooled.rows, np.int64)]))
        if decoder is not None:
            hidden = decoder(layers, input_ids, positions, keep)
            pooled.collect(hidden[num_logits:])
            return decoder.logits(hidden[:num_logits])

        def take(head: nn.Module, arguments: tuple[Tensor]) -> tuple[Tensor]:
            (hidden,) = arguments
            if hidden.shape[1] > len(keep):  # the model takes no `logits_to_keep`
                hidden = hidden[:, keep]
            pooled.collect(hidden[0, num_logits:])
            return (hidden[:, :num_logits],)

        head: nn.Module = self._model.get_output_embeddings()
        hook = head.register_forward_pre_hook(take)
        try:
            return self._forward(layers, input_ids, positions, keep)
        finally:
            hook.remove()

    def _forward(self, layers: AttentionLayers, input_ids: Tensor, positions: Tensor, keep: Tensor) -> Tensor:
        cache = None
        if self._has_latents:
            cache = StepCache(self._model.config, layers, num_before=0, num_new=len(input_ids), states=[])
        with attention_layers(ArrivedLayers(layers) if self._is_sharded else layers):
            logits = self._call(input_ids[None], positions[None], keep, cache=cache)
        return arrived(logits) if self._is_sharded else logits

    def _layers(self, inputs: StepInputs) -> PagedLayers:
        places = inputs.slot_mapping, inputs.block_tables, inputs.query_start_loc, inputs.seq_lens
        metadata = StepMetadata.of(*places, self._device)
        assert self._attention is not None
        return PagedLayers(self._specs, self._kv_cache, metadata, self._attention)

    def _tensor(self, array: np.ndarray) -> Tensor:
        return to_device(array, self._device)
