"""Scheduled sequences to tensors to logits."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import gc
import logging
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor
from transformers.utils import logging as transformers_logging

import paged_kernels
from paged_backend.config import EngineConfig
from paged_backend.engine.kv_layout import EVERYTHING, KVLayout, Reach
from paged_backend.engine.scheduler import OutOfDeviceMemoryError, SchedulerOutput
from paged_backend.errors import ConfigError, ModelError
from paged_backend.model import kv_cache
from paged_backend.model.adaptable import LayerWatch
from paged_backend.model.attention import PAGED, LayerSpec
from paged_backend.model.attention_backends import AttentionBackend, Needs, attention_backend
from paged_backend.model.decoder import FusedDecoder
from paged_backend.model.huge_pages import use_huge_pages
from paged_backend.model.inputs import StepInputs, decodes_first, step_inputs
from paged_backend.model.kv_cache import LayerCache
from paged_backend.model.largest_step import largest_lengths, largest_step, sample_all
from paged_backend.model.layer_groups import LayerGroups, layer_groups
from paged_backend.model.linear import PackedLinear, speed_up_linears
from paged_backend.model.loader import LoadedModel
from paged_backend.model.lora import AdapterStore, StepAdapters
from paged_backend.model.mapped_files import compiler_given_back
from paged_backend.model.memory import DeviceMeter, is_out_of_memory, meter_of, room_for
from paged_backend.model.model_call import ModelCall
from paged_backend.model.packed_run import PackedRun
from paged_backend.model.packing import pack_linears, unpack_what_was_read
from paged_backend.model.pooling import PooledStep
from paged_backend.model.ranks import Ranks
from paged_backend.model.rope import freeze_frequencies
from paged_backend.model.self_check import check_logits, probe_token_ids
from paged_backend.model.shards import least_of_all, run_whole
from paged_backend.model.swap import HostBlocks
from paged_backend.model.threads import thread_count
from paged_backend.model.tiers.calls import Piece
from paged_backend.model.tiers.gathered import GatheredTier
from paged_backend.model.tiers.grouped import GroupedRun, InCall
from paged_backend.model.tiers.own_cache import OwnCacheTier
from paged_backend.model.tiers.stateful import StatefulTier
from paged_backend.model.ways import Tier, Verdict, Way, kinds_of_layers, ways_to_run
from paged_kernels.ahead import compile_beside
from paged_kernels.transfers import on_device, to_device

logger = logging.getLogger(__name__)


_ATTENDING_ITSELF = (Tier.GATHERED, Tier.OWN_CACHE)
"""Where the model's own code attends."""
_Tier = StatefulTier | GatheredTier | OwnCacheTier
_Copies = Sequence[tuple[int, int]]


