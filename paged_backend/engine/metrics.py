"""Counters of one engine, and the snapshot `LLM.stats()` returns."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable

from paged_backend.engine.request import Request, Sequence
from paged_backend.engine.scheduler import Scheduler, SchedulerOutput
from paged_backend.histogram import Histogram

STEP_TOKENS_BOUNDS = (1.0, *(float(8 << power) for power in range(12)))
"""1, 8, 16, … 16384."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """A snapshot between two steps. What a model without a KV cache does not have is 0."""

    num_running: int = 0
    """Sequences being computed."""
    num_waiting: int = 0
    """Sequences waiting for room, preempted ones among them."""
    num_blocks: int = 0
    block_size: int = 0
    """Tokens of a block."""
    num_layer_groups: int = 0
    """Each has blocks of its own for the same tokens, if the model's layers look back differently far."""
    max_sequence_len: int = 0
    """Most tokens of one sequence: the model's limit, or what the KV cache holds."""
    num_free_blocks: int = 0
    """Blocks that nobody holds; cached ones among them."""
    num_cached_blocks: int = 0
    """Free blocks that a later request with the same prefix can take back."""
    num_evictions: int = 0
    """Cached blocks that were handed out for something else."""
    num_steps: int = 0
    step_seconds: float = 0.0
    num_computed_tokens: int = 0
    """Tokens the model was run on."""
    num_generated_tokens: int = 0
    num_prefix_queried_tokens: int = 0
    num_prefix_hit_tokens: int = 0
    num_preemptions: int = 0
    num_swaps: int = 0
    """Preemptions after which nothing had to be computed again; see `swap_space`."""
    num_swap_blocks: int = 0
    """Blocks of host memory."""
    num_free_swap_blocks: int = 0
    num_draft_tokens: int = 0
    """Guesses at coming tokens that steps have checked; see `speculative_config`."""
    num_accepted_tokens: int = 0
    """Those that were right."""
    num_drafts: int = 0
    """Times that a sequence had guesses checked, one or several at once."""
    num_accepted_by_position: tuple[int, ...] = ()
    """The accepted ones by their place among those that were checked at once."""
    step_tokens: Histogram = dataclasses.field(default_factory=lambda: Histogram(STEP_TOKENS_BOUNDS))
    """Tokens that each step computed."""
    max_loras: int = 0
    """Most different LoRA adapters in one step; 0 if there are none."""
    running_loras: tuple[str, ...] = ()
    """Names of the adapters of sequences that run."""
    waiting_loras: tuple[str, ...] = ()
    """Names of the adapters of those that wait."""
    largest_batch: int = 0
    """Most sequences that shared a step."""
    kv_waste_ratio: float = 0.0
    """Slots of held blocks that hold nothing / all slots of held blocks, over all steps."""
    finished: dict[str, int] = dataclasses.field(default_factory=dict)
    """Requests by the reason of their (first) output's end."""
    failed: dict[str, int] = dataclasses.field(default_factory=dict)
    """Requests by the error that ended them."""

    @property
    def draft_acceptance_rate(self) -> float:
        """Share of the draft tokens that were right; 0 if there were none."""
        return self.num_accepted_tokens / max(self.num_draft_tokens, 1)

    @property
    def kv_cache_usage(self) -> float:
        """Share of the blocks that are held."""
        return 1.0 - self.num_free_blocks / self.num_blocks if self.num_blocks else 0.0


class EngineMetrics:
    """Counts what happened; what is now, it asks the scheduler."""

    def __init__(self) -> None:
        self._num_steps = 0
        self._step_seconds = 0.0
        self._num_computed_tokens = 0
        self._num_generated_tokens = 0
        self._step_tokens = Histogram(STEP_TOKENS_BOUNDS)
        self._largest_batch = 0
        self._num_unused_slots = 0
        self._num_held_slots = 0
        self._finished: Counter[str] = Counter()
        self._failed: Counter[str] = Counter()

    def step(self, scheduled: SchedulerOutput, num_sampled: int, seconds: float, scheduler: Scheduler) -> None:
        self._num_steps += 1
        self._step_seconds += seconds
        self._num_computed_tokens += scheduled.num_tokens
        self._num_generated_tokens += num_sampled
        self._step_tokens.observe(scheduled.num_tokens)
        self._largest_batch = max(self._largest_batch, len(scheduled.scheduled))
        manager = scheduler.kv_cache_manager
        self._num_unused_slots += manager.num_unused_slots(scheduler.running)
        self._num_held_slots += manager.pool.num_used * manager.block_size

    def finished(self, request: Request) -> None:
        reason = request.sequences[0].finish_reason
        assert reason is not None
        self._finished[reason.value] += 1

    def failed(self, error: Exception) -> None:
        self._failed[type(error).__name__] += 1

    def stats(self, scheduler: Scheduler) -> EngineStats:
        manager = scheduler.kv_cache_manager
        return EngineStats(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            num_blocks=manager.pool.num_blocks,
            block_size=manager.block_size,
            num_layer_groups=len(manager.layout.reaches),
            max_sequence_len=scheduler.max_len,
            num_free_blocks=manager.pool.num_free,
            num_cached_blocks=manager.pool.num_cached,
            num_evictions=manager.pool.num_evictions,
            num_steps=self._num_steps,
            step_seconds=self._step_seconds,
            num_computed_tokens=self._num_computed_tokens,
            num_generated_tokens=self._num_generated_tokens,
            num_prefix_queried_tokens=manager.num_queried_tokens,
            num_prefix_hit_tokens=manager.num_hit_tokens,
            num_preemptions=scheduler.num_preemptions,
            num_swaps=manager.num_swaps,
            num_swap_blocks=manager.swap_pool.num_blocks,
            num_free_swap_blocks=manager.swap_pool.num_free,
            num_draft_tokens=scheduler.num_draft_tokens,
            num_accepted_tokens=sum(scheduler.num_accepted_by_position),
            num_drafts=scheduler.num_drafts,
            num_accepted_by_position=tuple(scheduler.num_accepted_by_position),
            step_tokens=self._step_tokens.copy(),
            max_loras=scheduler.max_adapters or 0,
            running_loras=_adapter_names(scheduler.running),
            waiting_loras=_adapter_names(scheduler.waiting),
            largest_batch=self._largest_batch,
            kv_waste_ratio=self._num_unused_slots / max(self._num_held_slots, 1),
            finished=dict(self._finished),
            failed=dict(self._failed),
        )


def _adapter_names(sequences: Iterable[Sequence]) -> tuple[str, ...]:
    adapters = (sequence.request.adapter for sequence in sequences)
    return tuple(sorted({adapter.name for adapter in adapters if adapter is not None}))
