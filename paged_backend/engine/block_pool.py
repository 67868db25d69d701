"""Who holds which block of the KV cache, and what free blocks still remember."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import NamedTuple

BlockKey = tuple[object, tuple[int, ...] | int]
"""(what comes before the block, the block's own tokens). What comes before is the prefix id of the block before it or,
for the first block, whatever separates prompts that must not share (the cache salt, the LoRA adapter). Groups of layers
beside the first one know a block by (the prefix id of the first one's block of the same tokens, the group's number).

The dictionary compares whole keys, and a prefix id is never given twice. So, unlike a chain of hashes, two different
prompts can never meet in one key, whatever Python's `hash` does."""


class CachedBlock(NamedTuple):
    """A block whose keys and values somebody may share."""

    block: int
    prefix_id: int
    """Stands for the block's tokens and all before them."""


class BlockPool:
    """Hands out blocks and counts who holds them.

    A block is used while its reference count is above zero, and free otherwise. A free block stays findable under its
    key until it is handed out again; blocks that nobody can find are handed out first, then the one free for longest.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.num_evictions = 0
        self.num_touched = 0
        """Blocks from this one on have never been handed out."""
        self._ref_counts = [0] * num_blocks
        self._keys: list[BlockKey | None] = [None] * num_blocks
        self._cached: dict[BlockKey, CachedBlock] = {}
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._next_prefix_id = 0

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free)

    @property
    def num_cached(self) -> int:
        """Free blocks that can still be found."""
        return sum(self._keys[block] is not None for block in self._free)

    def ref_count(self, block: int) -> int:
        return self._ref_counts[block]

    def allocate(self) -> int:
        """A block that nobody holds, for one holder; what it remembered is forgotten."""
        block, _ = self._free.popitem(last=False)
        if self._keys[block] is not None:
            self.num_evictions += 1
            self.unpublish(block)
        self._ref_counts[block] = 1
        self.num_touched = max(self.num_touched, block + 1)
        return block

    def share(self, block: int) -> None:
        """One more holder, whether the block is used or free."""
        if self._ref_counts[block] == 0:
            del self._free[block]
        self._ref_counts[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """One holder less for each; those released first are reused first."""
        for block in blocks:
            self._ref_counts[block] -= 1
            assert self._ref_counts[block] >= 0, f"block {block} released more often than held"
            if self._ref_counts[block] == 0:
                self._free[block] = None
                if self._keys[block] is None:
                    self._free.move_to_end(block, last=False)

    def find(self, key: BlockKey) -> CachedBlock | None:
        return self._cached.get(key)

    def findable(self) -> Iterator[int]:
        """The blocks that can be found, used and free ones."""
        return (cached.block for cached in self._cached.values())

    def publish(self, block: int, key: BlockKey) -> int:
        """Let others find the block; returns the prefix id to chain the next block's key to.

        If another block is known by the key already, that one stays and this one remains unknown.
        """
        known = self._cached.get(key)
        if known is None:
            known = self._cached[key] = CachedBlock(block, self._next_prefix_id)
            self._next_prefix_id += 1
            self._keys[block] = key
        return known.prefix_id

    def unpublish(self, block: int) -> None:
        """Forget the block's key, if it has one."""
        key, self._keys[block] = self._keys[block], None
        if key is None:
            return
        del self._cached[key]
        if block in self._free:
            self._free.move_to_end(block, last=False)

    def forget_all(self) -> None:
        """Nobody finds any block any more, whether it is in use or free."""
        for block, _ in list(self._cached.values()):
            self.unpublish(block)
