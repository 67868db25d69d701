"""Prompt lookup: what followed the last time that a sequence's newest tokens occurred in it."""

from __future__ import annotations

from collections.abc import Iterable


class NgramIndex:
    """Where each run of so many tokens of one growing list has ended last, with something after it.

    Derived from the tokens alone, which only ever get more: it reads those that it has not read yet, so that a lookup
    takes a time that does not depend on how many there are.
    """

    def __init__(self, sizes: Iterable[int]) -> None:
        """Lengths of the runs that are looked up, in the order in which they are."""
        self._end_of = {size: dict[tuple[int, ...], int]() for size in sizes}
        self._num_read = 0

    def continuation(self, token_ids: list[int], num: int) -> list[int]:
        """`num` tokens that may come next, for they followed the newest ones before; none if these are new.

        If what followed reaches up to the end, it is taken to go on repeating itself.
        """
        self._catch_up(token_ids)
        for size, end_of in self._end_of.items():
            end = end_of.get(tuple(token_ids[-size:]))
            if end is not None:
                following = token_ids[end : end + num]
                num_repeats = -(-num // len(following))
                return (following * num_repeats)[:num]
        return []

    def _catch_up(self, token_ids: list[int]) -> None:
        """Note all runs but those that end with the newest token, lest they be found as their own precedent."""
        num_tokens = len(token_ids)
        for size, end_of in self._end_of.items():
            for end in range(max(self._num_read, size), num_tokens):
                end_of[tuple(token_ids[end - size : end])] = end
        self._num_read = num_tokens
