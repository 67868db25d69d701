"""The KV cache in a sequence's terms: find its prefix, make room for its tokens, fork it, give its blocks back."""

from __future__ import annotations

import itertools
import sys
from array import array
from collections.abc import Collection, Iterable
from typing import NamedTuple

from paged_backend.engine.block_pool import BlockKey, BlockPool, CachedBlock
from paged_backend.engine.kv_layout import EVERYTHING, UNLIMITED, KVLayout, Reach
from paged_backend.engine.request import BlockTable, Sequence, SwappedBlocks

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
    """The blocks, one per group, that a step was scheduled to fill with the same tokens, and whose they are."""

    blocks: list[int]
    sequence: Sequence
    place: int
    """In the sequence's tables."""
    prefix_id: int | None
    """What is before the block."""


class KVCacheManager:
    """Keeps every sequence's block tables, one per group of layers.

    A table covers at least the sequence's computed tokens. Blocks another sequence may read are never written: a
    sequence whose next slot lies in a shared block gets a copy of it first. Only full blocks are published, as soon as
    a step is scheduled to fill them, so that requests that arrive together share them; if that step fails,
    `unpublish_step` takes them back.

    `reaches` says how far back the tokens of each group look. Blocks that no token to come looks at are given back; the
    table keeps their ids, which nobody reads. A prefix is found if the first group has all of it, and each other one
    what is looked at from its end. Of a group that does not look back without limit a new sequence gets no more than
    what it looks at and `max_step_tokens`, the most tokens of a step, and with that it can get to its end.

    With `num_swap_blocks` blocks of host memory, a preempted sequence has its computed tokens there until the step that
    it is admitted in again is computed; if they do not fit, they are computed again.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        enable_prefix_caching: bool = True,
        reaches: Iterable[Reach] = (EVERYTHING,),
        max_step_tokens: int = UNLIMITED,
        num_swap_blocks: int = 0,
    ) -> None:
        self.block_size = block_size
        self.layout = KVLayout(tuple(reaches), block_size, max_step_tokens)
        self._limited = [(group, reach) for group, reach in enumerate(self.layout.reaches) if reach.is_limited]
        self.enable_prefix_caching = enable_prefix_caching
        self.pool = BlockPool(num_blocks)
        self.swap_pool = BlockPool(num_swap_blocks)
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0
        self.num_swaps = 0
        """Preempted sequences that went to host memory."""
        self._may_share_last = False
        """Whether somebody has forked, and maybe not written to blocks of its own since."""
        self._published_in_step: list[_Publication] = []
        self._swaps = Swaps([], [])
        self._returned: list[Sequence] = []
        """Those whose blocks come from host memory in this step."""

    @property
    def num_slots(self) -> int:
        """How many tokens of one sequence the whole cache holds."""
        return self.layout.longest(self.pool.num_blocks)

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
        for blocks, sequence, place, prefix_id in reversed(self._published_in_step):
            for block in blocks:
                self.pool.unpublish(block)
            sequence.num_published_blocks, sequence.prefix_id = place, prefix_id
        self._published_in_step.clear()

    def admit(self, sequence: Sequence) -> bool:
        """Give a sequence without blocks tables for all its tokens; False, and nothing changed, if they do not fit.

        Blocks of a known prefix are shared and count as computed; what else it has in host memory comes back.
        """
        assert not sequence.tables
        hits = self._match_prefix(sequence)
        tables = self._tables_of(hits)
        start, swapped = len(hits) * self.block_size, sequence.swapped
        if swapped is not None and swapped.num_computed_tokens > start:
            start = swapped.num_computed_tokens
            for table, host_table in zip(tables, swapped.tables, strict=True):
                table.drop(host_table.num_dropped)
        lengths = [self.layout.num_blocks_to_start(reach, start, sequence.num_tokens) for reach in self.layout.reaches]
        num_new = sum(lengths) - sum(len(table.blocks) for table in tables)
        found = [block for table in tables for block in table.held]
        if num_new > self.pool.num_free - sum(self.pool.ref_count(block) == 0 for block in found):
            return False
        for block in found:
            self.pool.share(block)
        for table, length in zip(tables, lengths, strict=True):
            self._extend(table, length)
        sequence.tables = tables
        sequence.num_computed_tokens = len(hits) * self.block_size
        sequence.num_published_blocks = len(hits)
        sequence.prefix_id = hits[-1].prefix_id if hits else None
        if self._num_findable(sequence):
            self.num_queried_tokens += sequence.num_tokens
            self.num_hit_tokens += sequence.num_computed_tokens
        if swapped is not None:
            self._swap_in(sequence, swapped, len(hits))
        return True

    def allocate_slots(self, sequence: Sequence, num_tokens: int) -> list[BlockCopy] | None:
        """Room for the next `num_tokens` tokens of a running sequence; None, and nothing taken, if there is none.

        Returns the copies (if any) that must be made before they are written.
        """
        if self._limited:
            self._drop_blocks_behind(sequence)
        first, tables, pool = sequence.num_computed_tokens, sequence.tables, self.pool
        end = first + num_tokens
        index, num_blocks = first // self.block_size, -(-end // self.block_size)
        num_new = 0
        shared: list[array[int]] = []
        for table in tables:
            length = len(table.blocks)
            num_new += max(0, num_blocks - length)
            if index < length and pool.ref_count(table.blocks[index]) > 1:
                shared.append(table.blocks)
        if num_new + len(shared) > pool.num_free:
            return None
        copies = []
        for blocks in shared:
            copy = BlockCopy(blocks[index], pool.allocate())
            pool.release([copy.source])
            blocks[index] = copy.target
            copies.append(copy)
        if num_new:
            for table in tables:
                self._extend(table, num_blocks)
        sequence.block_end = self._block_end(sequence, end)
        return copies

    def allocate_drafts(self, sequence: Sequence, num_tokens: int, num_drafts: int) -> int:
        """Room for draft tokens after the next `num_tokens`, which have theirs; returns how many fit.

        Only free blocks are taken, and nobody can find them; `trim` gives back what is left of them after the step.
        """
        first, tables = sequence.num_computed_tokens + num_tokens, sequence.tables
        num_blocks = min(len(table.blocks) for table in tables) + self.pool.num_free // len(tables)
        num_fitting = min(num_drafts, num_blocks * self.block_size - first)
        for table in tables:
            self._extend(table, -(-(first + num_fitting) // self.block_size))
        return num_fitting

    def trim(self, sequence: Sequence) -> None:
        """Give back the blocks past the sequence's computed tokens."""
        num_kept = -(-sequence.num_computed_tokens // self.block_size)
        for table in sequence.tables:
            self.pool.release(reversed(table.blocks[num_kept:]))
            del table.blocks[num_kept:]
        sequence.block_end = 0

    def publish(self, sequence: Sequence, num_tokens: int) -> None:
        """Let others find the full blocks among the sequence's first `num_tokens` tokens."""
        if not self.enable_prefix_caching:
            return
        for index in range(sequence.num_published_blocks, num_tokens // self.block_size):
            first, *others = sequence.tables
            blocks = [first.blocks[index]]
            self._published_in_step.append(_Publication(blocks, sequence, index, sequence.prefix_id))
            prefix_id = self.pool.publish(blocks[0], self._key(sequence, index, sequence.prefix_id))
            for group, table in enumerate(others, 1):
                if index >= table.num_dropped:
                    blocks.append(table.blocks[index])
                    self.pool.publish(table.blocks[index], (prefix_id, group))
            sequence.prefix_id = prefix_id
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
        self._may_share_last = True
        child.tables = [table.copy() for table in parent.tables]
        parent.block_end = child.block_end = 0
        child.model_state = None if parent.model_state is None else parent.model_state.copy()
        child.num_computed_tokens = parent.num_computed_tokens
        child.num_published_blocks, child.prefix_id = parent.num_published_blocks, parent.prefix_id

    def preempt(self, sequence: Sequence) -> None:
        """Take the sequence's blocks; what it has computed goes to host memory, if there is room."""
        self._drop_blocks_behind(sequence)
        num_blocks = -(-sequence.num_computed_tokens // self.block_size)
        sources = [table.blocks[table.num_dropped : num_blocks] for table in sequence.tables]
        swapped: SwappedBlocks | None = None
        if 0 < sum(map(len, sources)) <= self.swap_pool.num_free and sequence.num_published_blocks != _ALL:
            swapped = SwappedBlocks(
                tables=[self._swap_out(table.num_dropped, num_blocks) for table in sequence.tables],
                num_computed_tokens=sequence.num_computed_tokens,
                num_published_blocks=sequence.num_published_blocks,
                prefix_id=sequence.prefix_id,
            )
            self._swaps.outs.extend(map(BlockCopy, itertools.chain(*sources), swapped.blocks))
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
        for table in sequence.tables:
            self.pool.release(reversed(table.held))
        sequence.tables = []
        sequence.model_state = None
        sequence.num_computed_tokens = sequence.num_published_blocks = sequence.block_end = 0

    def _swap_out(self, first: int, end: int) -> BlockTable:
        """Host memory for the blocks from the first one to the end."""
        return BlockTable(array("i", [0] * first + [self.swap_pool.allocate() for _ in range(first, end)]), first)

    def _swap_in(self, sequence: Sequence, swapped: SwappedBlocks, first: int) -> None:
        """Let it go on after the tokens that were computed; what it has before its block `first` is there already."""
        self._returned.append(sequence)
        if swapped.num_computed_tokens <= sequence.num_computed_tokens:
            return
        for table, host_table in zip(sequence.tables, swapped.tables, strict=True):
            start = max(first, host_table.num_dropped)
            # The host's are as many or less.
            self._swaps.ins.extend(map(BlockCopy, host_table.blocks[start:], table.blocks[start:]))
        sequence.num_computed_tokens = swapped.num_computed_tokens
        if swapped.tables[0].num_dropped > first:
            sequence.num_published_blocks, sequence.prefix_id = swapped.num_published_blocks, swapped.prefix_id

    def _extend(self, table: BlockTable, num_blocks: int) -> None:
        """To at least so many blocks."""
        table.blocks.extend([self.pool.allocate() for _ in range(len(table.blocks), num_blocks)])

    def _drop_blocks_behind(self, sequence: Sequence) -> None:
        """Give back what none of the sequence's next tokens will look at."""
        for group, reach in self._limited:
            table = sequence.tables[group]
            end = reach.first_visible(sequence.num_computed_tokens) // self.block_size
            if end > table.num_dropped:
                self.pool.release(reversed(table.blocks[table.num_dropped : end]))
                table.num_dropped = end

    def num_unused_slots(self, sequences: Collection[Sequence]) -> int:
        """Slots of these sequences' blocks that hold nothing: what paging wastes. A block that samples share counts
        once. `sequences` are all that have blocks."""
        num_groups = len(self.layout.reaches)
        if num_groups == 1:
            num_blocks = sum([len(sequence.tables[0].blocks) for sequence in sequences])
        else:
            num_blocks = sum([len(table.blocks) for sequence in sequences for table in sequence.tables])
        num_computed = sum([sequence.num_computed_tokens for sequence in sequences])
        num_unused = num_blocks * self.block_size - num_computed * num_groups
        return num_unused - self._num_unused_again(sequences) if self._may_share_last else num_unused

    def _num_unused_again(self, sequences: Iterable[Sequence]) -> int:
        """Unused slots that more than one of the sequences has, each time but the first."""
        seen: set[int] = set()
        num_again = 0
        for sequence in sequences:
            last = sequence.tables[0].blocks[-1]
            num_slots = sum(len(table.blocks) for table in sequence.tables) * self.block_size
            num_unused = num_slots - sequence.num_computed_tokens * len(sequence.tables)
            if num_unused and self.pool.ref_count(last) > 1:
                num_again += num_unused if last in seen else 0
                seen.add(last)
        self._may_share_last = bool(seen)
        return num_again

    def _block_end(self, sequence: Sequence, position: int) -> int:
        """Where the blocks end that this position is in, or 0 if some of the sequence's tables do not reach it."""
        index = position // self.block_size
        for table in sequence.tables:
            if index >= len(table.blocks):
                return 0
        return (index + 1) * self.block_size

    def _num_findable(self, sequence: Sequence) -> int:
        """How many tokens may come from the cache: those before the first one of which more is needed than it holds."""
        if not self.enable_prefix_caching:
            return 0
        first_needed = sequence.request.first_needed
        return sequence.num_tokens - 1 if first_needed is None else first_needed

    def _match_prefix(self, sequence: Sequence) -> list[CachedBlock]:
        """Known blocks of the sequence's prefix in the first group, as many as all groups can go on from."""
        hits: list[CachedBlock] = []
        for index in range(self._num_findable(sequence) // self.block_size):
            hit = self.pool.find(self._key(sequence, index, hits[-1].prefix_id if hits else None))
            if hit is None:
                break
            hits.append(hit)
        return hits[: self._num_agreed(hits)]

    def _num_agreed(self, hits: list[CachedBlock]) -> int:
        """How many of these blocks of the first group there are such that each other group has what is looked at after
        them."""
        num_blocks = len(hits)
        others = list(enumerate(self.layout.reaches))[1:]
        known_from = {group: num_blocks for group, _ in others}
        """Between these and `num_blocks` a group has them all: no block is looked for twice."""
        is_agreed = False
        while not is_agreed:
            is_agreed = True
            for group, reach in others:
                index = min(known_from[group], num_blocks)
                first = self._first_visible_block(reach, num_blocks)
                while index > first and self.pool.find((hits[index - 1].prefix_id, group)) is not None:
                    index -= 1
                if index > first:
                    num_blocks, is_agreed = index - 1, False
                known_from[group] = index
        return num_blocks

    def _first_visible_block(self, reach: Reach, num_blocks: int) -> int:
        """The first one that is looked at by the token after so many blocks."""
        return reach.first_visible(num_blocks * self.block_size) // self.block_size

    def _tables_of(self, hits: list[CachedBlock]) -> list[BlockTable]:
        """Of a sequence that goes on from these blocks of the first group, and what other groups have for them."""
        tables = []
        for group, reach in enumerate(self.layout.reaches):
            first = self._first_visible_block(reach, len(hits))
            found = hits[first:]
            if group:
                others = [self.pool.find((hit.prefix_id, group)) for hit in found]
                found = [hit for hit in others if hit is not None]
            tables.append(BlockTable(array("i", [0] * first + [hit.block for hit in found]), first))
        return tables

    def _key(self, sequence: Sequence, index: int, prefix_id: int | None) -> BlockKey:
        """The key of the block at `index`; `prefix_id` stands for what is before it, None at the start."""
        tokens = tuple(sequence.token_ids[index * self.block_size : (index + 1) * self.block_size])
        return (sequence.request.prefix_salt if index == 0 else prefix_id, tokens)
