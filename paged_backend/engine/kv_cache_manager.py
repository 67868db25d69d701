"""The KV cache in a sequence's terms: find its prefix, make room for its tokens, fork it, give its blocks back."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable
from typing import NamedTuple

from paged_backend.engine.block_pool import BlockKey, BlockPool, CachedBlock
from paged_backend.engine.request import Sequence, SwappedBlocks

_ALL = sys.maxsize
"""As if all blocks that there will ever be were published."""


class BlockCopy(NamedTuple):
    """Keys and values the runner copies before the step's own are stored."""

    source: int
    target: int


class Swaps(NamedTuple):
    """Copies between the KV cache and host memory that belong to a step, before all else that it does."""

    outs: list[BlockCopy]
    """To host memory: their sources may be written in the same step."""
    ins: list[BlockCopy]
    """From host memory."""


class _Publication(NamedTuple):
    """A block that a step was scheduled to fill, and whose it is."""

    block: int
    sequence: Sequence
    place: int
    """In the sequence's table."""
    prefix_id: int | None
    """What is before the block."""


class KVCacheManager:
    """Keeps every sequence's block table.

    A table covers at least the sequence's computed tokens. Blocks another sequence may read are never written: a
    sequence whose next slot lies in a shared block gets a copy of it first. Only full blocks are published, as soon as
    a step is scheduled to fill them, so that requests that arrive together share them; if that step fails,
    `unpublish_step` takes them back.

    With a `window`, a token looks at that many only, itself included, in every layer. Blocks behind the windows of all
    tokens to come are given back; the table keeps their ids, which nobody reads.

    With `num_swap_blocks` blocks of host memory, a preempted sequence has its computed tokens there until the step that
    it is admitted in again is computed; if they do not fit, they are computed again.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        enable_prefix_caching: bool = True,
        window: int | None = None,
        num_swap_blocks: int = 0,
    ) -> None:
        self.block_size = block_size
        self._window = window
        self.enable_prefix_caching = enable_prefix_caching
        self.pool = BlockPool(num_blocks)
        self.swap_pool = BlockPool(num_swap_blocks)
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0
        self.num_swaps = 0
        """Preempted sequences that went to host memory."""
        self._published_in_step: list[_Publication] = []
        self._swaps = Swaps([], [])
        self._returned: list[Sequence] = []
        """Those whose blocks come from host memory in this step."""

    @property
    def num_slots(self) -> int:
        """How many tokens the whole cache holds."""
        return self.pool.num_blocks * self.block_size

    def begin_step(self) -> Swaps:
        """Returns what will hold the step's swaps, once all of it is scheduled."""
        self._published_in_step.clear()
        self._returned.clear()
        self._swaps = Swaps([], [])
        return self._swaps

    def end_step(self) -> None:
        """The step is computed: what came from host memory is not needed there any more."""
        for sequence in self._returned:
            self.forget_swapped(sequence)
        self._returned.clear()

    def unpublish_step(self) -> None:
        """The step failed: nobody may find the blocks it was to fill, and nobody has published them."""
        for block, sequence, place, prefix_id in reversed(self._published_in_step):
            self.pool.unpublish(block)
            sequence.num_published_blocks, sequence.prefix_id = place, prefix_id
        self._published_in_step.clear()

    def admit(self, sequence: Sequence) -> bool:
        """Give a sequence without blocks a table for all its tokens; False, and nothing changed, if they do not fit.

        Blocks of a known prefix are shared and count as computed; what else it has in host memory comes back.
        """
        assert not sequence.block_table
        hits = self._match_prefix(sequence)
        swapped = sequence.swapped
        num_dropped = 0
        if swapped is not None and len(hits) < swapped.num_dropped_blocks:
            hits, num_dropped = [], swapped.num_dropped_blocks
        num_new = -(-sequence.num_tokens // self.block_size) - num_dropped - len(hits)
        num_free_hits = sum(self.pool.ref_count(hit.block) == 0 for hit in hits)
        if num_new > self.pool.num_free - num_free_hits:
            return False
        for hit in hits:
            self.pool.share(hit.block)
        sequence.block_table = array("i", [0] * num_dropped + [hit.block for hit in hits])
        sequence.block_table.extend(self.pool.allocate() for _ in range(num_new))
        sequence.num_dropped_blocks = num_dropped
        sequence.num_computed_tokens = len(hits) * self.block_size
        sequence.num_published_blocks = len(hits)
        sequence.prefix_id = hits[-1].prefix_id if hits else None
        if self._num_findable(sequence):
            self.num_queried_tokens += sequence.num_tokens
            self.num_hit_tokens += sequence.num_computed_tokens
        if swapped is not None:
            self._swap_in(sequence, swapped, num_dropped + len(hits))
        return True

    def allocate_slots(self, sequence: Sequence, num_tokens: int) -> list[BlockCopy] | None:
        """Room for the next `num_tokens` tokens of a running sequence; None, and nothing taken, if there is none.

        Returns the copy (if any) that must be made before they are written.
        """
        if self._window is not None:
            self._drop_blocks_behind(sequence, sequence.num_computed_tokens - self._window + 1)
        first, table = sequence.num_computed_tokens, sequence.block_table
        end = first + num_tokens
        num_new = -(-end // self.block_size) - len(table)
        index = first // self.block_size
        is_shared = index < len(table) and self.pool.ref_count(table[index]) > 1
        if num_new <= 0 and not is_shared:
            sequence.block_end = self._block_end(sequence, end)
            return []
        if max(num_new, 0) + is_shared > self.pool.num_free:
            return None
        copies = []
        if is_shared:
            copy = BlockCopy(table[index], self.pool.allocate())
            self.pool.release([copy.source])
            table[index] = copy.target
            copies.append(copy)
        table.extend(self.pool.allocate() for _ in range(num_new))
        sequence.block_end = self._block_end(sequence, end)
        return copies

    def allocate_drafts(self, sequence: Sequence, num_tokens: int, num_drafts: int) -> int:
        """Room for draft tokens after the next `num_tokens`, which have theirs; returns how many fit.

        Only free blocks are taken, and nobody can find them; `trim` gives back what is left of them after the step.
        """
        first, table = sequence.num_computed_tokens + num_tokens, sequence.block_table
        num_fitting = min(num_drafts, (len(table) + self.pool.num_free) * self.block_size - first)
        num_new = -(-(first + num_fitting) // self.block_size) - len(table)
        table.extend(self.pool.allocate() for _ in range(num_new))
        return num_fitting

    def trim(self, sequence: Sequence) -> None:
        """Give back the blocks past the sequence's computed tokens."""
        num_kept = -(-sequence.num_computed_tokens // self.block_size)
        self.pool.release(reversed(sequence.block_table[num_kept:]))
        del sequence.block_table[num_kept:]
        sequence.block_end = 0

    def publish(self, sequence: Sequence, num_tokens: int) -> None:
        """Let others find the full blocks among the sequence's first `num_tokens` tokens."""
        if not self.enable_prefix_caching:
            return
        for index in range(sequence.num_published_blocks, num_tokens // self.block_size):
            block = sequence.block_table[index]
            self._published_in_step.append(_Publication(block, sequence, index, sequence.prefix_id))
            sequence.prefix_id = self.pool.publish(block, self._key(sequence, index, sequence.prefix_id))
            sequence.num_published_blocks = index + 1

    def forget_prefixes(self, running: Iterable[Sequence], unfinished: Iterable[Sequence] = ()) -> None:
        """Empty the prefix cache, also of what running sequences have computed: it may have changed what they compute,
        so that they share nothing from now on, unless they are preempted and begin anew, as those will that are now."""
        self.pool.forget_all()
        for sequence in running:
            sequence.num_published_blocks = _ALL
        for sequence in unfinished:
            self.forget_swapped(sequence)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """The child shares all of the parent's blocks; whoever writes to a shared one first gets a copy."""
        for block in parent.held_blocks:
            self.pool.share(block)
        child.block_table = parent.block_table[:]
        child.num_dropped_blocks = parent.num_dropped_blocks
        parent.block_end = child.block_end = 0
        child.model_state = None if parent.model_state is None else parent.model_state.copy()
        child.num_computed_tokens = parent.num_computed_tokens
        child.num_published_blocks, child.prefix_id = parent.num_published_blocks, parent.prefix_id

    def preempt(self, sequence: Sequence) -> None:
        """Take the sequence's blocks; what it has computed goes to host memory, if there is room."""
        first, num_computed = sequence.num_dropped_blocks, sequence.num_computed_tokens
        sources = sequence.block_table[first : -(-num_computed // self.block_size)]
        swapped: SwappedBlocks | None = None
        if 0 < len(sources) <= self.swap_pool.num_free and sequence.num_published_blocks != _ALL:
            swapped = SwappedBlocks(
                blocks=array("i", [self.swap_pool.allocate() for _ in sources]),
                num_dropped_blocks=first,
                num_computed_tokens=num_computed,
                num_published_blocks=sequence.num_published_blocks,
                prefix_id=sequence.prefix_id,
            )
            self._swaps.outs.extend(map(BlockCopy, sources, swapped.blocks))
            self.num_swaps += 1
        self.free(sequence)
        sequence.swapped = swapped

    def forget_swapped(self, sequence: Sequence) -> None:
        """It has nothing in host memory any more."""
        if sequence.swapped is not None:
            self.swap_pool.release(sequence.swapped.blocks)
            sequence.swapped = None

    def free(self, sequence: Sequence) -> None:
        """Take the sequence's blocks, those in host memory too."""
        self.withdraw(sequence)
        self.forget_swapped(sequence)

    def withdraw(self, sequence: Sequence) -> None:
        """Take the blocks that the sequence was admitted with, last block first, so that the start of a shared prefix
        outlives its end; what it has in host memory stays."""
        self.pool.release(reversed(sequence.held_blocks))
        sequence.block_table = array("i")
        sequence.model_state = None
        sequence.num_computed_tokens = sequence.num_published_blocks = 0
        sequence.num_dropped_blocks = sequence.block_end = 0

    def _swap_in(self, sequence: Sequence, swapped: SwappedBlocks, first: int) -> None:
        """Let it go on after the tokens that were computed; its blocks before `first` have them already."""
        self._returned.append(sequence)
        if swapped.num_computed_tokens <= sequence.num_computed_tokens:
            return
        skipped = first - swapped.num_dropped_blocks
        targets = sequence.block_table[first:]
        self._swaps.ins.extend(map(BlockCopy, swapped.blocks[skipped:], targets))  # which are as many or more
        sequence.num_computed_tokens = swapped.num_computed_tokens
        if sequence.num_dropped_blocks:
            sequence.num_published_blocks, sequence.prefix_id = swapped.num_published_blocks, swapped.prefix_id

    def _drop_blocks_behind(self, sequence: Sequence, position: int) -> None:
        """Nobody will look at the sequence's tokens before this position."""
        end = max(sequence.num_dropped_blocks, position // self.block_size)
        self.pool.release(reversed(sequence.block_table[sequence.num_dropped_blocks : end]))
        sequence.num_dropped_blocks = end

    def num_unused_slots(self, sequences: Iterable[Sequence]) -> int:
        """Slots of these sequences' blocks that hold nothing: what paging wastes. A block that samples share counts
        once."""
        size, ref_count = self.block_size, self.pool.ref_count
        num_unused = 0
        shared: dict[int, int] = {}
        for sequence in sequences:
            table = sequence.block_table
            unused = len(table) * size - sequence.num_computed_tokens
            if unused and ref_count(table[-1]) > 1:
                shared[table[-1]] = unused
            else:
                num_unused += unused
        return num_unused + sum(shared.values())

    def _block_end(self, sequence: Sequence, position: int) -> int:
        """Where the block ends that this position is in, or 0 if the sequence's table does not reach it."""
        index = position // self.block_size
        return (index + 1) * self.block_size if index < len(sequence.block_table) else 0

    def _num_findable(self, sequence: Sequence) -> int:
        """How many tokens may come from the cache: those before the first one of which more is needed than it holds."""
        if not self.enable_prefix_caching:
            return 0
        first_needed = sequence.request.first_needed
        return sequence.num_tokens - 1 if first_needed is None else first_needed

    def _match_prefix(self, sequence: Sequence) -> list[CachedBlock]:
        """Known blocks of the sequence's prefix."""
        hits: list[CachedBlock] = []
        for index in range(self._num_findable(sequence) // self.block_size):
            hit = self.pool.find(self._key(sequence, index, hits[-1].prefix_id if hits else None))
            if hit is None:
                break
            hits.append(hit)
        return hits

    def _key(self, sequence: Sequence, index: int, prefix_id: int | None) -> BlockKey:
        """The key of the block at `index`; `prefix_id` stands for what is before it, None at the start."""
        tokens = tuple(sequence.token_ids[index * self.block_size : (index + 1) * self.block_size])
        return (sequence.request.prefix_salt if index == 0 else prefix_id, tokens)
