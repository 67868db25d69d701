"""Scheduled sequences to tensors to logits."""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from transformers.utils import logging as transformers_logging

import paged_kernels
from paged_backend.config import EngineConfig
from paged_backend.engine.scheduler import SchedulerOutput
from paged_backend.errors import ConfigError, ModelError
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
from paged_backend.model.kv_cache import LayerCache
from paged_backend.model.linear import speed_up_linears, unpack_projections
from paged_backend.model.loader import LoadedModel
from paged_backend.model.lora import AdapterStore, StepAdapters, adapted
from paged_backend.model.mapped_files import compiler_given_back
from paged_backend.model.memory import room_for
from paged_backend.model.model_call import ModelCall
from paged_backend.model.pooling import PooledStep
from paged_backend.model.ranks import Ranks
from paged_backend.model.rope import freeze_frequencies
from paged_backend.model.self_check import check_logits, probe_token_ids
from paged_backend.model.shards import ArrivedLayers, arrived, least_of_all, run_whole
from paged_backend.model.threads import thread_count
from paged_backend.model.tiers.gathered import GatheredTier
from paged_backend.model.tiers.grouped import GroupedRun
from paged_backend.model.tiers.own_cache import OwnCacheTier
from paged_backend.model.tiers.stateful import StatefulTier
from paged_backend.model.tiers.step_cache import StepCache
from paged_backend.model.ways import Tier, Verdict, Way, kinds_of_layers, ways_to_run, window_of

logger = logging.getLogger(__name__)


_Tier = StatefulTier | GatheredTier | OwnCacheTier


class RankStep(NamedTuple):
    """A step as the other ranks get it."""

    inputs: StepInputs
    copies: Sequence[tuple[int, int]]
    """Blocks whose contents are copied before anything else, and where to."""
    pooled_rows: list[int]
    """Where in the pack the tokens are whose hidden states rank 0 wants, and nobody else."""


class _Discarded(NamedTuple):
    """The place of a `PooledStep` where nobody asks for its hidden states."""

    rows: list[int]

    def collect(self, hidden: Tensor) -> None:
        pass


class _Trial(NamedTuple):
    """What all ways to run a model are tried with."""

    loaded: LoadedModel
    config: EngineConfig
    probe: list[int]
    dtype: torch.dtype
    """What keys and values are stored as."""
    check: Callable[[], float]
    """Returns the difference from a plain run; raises ModelError if it is too large."""
    own_implementation: str
    """The attention that the model was loaded with."""


