"""Who holds which block of the KV cache at one moment: for people who watch, of bounded size whatever the cache."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterable

from paged_backend.engine.metrics import EngineStats
from paged_backend.engine.request import Request, Sequence, Status
from paged_backend.engine.scheduler import Scheduler

NOBODY = -1
_MAX_REQUESTS = 64


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KVCells:
    """Columns of cells. A cell is one block or, if the cache has more of them than the map has cells, neighbours."""

    owners: list[int] = dataclasses.field(default_factory=list)
    """The number of the first request that holds one of its blocks; -1 if nobody does."""
    num_held: list[int] = dataclasses.field(default_factory=list)
    """Blocks that somebody holds."""
    num_shared: list[int] = dataclasses.field(default_factory=list)
    """Of these, blocks that more than one sequence holds."""
    num_cached: list[int] = dataclasses.field(default_factory=list)
    """Blocks that nobody holds, but that a later request with the same prefix can take back."""
    num_filled_slots: list[int] = dataclasses.field(default_factory=list)
    """Slots of held blocks that hold keys and values."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KVRequest:
    """A request as the map knows it: by its number, which counts arrivals."""

    number: int
    is_running: bool
    num_prompt_tokens: int
    num_cached_tokens: int
    """Prompt tokens that were found in the prefix cache."""
    num_output_tokens: int
    """Of all its samples or beams together."""
    num_blocks: int
    """Blocks that it holds, alone or with others."""
    num_sequences: int
    """Samples or beams that have begun."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KVMap:
    """A snapshot between two steps.

    The cells are the blocks that have ever been handed out, in order; those after them are free and hold nothing.
    """

    time: float = dataclasses.field(default_factory=time.monotonic)
    """Seconds of a clock that starts anywhere."""
    stats: EngineStats
    blocks_per_cell: int = 1
    cells: KVCells = dataclasses.field(default_factory=KVCells)
    requests: list[KVRequest] = dataclasses.field(default_factory=list)
    """The first 64: those that run, then those that wait."""

    @property
    def kv_waste(self) -> float:
        """Slots of held blocks that hold nothing / all slots of held blocks, now."""
        num_held_slots = sum(self.cells.num_held) * self.stats.block_size
        num_filled_slots = sum(self.cells.num_filled_slots)
        return 1.0 - num_filled_slots / num_held_slots if num_held_slots else 0.0


def kv_map(scheduler: Scheduler, stats: EngineStats, max_cells: int) -> KVMap:
    """The map of what the scheduler has handed out, of `max_cells` cells at most."""
    num_touched = scheduler.kv_cache_manager.pool.num_touched
    blocks_per_cell = max(1, -(-num_touched // max_cells))
    return KVMap(
        stats=stats,
        blocks_per_cell=blocks_per_cell,
        cells=_cells(scheduler, num_touched, blocks_per_cell),
        requests=_requests(itertools.chain(scheduler.running, scheduler.waiting)),
    )


def _cells(scheduler: Scheduler, num_touched: int, blocks_per_cell: int) -> KVCells:
    pool = scheduler.kv_cache_manager.pool
    owners, num_filled_slots = _held_blocks(scheduler, num_touched)
    ref_counts = [pool.ref_count(block) for block in range(num_touched)]
    is_cached = [False] * num_touched
    for block in pool.findable():
        is_cached[block] = ref_counts[block] == 0
    return KVCells(
        owners=_per_cell(owners, blocks_per_cell, _first_owner),
        num_held=_per_cell([int(count > 0) for count in ref_counts], blocks_per_cell, sum),
        num_shared=_per_cell([int(count > 1) for count in ref_counts], blocks_per_cell, sum),
        num_cached=_per_cell(list(map(int, is_cached)), blocks_per_cell, sum),
        num_filled_slots=_per_cell(num_filled_slots, blocks_per_cell, sum),
    )


def _held_blocks(scheduler: Scheduler, num_touched: int) -> tuple[list[int], list[int]]:
    """Of each block, the number of the first request that holds it, and how many of its slots are filled."""
    block_size = scheduler.kv_cache_manager.block_size
    owners, num_filled_slots = [NOBODY] * num_touched, [0] * num_touched
    for sequence in scheduler.running:
        _, number, _ = sequence.order
        for table in sequence.tables:
            num_left = sequence.num_computed_tokens - table.num_dropped * block_size
            for block in table.held:
                if owners[block] == NOBODY:
                    owners[block] = number
                num_filled_slots[block] = max(num_filled_slots[block], min(num_left, block_size))
                num_left = max(0, num_left - block_size)
    return owners, num_filled_slots


def _per_cell(values: list[int], blocks_per_cell: int, joined: Callable[[list[int]], int]) -> list[int]:
    if blocks_per_cell == 1:
        return values
    return [joined(values[start : start + blocks_per_cell]) for start in range(0, len(values), blocks_per_cell)]


def _first_owner(owners: list[int]) -> int:
    return next((owner for owner in owners if owner != NOBODY), NOBODY)


def _requests(sequences: Iterable[Sequence]) -> list[KVRequest]:
    requests: dict[str, Request] = {}
    for sequence in sequences:
        requests.setdefault(sequence.request.request_id, sequence.request)
        if len(requests) == _MAX_REQUESTS:
            break
    return list(map(_request, requests.values()))


def _request(request: Request) -> KVRequest:
    begun = [sequence for sequence in request.sequences if sequence.token_ids]
    _, number, _ = begun[0].order
    return KVRequest(
        number=number,
        is_running=any(sequence.status is Status.RUNNING for sequence in begun),
        num_prompt_tokens=len(request.prompt_token_ids),
        num_cached_tokens=request.sequences[0].num_cached_tokens,
        num_output_tokens=sum(sequence.num_output_tokens for sequence in begun),
        num_blocks=len({block for sequence in begun for block in sequence.held_blocks}),
        num_sequences=len(begun),
    )
