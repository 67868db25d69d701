"""Layers that look equally far back share block tables: how far that is, and how many blocks sequences take then."""

from __future__ import annotations

import dataclasses
import sys
from typing import NamedTuple

UNLIMITED = sys.maxsize


class Reach(NamedTuple):
    """Which of the tokens before it a token looks at in some layers: all of them, if nothing is said."""

    window: int | None = None
    """The last ones only, so many with its own."""
    chunk: int | None = None
    """Those of its own chunk of so many only."""

    def first_visible(self, position: int) -> int:
        """No token from this position on looks at one before the position returned."""
        first = 0 if self.window is None else max(0, position - self.window + 1)
        return first if self.chunk is None else max(first, position // self.chunk * self.chunk)

    @property
    def num_behind(self) -> int:
        """Most tokens before its own that a token looks at."""
        return min(UNLIMITED if size is None else size - 1 for size in self)

    @property
    def is_limited(self) -> bool:
        return self.num_behind < UNLIMITED


EVERYTHING = Reach()


@dataclasses.dataclass(frozen=True, slots=True)
class KVLayout:
    """Groups of equally many layers. A block holds some tokens' keys and values of one group's layers, so that the
    blocks of all groups are equally large, and come from one pool. Each sequence has a block table per group."""

    reaches: tuple[Reach, ...] = (EVERYTHING,)
    """How far the layers of each group look back; none looks further than those of the first one."""
    block_size: int = 16
    max_step_tokens: int = UNLIMITED
    """Most tokens of one step."""

    def num_blocks_to_start(self, reach: Reach, start: int, num_tokens: int) -> int:
        """How long the table of a group is made for a sequence of so many tokens that begins to compute at `start`: all
        that it takes to go on to its last token, since blocks are given back as fast as others are taken then."""
        if not reach.is_limited:
            return -(-num_tokens // self.block_size)
        return -(-min(num_tokens, max(start, reach.num_behind) + self.max_step_tokens) // self.block_size)

    def num_blocks_for(self, num_tokens: int) -> int:
        """The most blocks that a sequence of so many tokens ever holds."""
        return sum(self._at_most(num_tokens, reach.num_behind + self.max_step_tokens) for reach in self.reaches)

    def num_blocks_kept(self, num_tokens: int) -> int:
        """The most blocks that it holds while its tokens are computed one by one."""
        return sum(self._at_most(num_tokens, reach.num_behind) for reach in self.reaches)

    def num_blocks_for_beams(self, num_prompt_tokens: int, num_new: int, beam_width: int) -> int:
        """For so many sequences of which each has new tokens, and which share the full blocks of their prompt."""
        num_shared = num_prompt_tokens // self.block_size * self.block_size
        num_own = num_prompt_tokens + num_new - num_shared
        own = sum(self._at_most(num_own, reach.num_behind) for reach in self.reaches)
        return self.num_blocks_for(num_shared) + beam_width * own

    def longest(self, num_blocks: int) -> int:
        """Most tokens of a sequence that so many blocks suffice for."""
        if self.num_blocks_for(UNLIMITED) <= num_blocks:
            return UNLIMITED
        fits, is_too_long = 0, (num_blocks + 1) * self.block_size
        while is_too_long - fits > 1:
            middle = (fits + is_too_long) // 2
            if self.num_blocks_for(middle) <= num_blocks:
                fits = middle
            else:
                is_too_long = middle
        return fits

    def num_tokens(self, num_blocks: int, max_model_len: int) -> int:
        """How many tokens so many blocks hold, in sequences of `max_model_len` tokens of which one is still at its
        prompt; if they hold no such sequence, in one as long as they can hold."""
        if not any(reach.is_limited for reach in self.reaches):
            return num_blocks // len(self.reaches) * self.block_size
        num_kept = self.num_blocks_kept(max_model_len)
        num_left = num_blocks - (self.num_blocks_for(max_model_len) - num_kept)
        if num_left < num_kept:
            return min(self.longest(num_blocks), max_model_len)
        return num_left * max_model_len // num_kept

    def _at_most(self, num_tokens: int, num_held: int) -> int:
        """Blocks of a group of which no more than so many tokens are looked at or computed at once."""
        size = self.block_size
        return min(-(-num_tokens // size), -(-num_held // size) + 1)