class ModelRunner:
    """Runs a transformers model over a paged KV cache: on packed batches, or else in one of the ways of `tiers`.

    Building one tries the ways that could be right until one gives the logits of a plain run; a model that the engine
    would get wrong raises ModelError. A model the user passed is not changed: the runner works on a twin that shares
    its weights.
    """

    def __init__(self, loaded: LoadedModel, config: EngineConfig) -> None:
        self._is_sharded = config.tensor_parallel_size > 1
        self._ranks: Ranks | None = None
        """The other ranks, once they wait for steps."""
        if loaded.ranks is not None:
            loaded.ranks.send(loaded.max_model_len)
        self._thread_count = thread_count(config.tensor_parallel_size)
        self._model: Any = loaded.model if loaded.owns_weights else _twin(loaded.model)
        self.device = self._model.device
        self.vocab_size = int(self._model.config.get_text_config().vocab_size)
        self.block_size = config.block_size
        self._decoder: FusedDecoder | None = None
        self._grouped: GroupedRun | None = None
        self._kv_cache: list[LayerCache] = []
        self.adapters: AdapterStore | None = None
        """Where LoRA adapters come from, if there are any."""
        self._step_adapters = StepAdapters(self._model.dtype, self.device)
        self._adapted_decoder: FusedDecoder | None = None
        """Of steps with adapters, if there is one of steps without."""
        with torch.inference_mode():
            freeze_frequencies(self._model, loaded.max_model_len)
            with paged_kernels.telling_of_compilation(_tell_of_compilation), compiler_given_back():
                _start_compiler(self._model)
                self.verdict = self._choose_way(loaded, config)
        if config.enable_lora:
            self._add_adapters(loaded, config)
        if loaded.ranks is not None:
            loaded.ranks.gather()
            self._ranks = loaded.ranks

    def close(self) -> None:
        """End the other ranks. Closing twice is fine."""
        if self._ranks is not None:
            self._ranks.close()

    def _add_adapters(self, loaded: LoadedModel, config: EngineConfig) -> None:
        if self._grouped is not None:
            raise ConfigError(f"{loaded.name} runs {self.verdict.way}, where LoRA does not work; leave enable_lora off")
        self.adapters = AdapterStore(self._model, config)
        if self._decoder is not None:
            self._adapted_decoder = adapted(self._decoder, self._model, self._step_adapters)

    def _choose_way(self, loaded: LoadedModel, config: EngineConfig) -> Verdict:
        trial = self._trial(loaded, config)
        reasons = []
        for way in ways_to_run(self._model):
            if self._is_sharded and way.tier is not Tier.PACKED:
                continue
            try:
                verdict = self._try_way(way, trial)
            except ConfigError:
                raise
            except Exception as error:  # a model's code can fail in any way when it gets what it does not expect
                if self._is_sharded and not isinstance(error, ModelError):
                    raise  # ranks do not go on from where one of them may have got stuck
                logger.debug("%s cannot run %s", loaded.name, way, exc_info=True)
                reasons.append(f"{way}: {error if isinstance(error, ModelError) else repr(error)}")
                self._kv_cache = []
            else:
                logger.info("%s runs %s", loaded.name, way)
                return verdict
        raise ModelError(f"{loaded.name}: no way to run it gives the logits of a plain run ({'; '.join(reasons)})")

    def _trial(self, loaded: LoadedModel, config: EngineConfig) -> _Trial:
        model = self._model
        padding: int | None = getattr(model.config, "pad_token_id", None)
        without = frozenset[int]() if padding is None else frozenset([padding])
        probe = probe_token_ids(self.vocab_size, loaded.max_model_len, config.block_size, without=without)
        token_ids = self._tensor(np.array(probe))
        expected = run_whole(model, token_ids) if self._is_sharded else ModelCall(model).plain(token_ids)
        dtype = kv_cache.storage_dtype(config, model.dtype, self.device)
        rounds_inputs = config.quantization is not None or loaded.is_quantized
        coarsest = torch.int8 if rounds_inputs else dtype
        check = functools.partial(
            check_logits, self, probe, expected, block_size=config.block_size, dtype=coarsest, name=loaded.name
        )
        return _Trial(loaded, config, probe, dtype, check, model.config._attn_implementation)

    def _try_way(self, way: Way, trial: _Trial) -> Verdict:
        """Raises ModelError, or whatever the model's code raises, if this is not the way to run it."""
        model, config, block_size = self._model, trial.config, trial.config.block_size
        if way.tier is Tier.GATHERED and trial.dtype != model.dtype:
            raise ConfigError(
                f"kv_cache_dtype={config.kv_cache_dtype!r} is not available for {trial.loaded.name}, with attention "
                "code of its own; leave it at 'auto'"
            )
        self._call = ModelCall(model, position_offset=way.position_offset)
        tier = self._tier(way)
        _set_attention(model, PAGED if tier is None else tier.implementation or trial.own_implementation)
        specs: Sequence[kv_cache.KVShape]
        if tier is None:
            specs = self._specs = self._record_layers(trial.probe, latents=not (config.enable_lora or self._is_sharded))
        else:
            specs = tier.record(self._tensor(np.array(trial.probe))[None])
        bytes_per_block = kv_cache.block_bytes(specs, block_size, trial.dtype)
        bytes_per_block += 0 if tier is None else tier.token_bytes * block_size
        state_bytes = 0 if tier is None else tier.state_bytes
        room = room_for(config, bytes_per_block, state_bytes, trial.loaded.max_model_len, self.device)
        self.num_blocks = room.num_blocks
        if self._is_sharded:
            self.num_blocks = least_of_all(self.num_blocks, self.device)
        self._kv_cache = kv_cache.allocate(specs, self.num_blocks, block_size, trial.dtype, self.device)
        difference = self._choose_code(trial) if tier is None else self._use_tier(tier, way, trial)
        return Verdict(
            way=way,
            layers=kinds_of_layers(specs),
            difference=difference,
            bytes_per_token=bytes_per_block // block_size,
            bytes_per_sequence=state_bytes,
            num_tokens=self.num_blocks * block_size,
            window=window_of(specs),
            max_num_seqs=room.max_num_seqs,
            keeps_state=state_bytes > 0 or way.tier is Tier.OWN_CACHE,
        )

    def _tier(self, way: Way) -> _Tier | None:
        """None: the model takes packs."""
        if way.tier is Tier.STATEFUL:
            return StatefulTier(self._model, self._call, self.block_size)
        if way.tier is Tier.GATHERED:
            return GatheredTier(self._model, self._call, self.block_size)
        return OwnCacheTier(self._model, self._call) if way.tier is Tier.OWN_CACHE else None

    @torch.inference_mode()
    def execute(self, output: SchedulerOutput) -> Tensor:
        """Logits [R, V] of the last `num_logits` tokens of each scheduled sequence."""
        self._thread_count.adjust()
        if self._grouped is not None:
            self._copy_blocks(output.copies)
            return self._grouped.execute(output, self.device)
        inputs = step_inputs(output.scheduled, self.block_size)
        if self._ranks is None:
            return self._execute(output, inputs)
        pooled = PooledStep(output.scheduled).rows if output.pools else []
        with self._ranks.step(RankStep(inputs, output.copies, pooled)):
            return self._execute(output, inputs)

    def _execute(self, output: SchedulerOutput, inputs: StepInputs) -> Tensor:
        self._copy_blocks(output.copies)
        layers = PagedLayers(self._specs, self._kv_cache, self._metadata(inputs))
        if self.adapters is None or not any(item.sequence.request.adapter for item in output.scheduled):
            return self._compute(output, layers, inputs, self._decoder)
        pooled = PooledStep(output.scheduled).rows if output.pools else []
        keep = np.concatenate([inputs.keep, np.array(pooled, np.int64)])
        hooked = self._model if self._adapted_decoder is None else None
        with self._step_adapters.of(output.scheduled, keep, len(inputs.keep), hooked):
            return self._compute(output, layers, inputs, self._adapted_decoder)

    @torch.inference_mode()
    def follow(self, step: RankStep) -> None:
        """Take part in a step that rank 0 executes."""
        self._thread_count.adjust()
        self._copy_blocks(step.copies)
        inputs = step.inputs
        layers = PagedLayers(self._specs, self._kv_cache, self._metadata(inputs))
        if step.pooled_rows:
            self._pool(_Discarded(step.pooled_rows), layers, inputs, None)
        else:
            self._forward(layers, inputs.input_ids, inputs.positions, inputs.keep)

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
        self, pooled: PooledStep | _Discarded, layers: PagedLayers, inputs: StepInputs, decoder: FusedDecoder | None
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
            if hidden.shape[1] > len(keep):  # the model takes no `logits_to_keep`
                hidden = hidden[:, self._tensor(keep)]
            pooled.collect(hidden[0, num_logits:])
            return (hidden[:, :num_logits],)

        hook = self._head().register_forward_pre_hook(take)
        try:
            return self._forward(layers, input_ids, positions, keep)
        finally:
            hook.remove()

    def _head(self) -> nn.Module:
        head: nn.Module = self._model.get_output_embeddings()
        return head

    def rows(self, logits: Tensor, rows: list[int]) -> Tensor:
        """These rows of the logits, in this order."""
        if rows == list(range(logits.shape[0])):
            return logits
        return logits[torch.tensor(rows, device=logits.device)]

    def _forward(
        self, layers: AttentionLayers, input_ids: np.ndarray, positions: np.ndarray, keep: np.ndarray
    ) -> Tensor:
        cache = None
        if self._has_latents:
            cache = StepCache(self._model.config, layers, num_before=0, num_new=len(input_ids), states=[])
        with attention_layers(ArrivedLayers(layers) if self._is_sharded else layers):
            logits = self._call(
                self._tensor(input_ids)[None], self._tensor(positions)[None], self._tensor(keep), cache=cache
            )
        return arrived(logits) if self._is_sharded else logits

    def _choose_code(self, trial: _Trial) -> float:
        """Fused code where it fits and the weights are ours to merge, else transformers' code; it passes the check."""
        self._grouped = None
        if trial.loaded.is_quantized or self._is_sharded:  # whose layers are more than their weights
            return trial.check()
        if trial.loaded.owns_weights and FusedDecoder.can_run(self._model):
            self._decoder = FusedDecoder(self._model)
            self._decoder.stack_layers(self._specs, self._kv_cache)
            try:
                return trial.check()
            except ModelError as error:
                logger.warning("not using the fused decoder: %s", error)
                self._decoder = None
        speed_up_linears(self._model)
        return trial.check()

    def _use_tier(self, tier: _Tier, way: Way, trial: _Trial) -> float:
        tier.attach(self._kv_cache)
        self._grouped = GroupedRun(
            tier, whole_prompts=way.whole_prompts, one_by_one=way.tier is Tier.OWN_CACHE, head=self._head()
        )
        speed_up_linears(self._model)
        return trial.check()

    def _record_layers(self, token_ids: list[int], *, latents: bool) -> list[LayerSpec]:
        """With LoRA there are no latents: an adapter adds to the outputs of a layer that they do without. Nor are there
        in shards, which have a part of that layer's weights only."""
        recorder = LayerRecorder()
        length = len(token_ids)
        self._has_latents = latents and any(hasattr(module, "kv_b_proj") for module in self._model.modules())
        self._forward(recorder, np.array(token_ids), np.arange(length), np.arange(length))
        if not recorder.specs:
            raise ModelError("its attention is code of its own")
        self._has_latents = any(spec.latent is not None for spec in recorder.specs)
        unpack_projections(self._model)
        return recorder.specs

    def _metadata(self, inputs: StepInputs) -> AttentionMetadata:
        return AttentionMetadata(
            slot_mapping=self._tensor(inputs.slot_mapping),
            block_tables=self._tensor(inputs.block_tables),
            query_start_loc=self._tensor(inputs.query_start_loc),
            seq_lens=self._tensor(inputs.seq_lens),
        )

    def _copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        if not copies:
            return
        sources, targets = (self._tensor(np.array(blocks)) for blocks in zip(*copies, strict=True))
        distinct = {id(cache.keys): cache for cache in self._kv_cache}  # layers may share theirs
        for cache in distinct.values():
            cache.copy_blocks(sources, targets)

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self.device, non_blocking=True)


def _set_attention(model: Any, implementation: str) -> None:
    """Without a warning from models that have one implementation only."""
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        model.set_attn_implementation(implementation)
    finally:
        transformers_logging.set_verbosity(verbosity)


def _tell_of_compilation() -> None:
    # A warning, so that those see it who have not set up logging, and wonder what takes so long.
    logger.warning("compiling kernels for this CPU: once per machine, less than a minute")


def _start_compiler(model: Any) -> None:
    """The first kernel takes the compiler most memory; so it comes before the weights are read."""
    if model.device.type == "cpu":
        row, cache = torch.zeros(1, 1, 1, dtype=model.dtype), torch.zeros(1, 1, 1, 1, dtype=model.dtype)
        paged_kernels.store_kv(row, row, cache, cache.clone(), torch.zeros(1, dtype=torch.int64))


def _twin(model: Any) -> Any:
    """A copy of the modules, buffers and configuration that shares every parameter with the original."""
    shared = {id(parameter): parameter for parameter in model.parameters()}
    return copy.deepcopy(model, shared).eval()
