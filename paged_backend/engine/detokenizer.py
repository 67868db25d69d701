"""Token ids to text, piece by piece: no broken characters, and no part of a stop string."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from paged_backend.engine.incremental_text import REPLACEMENT, ByteText, Decode, IncrementalText, WindowText


class Detokenizer:
    """The text of one sequence while its ids arrive.

    Only whole characters enter `text`, and whatever could be the start of a stop string is not given out. So the
    pieces from `take`, joined, are the text in the end, and `decode` of all ids unless a stop string cut it.
    """

    def __init__(
        self,
        decode: Decode,
        *,
        bytes_of: Mapping[int, bytes] | None = None,
        stop: Sequence[str] = (),
        include_stop_str_in_output: bool = False,
        min_tokens: int = 0,
    ) -> None:
        """`bytes_of`: the bytes of each id, if `decode` does nothing but join them; that is several times faster."""
        self.text = ""
        self._growth: IncrementalText = WindowText(decode) if bytes_of is None else ByteText(bytes_of)
        self._stop = tuple(stop)
        self._include_stop = include_stop_str_in_output
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._num_protected_chars = 0
        self._num_taken = 0
        self._is_final = False

    def append(self, token_id: int) -> str | None:
        """Add a token; returns the stop string it completes, if any, which ends the text.

        A stop string counts if it ends after the first `min_tokens` tokens. Of several, the one that is complete
        first wins; of those, the longest.
        """
        num_old_chars = len(self.text)
        self.text += self._growth.append(token_id)
        self._num_tokens += 1
        if self._num_tokens <= self._min_tokens:
            self._num_protected_chars = len(self.text)
            return None
        return self._find_stop(num_old_chars) if self._stop else None

    def finish(self) -> None:
        """No more tokens will come: an unfinished character becomes text as well."""
        if not self._is_final:
            self._is_final = True
            self.text += self._growth.finish()

    def take(self) -> str:
        """The text that has not been given out yet and can no longer turn out to be part of a stop string."""
        is_settled = self._is_final or not self._stop
        end = len(self.text) if is_settled else len(self.text) - self._num_held_chars()
        piece = self.text[self._num_taken : end]
        self._num_taken = max(end, self._num_taken)
        return piece

    def _find_stop(self, num_old_chars: int) -> str | None:
        """Search what is new, and cut the text at the stop string."""
        num_searched = max(num_old_chars, self._num_protected_chars)
        found: tuple[int, int, str] | None = None
        for stop in self._stop:
            start = self.text.find(stop, max(0, num_searched - len(stop) + 1))
            if start >= 0:
                match = (start + len(stop), start, stop)
                found = min(found, match) if found else match
        if found is None:
            return None
        end, start, stop = found
        self.text = self.text[: end if self._include_stop else start]
        self._is_final = True
        return stop

    def _num_held_chars(self) -> int:
        """The length of the longest end of the text that some stop string starts with."""
        longest = max(map(len, self._stop)) - 1
        for length in range(min(longest, len(self.text)), 0, -1):
            tail = self.text[-length:]
            if any(len(stop) > length and stop.startswith(tail) for stop in self._stop):
                return length
        return 0


def whole_text(decode: Decode, token_ids: list[int]) -> str:
    """What a Detokenizer gives for all the ids; decoded at once, unless they end within a character, where decoders
    with byte fallback would spoil the characters before it as well."""
    text = decode(token_ids)
    if not text.endswith(REPLACEMENT):
        return text
    detokenizer = Detokenizer(decode)
    for token_id in token_ids:
        detokenizer.append(token_id)
    detokenizer.finish()
    return detokenizer.text
