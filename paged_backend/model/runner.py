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

from paged_backend.config import EngineConfig
from paged_backend.engine.scheduler import ScheduledSequence, SchedulerOutput
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
from paged_backend.model.linear import speed_up_linears
from paged_backend.model.loader import LoadedModel
from paged_backend.model.lora import AdapterStore, StepAdapters, adapt
from paged_backend.model.pooling import PooledStep
from paged_backend.model.self_check import check_logits, probe_token_ids

logger = logging.getLogger(__name__)


class ModelRunner:
    """Runs a transformers model on packed batches over a paged KV cache.

    Building one checks that the packed run in chunks gives the logits of a plain run; a model it would get wrong
    raises ModelError. A model the user passed is not changed: the runner works on a twin that shares its weights.
    """

    def __init__(self, loaded: LoadedModel, config: EngineConfig) -> None:
        model = loaded.model if loaded.owns_weights else _twin(loaded.model)
        self._model: nn.Module = model
        self.device = model.device
        self.vocab_size = int(model.config.get_text_config().vocab_size)
        self.block_size = config.block_size
        self.adapters: AdapterStore | None = None
        """Where LoRA adapters come from, if there are any."""
        self._step_adapters = StepAdapters(model.dtype, self.device)
        with torch.inference_mode():
            probe = probe_token_ids(self.vocab_size, loaded.max_model_len, config.block_size)
            expected = self._plain_logits(probe)
            model.set_attn_implementation(PAGED)
            self._specs = self._record_layers(probe)
            bytes_per_block = kv_cache.block_bytes(self._specs, config.block_size, model.dtype)
            self.num_blocks = kv_cache.num_blocks_for(config, bytes_per_block, loaded.max_model_len, self.device)
            self._kv_cache = kv_cache.allocate(
                self._specs, self.num_blocks, config.block_size, model.dtype, self.device
            )
            self._decoder: FusedDecoder | None = None
            # Rounded activations turn the last bits of their inputs into differences like those of bfloat16.
            dtype = torch.bfloat16 if loaded.is_quantized else model.dtype
            check = functools.partial(
                check_logits, self, probe, expected, block_size=config.block_size, dtype=dtype, name=loaded.name
            )
            self._choose_code(loaded, check)
        if config.enable_lora:
            self.adapters = AdapterStore(model, config)
            if self._decoder is not None:
                adapt(self._decoder, model, self._step_adapters)

    @torch.inference_mode()
    def execute(self, output: SchedulerOutput) -> Tensor:
        """Logits [R, V] of the last `num_logits` tokens of each scheduled sequence."""
        self._copy_blocks(output)
        input_ids, positions, metadata = self._inputs(output.scheduled)
        keep = _rows_to_keep(output.scheduled)
        layers = PagedLayers(self._specs, self._kv_cache, metadata)
        if self.adapters is None:
            return self._compute(output, layers, input_ids, positions, keep)
        pooled = PooledStep(output.scheduled).rows if output.pools else []
        all_kept = np.concatenate([keep, np.array(pooled, np.int64)])
        with self._step_adapters.of(
            output.scheduled, all_kept, len(keep), hooked=self._model if self._decoder is None else None
        ):
            return self._compute(output, layers, input_ids, positions, keep)

    def _compute(
        self,
        output: SchedulerOutput,
        layers: PagedLayers,
        input_ids: np.ndarray,
        positions: np.ndarray,
        keep: np.ndarray,
    ) -> Tensor:
        if output.pools:
            return self._pool(PooledStep(output.scheduled), layers, input_ids, positions, keep)
        if self._decoder is not None:
            return self._decoder.logits(self._decoder(layers, *map(self._tensor, (input_ids, positions, keep))))
        return self._forward(layers, input_ids, positions, keep)

    def _pool(
        self, pooled: PooledStep, layers: PagedLayers, input_ids: np.ndarray, positions: np.ndarray, keep: np.ndarray
    ) -> Tensor:
        """A step that also leaves hidden states to those who want embeddings; the logits are those of `keep`."""
        num_logits = len(keep)
        keep = np.concatenate([keep, np.array(pooled.rows, np.int64)])
        if self._decoder is not None:
            hidden = self._decoder(layers, *map(self._tensor, (input_ids, positions, keep)))
            pooled.collect(hidden[num_logits:])
            return self._decoder.logits(hidden[:num_logits])

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

    def _inputs(self, scheduled: list[ScheduledSequence]) -> tuple[np.ndarray, np.ndarray, AttentionMetadata]:
        """Ids [T] and positions [T] of the packed step, and where its keys and values are."""
        num_sequences = len(scheduled)
        starts = np.fromiter((item.sequence.num_computed_tokens for item in scheduled), np.int64, num_sequences)
        lengths = np.fromiter((item.num_tokens for item in scheduled), np.int64, num_sequences)
        query_start_loc = np.zeros(num_sequences + 1, np.int32)
        np.cumsum(lengths, out=query_start_loc[1:])
        token_ids: list[int] = []
        block_tables = np.zeros((num_sequences, max(len(s.block_table) for s, _, _ in scheduled)), np.int32)
        for row, item in enumerate(scheduled):
            token_ids += item.token_ids
            block_tables[row, : len(item.sequence.block_table)] = item.sequence.block_table
        positions = np.arange(len(token_ids)) + np.repeat(starts - query_start_loc[:-1], lengths)
        rows = np.repeat(np.arange(num_sequences), lengths)
        blocks = block_tables[rows, positions // self.block_size].astype(np.int64)
        metadata = AttentionMetadata(
            slot_mapping=self._tensor(blocks * self.block_size + positions % self.block_size),
            block_tables=self._tensor(block_tables),
            query_start_loc=self._tensor(query_start_loc),
            seq_lens=self._tensor((starts + lengths).astype(np.int32)),
        )
        return np.array(token_ids, np.int64), positions, metadata

    def _copy_blocks(self, output: SchedulerOutput) -> None:
        """All sources are read before a target is written, since a target may be another copy's source."""
        if not output.copies:
            return
        sources = self._tensor(np.array([copy.source for copy in output.copies]))
        targets = self._tensor(np.array([copy.target for copy in output.copies]))
        for keys, values in self._kv_cache:
            keys[targets] = keys[sources]
            values[targets] = values[sources]

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self.device, non_blocking=True)


def _rows_to_keep(scheduled: list[ScheduledSequence]) -> np.ndarray:
    """Where in the pack the tokens are whose logits are wanted."""
    keep: list[int] = []
    end = 0
    for _, num_tokens, num_logits in scheduled:
        end += num_tokens
        keep.extend(range(end - num_logits, end))
    return np.array(keep, np.int64)


def _twin(model: Any) -> Any:
    """A copy of the modules, buffers and configuration that shares every parameter with the original."""
    shared = {id(parameter): parameter for parameter in model.parameters()}
    return copy.deepcopy(model, shared).eval()
