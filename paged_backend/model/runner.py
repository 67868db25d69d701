"""Scheduled sequences to tensors to logits."""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import paged_kernels
from paged_backend.config import EngineConfig
from paged_backend.engine.scheduler import SchedulerOutput
from paged_backend.errors import ModelError
from paged_backend.model import kv_cache
from paged_backend.model.attention import (
    PAGED,
    AttentionLayers,
    AttentionMetadata,
    LayerRecorder,
    LayerSpec,
    PagedLayers,
    attention_layers,
)
from paged_backend.model.decoder import FusedDecoder
from paged_backend.model.inputs import StepInputs, step_inputs
from paged_backend.model.linear import pack_linears, speed_up_linears
from paged_backend.model.loader import LoadedModel
from paged_backend.model.lora import AdapterStore, StepAdapters, adapted
from paged_backend.model.pooling import PooledStep
from paged_backend.model.self_check import check_logits, probe_token_ids
from paged_backend.model.threads import thread_count

logger = logging.getLogger(__name__)


class ModelRunner:
    """Runs a transformers model on packed batches over a paged KV cache.

    Building one checks that the packed run in chunks gives the logits of a plain run; a model it would get wrong
    raises ModelError. A model the user passed is not changed: the runner works on a twin that shares its weights.
    """

    def __init__(self, loaded: LoadedModel, config: EngineConfig) -> None:
        self._thread_count = thread_count()
        model = loaded.model if loaded.owns_weights else _twin(loaded.model)
        self._model: nn.Module = model
        self.device = model.device
        self.vocab_size = int(model.config.get_text_config().vocab_size)
        self.block_size = config.block_size
        self.adapters: AdapterStore | None = None
        """Where LoRA adapters come from, if there are any."""
        self._step_adapters = StepAdapters(model.dtype, self.device)
        self._adapted_decoder: FusedDecoder | None = None
        """Of steps with adapters, if there is one of steps without."""
        with torch.inference_mode():
            probe = probe_token_ids(self.vocab_size, loaded.max_model_len, config.block_size)
            expected = self._plain_logits(probe)
            model.set_attn_implementation(PAGED)
            self._specs = self._record_layers(probe)
            dtype = kv_cache.storage_dtype(config, model.dtype, self.device)
            bytes_per_block = kv_cache.block_bytes(self._specs, config.block_size, dtype)
            self.num_blocks = kv_cache.num_blocks_for(config, bytes_per_block, loaded.max_model_len, self.device)
            self._kv_cache = kv_cache.allocate(self._specs, self.num_blocks, config.block_size, dtype, self.device)
            self._decoder: FusedDecoder | None = None
            coarsest = dtype
            if (config.quantization is not None or loaded.is_quantized) and dtype == torch.float32:
                coarsest = torch.bfloat16  # inputs of 8 bits round as much
            check = functools.partial(
                check_logits, self, probe, expected, block_size=config.block_size, dtype=coarsest, name=loaded.name
            )
            with paged_kernels.telling_of_compilation(_tell_of_compilation):
                self._choose_code(loaded, check)
        if config.enable_lora:
            self.adapters = AdapterStore(model, config)
            if self._decoder is not None:
                self._adapted_decoder = adapted(self._decoder, model, self._step_adapters)

    @torch.inference_mode()
    def execute(self, output: SchedulerOutput) -> Tensor:
        """Logits [R, V] of the last `num_logits` tokens of each scheduled sequence."""
        self._thread_count.adjust()
        self._copy_blocks(output)
        inputs = step_inputs(output.scheduled, self.block_size)
        layers = PagedLayers(self._specs, self._kv_cache, self._metadata(inputs))
        if self.adapters is None or not any(item.sequence.request.adapter for item in output.scheduled):
            return self._compute(output, layers, inputs, self._decoder)
        pooled = PooledStep(output.scheduled).rows if output.pools else []
        keep = np.concatenate([inputs.keep, np.array(pooled, np.int64)])
        hooked = self._model if self._adapted_decoder is None else None
        with self._step_adapters.of(output.scheduled, keep, len(inputs.keep), hooked):
            return self._compute(output, layers, inputs, self._adapted_decoder)

    def _compute(
        self, output: SchedulerOutput, layers: PagedLayers, inputs: StepInputs, decoder: FusedDecoder | None
    ) -> Tensor:
        """By this decoder, or by transformers' code."""
        input_ids, positions, keep = inputs.input_ids, inputs.positions, inputs.keep
        if output.pools:
            return self._pool(PooledStep(output.scheduled), layers, inputs, decoder)
        if decoder is not None:
            return decoder.logits(decoder(layers, *map(self._tensor, (input_ids, positions, keep))))
        return self._forward(layers, input_ids, positions, keep)

    def _pool(
        self, pooled: PooledStep, layers: PagedLayers, inputs: StepInputs, decoder: FusedDecoder | None
    ) -> Tensor:
        """A step that also leaves hidden states to those who want embeddings; the logits are those of `keep`."""
        input_ids, positions, num_logits = inputs.input_ids, inputs.positions, len(inputs.keep)
        keep = np.concatenate([inputs.keep, np.array(pooled.rows, np.int64)])
        if decoder is not None:
            hidden = decoder(layers, *map(self._tensor, (input_ids, positions, keep)))
            pooled.collect(hidden[num_logits:])
            return decoder.logits(hidden[:num_logits])

        def take(head: nn.Module, arguments: tuple[Tensor]) -> tuple[Tensor]:
            (hidden,) = arguments
            pooled.collect(hidden[0, num_logits:])
            return (hidden[:, :num_logits],)

        hook = self._head().register_forward_pre_hook(take)
        try:
            return self._forward(layers, input_ids, positions, keep)
        finally:
            hook.remove()

    def _head(self) -> nn.Module:
        head: nn.Module = self._model.get_output_embeddings()  # type: ignore[operator]
        return head

    def rows(self, logits: Tensor, rows: list[int]) -> Tensor:
        """These rows of the logits, in this order."""
        if rows == list(range(logits.shape[0])):
            return logits
        return logits[torch.tensor(rows, device=logits.device)]

    def _forward(
        self, layers: AttentionLayers, input_ids: np.ndarray, positions: np.ndarray, keep: np.ndarray
    ) -> Tensor:
        with attention_layers(layers):
            result = self._model(
                input_ids=self._tensor(input_ids)[None],
                position_ids=self._tensor(positions)[None],
                use_cache=False,
                logits_to_keep=self._tensor(keep),
            )
        logits: Tensor = result.logits[0]
        return logits

    def _choose_code(self, loaded: LoadedModel, check: Callable[[], None]) -> None:
        """Fused code where it fits and the weights are ours to merge, else transformers' code; it passes `check`."""
        if loaded.is_quantized:
            return check()
        if loaded.owns_weights:
            pack_linears(self._model)
        if loaded.owns_weights and FusedDecoder.can_run(self._model):
            self._decoder = FusedDecoder(self._model)
            try:
                return check()
            except ModelError as error:
                logger.warning("not using the fused decoder: %s", error)
                self._decoder = None
        speed_up_linears(self._model)
        check()

    def _plain_logits(self, token_ids: list[int]) -> Tensor:
        input_ids = torch.tensor([token_ids], device=self.device)
        logits: Tensor = self._model(input_ids=input_ids, use_cache=False).logits[0]
        return logits

    def _record_layers(self, token_ids: list[int]) -> list[LayerSpec]:
        recorder = LayerRecorder()
        length = len(token_ids)
        self._forward(recorder, np.array(token_ids), np.arange(length), np.arange(length))
        return recorder.specs

    def _metadata(self, inputs: StepInputs) -> AttentionMetadata:
        return AttentionMetadata(
            slot_mapping=self._tensor(inputs.slot_mapping),
            block_tables=self._tensor(inputs.block_tables),
            query_start_loc=self._tensor(inputs.query_start_loc),
            seq_lens=self._tensor(inputs.seq_lens),
        )

    def _copy_blocks(self, output: SchedulerOutput) -> None:
        if not output.copies:
            return
        sources = self._tensor(np.array([copy.source for copy in output.copies]))
        targets = self._tensor(np.array([copy.target for copy in output.copies]))
        for cache in self._kv_cache:
            cache.copy_blocks(sources, targets)

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self.device, non_blocking=True)


def _tell_of_compilation() -> None:
    # A warning, so that those see it who have not set up logging, and wonder what takes so long.
    logger.warning("compiling kernels for this CPU: once per machine, about 20 seconds")


def _twin(model: Any) -> Any:
    """A copy of the modules, buffers and configuration that shares every parameter with the original."""
    shared = {id(parameter): parameter for parameter in model.parameters()}
    return copy.deepcopy(model, shared).eval()