class RankStep(NamedTuple):
    """A step as the other ranks get it."""

    inputs: StepInputs
    copies: _Copies
    """Blocks whose contents are copied before anything else, and where to."""
    swap_outs: _Copies
    swap_ins: _Copies
    pooled_rows: list[int]
    """Where in the pack the tokens are whose hidden states rank 0 wants, and nobody else."""


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
        self._packed: PackedRun | None = None
        self._grouped: GroupedRun | None = None
        """One of these runs."""
        self.reaches: tuple[Reach, ...] = (EVERYTHING,)
        """How far the layers of each group look back."""
        self._kv_cache: list[LayerCache] = []
        self._attention: AttentionBackend | None = None
        """None: the model's own code attends."""
        self._host_blocks: HostBlocks | None = None
        self.adapters: AdapterStore | None = None
        """Where LoRA adapters come from, if there are any."""
        self._layer_watch: LayerWatch | None = None
        self._step_adapters = StepAdapters(self._model.dtype, self.device)
        """Of steps that are cut into calls."""
        with torch.inference_mode(), on_device(self.device):
            freeze_frequencies(self._model, loaded.max_model_len)
            compiles = functools.partial(_compile_beside, self._model, config)
            with paged_kernels.telling_of_compilation(compiles), compiler_given_back():
                _start_compiler(self._model)
                self.verdict = self._choose_way(loaded, config)
        use_huge_pages(module.packed.values for module in self._model.modules() if isinstance(module, PackedLinear))
        if config.swap_space and not self.verdict.keeps_state:
            self._host_blocks = HostBlocks(self._kv_cache, config.swap_space)
        if config.enable_lora:
            self._add_adapters(config)
        if loaded.ranks is not None:
            loaded.ranks.gather()
            self._ranks = loaded.ranks

    @property
    def num_swap_blocks(self) -> int:
        return 0 if self._host_blocks is None else self._host_blocks.num_blocks

    @property
    def takes_pending_tokens(self) -> bool:
        """Whether a step may be launched with tokens that the device alone knows yet: not one of several calls, which
        are chosen by their tokens, nor in ranks."""
        queues = self._attention is not None and self._attention.lets_steps_queue
        return queues and self._packed is not None and not self._is_sharded

    def close(self) -> None:
        """End the other ranks, and let go of the model and of all memory on the device. Closing twice is fine."""
        if self._ranks is not None:
            self._ranks.close()
        if self.device.type == "cuda" and self._packed is not None:
            with contextlib.suppress(RuntimeError):  # of a step that failed there
                torch.cuda.synchronize(self.device)  # a graph in flight must not be let go
        self._model, self._packed, self._grouped = None, None, None
        self._kv_cache, self._host_blocks, self._attention = [], None, None
        if self.device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()

    def _add_adapters(self, config: EngineConfig) -> None:
        unlike = frozenset[str]() if self._layer_watch is None else self._layer_watch.unlike
        self.adapters = AdapterStore(self._model, config, unlike)
        if self._packed is not None:
            self._packed.add_adapters(config)

    def _choose_way(self, loaded: LoadedModel, config: EngineConfig) -> Verdict:
        trial = self._trial(loaded, config)
        settings, reasons = _settings_of_paged_attention(trial), []
        for way in ways_to_run(self._model):
            if (self._is_sharded and way.tier is not Tier.PACKED) or (settings and way.tier in _ATTENDING_ITSELF):
                continue
            try:
                verdict = self._try_way(way, trial)
            except ConfigError:
                raise
            except Exception as error:  # a model's code can fail in any way when it gets what it does not expect
                if self._is_sharded and not isinstance(error, ModelError):
                    raise  # ranks do not go on from where one of them may have got stuck
                level = logging.WARNING if _is_of_kernels(error) else logging.DEBUG
                logger.log(level, "%s cannot run %s: %r", loaded.name, way, error)
                logger.debug("this is where", exc_info=True)
                reasons.append(f"{way}: {error if isinstance(error, ModelError) else repr(error)}")
                self._kv_cache, self._packed = [], None
            else:
                logger.info("%s runs %s", loaded.name, way)
                return verdict
        said = f"gives the logits of a plain run ({'; '.join(reasons)})"
        if settings:
            raise ConfigError(
                f"{' with '.join(settings)} is not available for {loaded.name}: no way to run it like this {said}; "
                "leave it at 'auto'"
            )
        raise ModelError(f"{loaded.name}: no way to run it {said}")

    def _trial(self, loaded: LoadedModel, config: EngineConfig) -> _Trial:
        model = self._model
        padding: int | None = getattr(model.config, "pad_token_id", None)
        without = frozenset[int]() if padding is None else frozenset([padding])
        probe = probe_token_ids(self.vocab_size, loaded.max_model_len, config.block_size, without=without)
        token_ids = self._tensor(np.array(probe))
        expected = run_whole(model, token_ids) if self._is_sharded else ModelCall(model).plain(token_ids)
        dtype = kv_cache.storage_dtype(config, model.dtype)
        rounds_inputs = loaded.is_quantized or any(isinstance(module, PackedLinear) for module in model.modules())
        coarsest = torch.int8 if rounds_inputs and dtype.itemsize > 1 else dtype
        check = functools.partial(check_logits, self, probe, expected, block_size=config.block_size, dtype=coarsest)
        if config.enable_lora:
            check = functools.partial(self._check_and_watch, check)
        return _Trial(loaded, config, probe, dtype, check, model.config._attn_implementation)

    def _check_and_watch(self, check: Callable[[], float]) -> float:
        """Also finds out which layers adapters may change."""
        self._layer_watch = LayerWatch(self._model)
        with self._layer_watch.watching():
            return check()

    def _try_way(self, way: Way, trial: _Trial) -> Verdict:
        """Raises ModelError, or whatever the model's code raises, if this is not the way to run it."""
        config, block_size = trial.config, trial.config.block_size
        tier, groups, specs = self._record(way, trial)
        max_len, meter, step_bytes = trial.loaded.max_model_len, meter_of(self.device), 0
        layout = KVLayout(self.reaches, block_size, config.max_num_batched_tokens)
        own_bytes = 0 if tier is None else tier.token_bytes
        bytes_per_block = (kv_cache.token_bytes(groups.layers_of_block(specs), trial.dtype) + own_bytes) * block_size
        bytes_per_token = kv_cache.token_bytes(specs, trial.dtype) + own_bytes
        state_bytes = 0 if tier is None else tier.state_bytes
        lengths = largest_lengths(config, max_len)
        difference: float | None = None
        if meter is not None:
            num_blocks = -(-max(*lengths, 2 * len(trial.probe)) // block_size) + 1
            self._allocate(tier, trial, num_blocks * len(self.reaches))
            difference = self._settle(tier, way, trial)
            step_bytes = self._measure(meter, lengths)
            self._allocate(tier, trial, 0)
        room = room_for(config, layout, bytes_per_block, state_bytes, max_len, self.device, step_bytes=step_bytes)
        num_blocks = least_of_all(room.num_blocks, self.device) if self._is_sharded else room.num_blocks
        self._allocate(tier, trial, num_blocks)
        if difference is None:
            difference = self._settle(tier, way, trial)
        return Verdict(
            way=way,
            layers=kinds_of_layers(specs),
            difference=difference,
            bytes_per_token=bytes_per_token,
            bytes_per_old_token=own_bytes + kv_cache.token_bytes(groups.layers_of_the_past(specs), trial.dtype),
            bytes_per_sequence=state_bytes,
            num_tokens=layout.num_tokens(self.num_blocks, max_len),
            max_model_len=max_len,
            layout=layout,
            max_num_seqs=room.max_num_seqs,
            keeps_state=state_bytes > 0 or way.tier is Tier.OWN_CACHE,
        )

    def _record(self, way: Way, trial: _Trial) -> tuple[_Tier | None, LayerGroups, Sequence[kv_cache.KVShape]]:
        """Who runs the model (None: `self._packed`), and what its layers keep; chooses who attends to that."""
        model, config = self._model, trial.config
        call = ModelCall(model, position_offset=way.position_offset)
        latents = not (config.enable_lora or self._is_sharded)
        tier = self._tier(way, call, latents=latents)
        _set_attention(model, PAGED if tier is None else tier.implementation or trial.own_implementation)
        specs: Sequence[kv_cache.KVShape]
        self._packed = PackedRun(model, call, is_sharded=self._is_sharded) if tier is None else None
        if self._packed is not None:
            specs = self._packed.record(trial.probe, latents=latents)
        else:
            assert tier is not None
            specs = tier.record(self._tensor(np.array(trial.probe))[None])
        groups = layer_groups(specs, config.block_size, trial.loaded.max_model_len)
        self._specs, self._places, self.reaches = groups.tell(specs), groups.place_of, groups.reaches
        self._attention = None
        if way.tier not in _ATTENDING_ITSELF:
            layers = cast("list[LayerSpec]", self._specs)
            needs = Needs(self.device, model.dtype, trial.dtype, config.block_size, layers)
            self._attention = attention_backend(config.attention_backend, needs)
        return tier, groups, specs

    def _settle(self, tier: _Tier | None, way: Way, trial: _Trial) -> float:
        """Choose what will run, with the cache that there is; the difference from a plain run."""
        if tier is not None:
            return self._use_tier(tier, way, trial)
        assert self._packed is not None
        difference = self._choose_code(self._packed, trial)
        sizes = trial.loaded.max_model_len, self.block_size, len(self.reaches)
        self._packed.make_graphs(trial.config, *sizes)
        return difference

    def _measure(self, meter: DeviceMeter, lengths: list[int]) -> int:
        """The bytes that steps take: the largest one, and graphs, which keep what they take."""
        step_bytes = meter.peak_of(lambda: self._compute_largest_step(lengths))
        graphs = None if self._packed is None else self._packed.graphs
        return step_bytes + (0 if graphs is None else meter.peak_of(graphs.compute_largest))

    def _allocate(self, tier: _Tier | None, trial: _Trial, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        sizes = num_blocks, self.block_size, trial.dtype, self.device
        self._kv_cache = kv_cache.allocate(self._specs, *sizes, self._places)
        runs = self._packed if tier is None else tier
        assert runs is not None
        runs.attach(self._specs, self._kv_cache, self._attention)

    def _compute_largest_step(self, lengths: list[int]) -> None:
        """So many tokens of each of so many sequences, and the sampling of a token for each of them."""
        sample_all(self._run(largest_step(lengths, self.vocab_size, self.block_size, len(self.reaches))))

    def _tier(self, way: Way, call: ModelCall, *, latents: bool) -> _Tier | None:
        """None: the model takes packs."""
        if way.tier is Tier.STATEFUL:
            return StatefulTier(self._model, call, self.block_size, latents=latents)
        if way.tier is Tier.GATHERED:
            return GatheredTier(self._model, call, self.block_size)
        return OwnCacheTier(self._model, call) if way.tier is Tier.OWN_CACHE else None

    @torch.inference_mode()
    def execute(self, output: SchedulerOutput) -> Tensor:
        """Logits [R, V] of the last `num_logits` tokens of each scheduled sequence.

        Raises OutOfDeviceMemoryError, once blocks have been swapped, if the memory does not suffice for the rest."""
        self._thread_count.adjust()
        reason = ""
        try:
            with on_device(self.device):
                return self._run(output)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            reason = str(error)
        # Outside of the handler, so that no traceback keeps the step's tensors.
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        raise OutOfDeviceMemoryError(reason)

    def _run(self, output: SchedulerOutput) -> Tensor:
        reordered = None
        if self._attention is not None and self._attention.puts_decodes_first:
            reordered = decodes_first(output.scheduled)
        if reordered is None:
            return self._run_in_order(output)
        scheduled, rows = reordered
        return self._run_in_order(dataclasses.replace(output, scheduled=scheduled))[self._tensor(rows)]

    def _run_in_order(self, output: SchedulerOutput) -> Tensor:
        if self._grouped is not None:
            self._move_blocks(output.copies, *output.swaps)
            return self._grouped.execute(output, self.device, self._adapters_of_calls(output))
        inputs = step_inputs(output.scheduled, self.block_size)
        if self._ranks is None:
            return self._execute(output, inputs)
        pooled = PooledStep(output.scheduled).rows if output.pools else []
        with self._ranks.step(RankStep(inputs, output.copies, *output.swaps, pooled)):
            return self._execute(output, inputs)

    def _execute(self, output: SchedulerOutput, inputs: StepInputs) -> Tensor:
        assert self._packed is not None
        self._move_blocks(output.copies, *output.swaps)
        return self._packed.execute(output, inputs)

    def _adapters_of_calls(self, output: SchedulerOutput) -> InCall:
        """What is to be around each call of a step that is cut into calls."""
        adapters = {item.sequence.request.adapter for item in output.scheduled} - {None}

        def in_call(pieces: list[Piece], keep: list[int]) -> contextlib.AbstractContextManager[None]:
            if not adapters:
                return contextlib.nullcontext()
            parts = [(piece.sequence.request.adapter, len(piece.token_ids)) for piece in pieces]
            rows = np.array(keep, np.int64)
            return self._step_adapters.of(parts, rows, len(rows), self._model, beside=adapters)

        return in_call

    @torch.inference_mode()
    def follow(self, step: RankStep) -> None:
        """Take part in a step that rank 0 executes."""
        self._thread_count.adjust()
        assert self._packed is not None
        with on_device(self.device):
            self._move_blocks(step.copies, step.swap_outs, step.swap_ins)
            self._packed.follow(step.inputs, step.pooled_rows)

    def rows(self, logits: Tensor, rows: list[int]) -> Tensor:
        """These rows of the logits, in this order; on the CPU if the device cannot sample, having no float64."""
        if logits.device.type == "mps":
            logits = logits.cpu()
        if rows == list(range(logits.shape[0])):
            return logits
        return logits[to_device(np.array(rows), logits.device)]

    def _choose_code(self, packed: PackedRun, trial: _Trial) -> float:
        """Fused code where it fits and the weights are ours to merge, else transformers' code; it passes the check."""
        self._grouped = None
        if trial.loaded.is_quantized or self._is_sharded:  # whose layers are more than their weights
            return trial.check()
        if trial.loaded.owns_weights:
            pack_linears(self._model, alike=FusedDecoder.can_run(self._model))
        if trial.loaded.owns_weights and FusedDecoder.can_run(self._model):
            packed.use(FusedDecoder(self._model))
            try:
                return trial.check()
            except ModelError as error:
                logger.warning("%s: not using the fused decoder: %s", trial.loaded.name, error)
                packed.use(None)
        return self._check_linears(trial)

    def _use_tier(self, tier: _Tier, way: Way, trial: _Trial) -> float:
        if trial.loaded.owns_weights:
            pack_linears(self._model)
        self._grouped = GroupedRun(
            tier,
            whole_prompts=way.whole_prompts,
            one_by_one=way.tier is Tier.OWN_CACHE,
            head=self._model.get_output_embeddings,
        )
        return self._check_linears(trial)

    def _check_linears(self, trial: _Trial) -> float:
        """Check the model's own code, and have our kernels multiply in it."""
        speed_up_linears(self._model)
        difference = trial.check()
        unpack_what_was_read(self._model)
        speed_up_linears(self._model)
        return difference

    def _move_blocks(self, copies: _Copies, swap_outs: _Copies, swap_ins: _Copies) -> None:
        if self._host_blocks is not None:
            self._host_blocks.copy_out(swap_outs)
        self._copy_blocks(copies)
        if self._host_blocks is not None:
            self._host_blocks.copy_in(swap_ins)

    def _copy_blocks(self, copies: _Copies) -> None:
        if not copies:
            return
        sources, targets = (self._tensor(np.array(blocks)) for blocks in zip(*copies, strict=True))
        distinct = {id(cache.keys): cache for cache in self._kv_cache}  # layers may share theirs
        for cache in distinct.values():
            cache.copy_blocks(sources, targets)

    def _tensor(self, array: np.ndarray) -> Tensor:
        return to_device(array, self.device)


def _is_of_kernels(error: Exception) -> bool:
    """Whether a kernel failed, or its compiler, and not the model's code."""
    names = (frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__))
    return any(name.partition(".")[0] in ("paged_kernels", "triton", "numba") for name in names)


def _settings_of_paged_attention(trial: _Trial) -> list[str]:
    """Those that were asked for, and which the model's own attention does not have."""
    config, settings = trial.config, []
    if config.kv_cache_dtype != "auto" and trial.dtype != trial.loaded.model.dtype:
        settings.append(f"kv_cache_dtype={config.kv_cache_dtype!r}")
    if config.attention_backend != "auto":
        settings.append(f"attention_backend={config.attention_backend!r}")
    return settings


def _set_attention(model: Any, implementation: str) -> None:
    """Without a warning from models that have one implementation only."""
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        model.set_attn_implementation(implementation)
    finally:
        transformers_logging.set_verbosity(verbosity)


def _compile_beside(model: Any, config: EngineConfig) -> None:
    if model.device.type == "cpu" and config.tensor_parallel_size == 1:
        compile_beside(model.dtype, kv_cache.storage_dtype(config, model.dtype))
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
