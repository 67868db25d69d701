"""Token ids to text, piece by piece: no broken characters, and no part of a stop string."""

from __future__ import annotations

from collections.abc import Callable, Sequence

REPLACEMENT = "\ufffd"
Decode = Callable[[list[int]], str]

# An unfinished character shows as one U+FFFD per byte at most, and three of its four bytes can be there.
_MAX_OPEN = 3
# Long windows cost time to decode again, short ones leave no context for the next token.
_MAX_WINDOW = 16
_CONTEXTS = range(3, 9)


class Detokenizer:
    """The text of one sequence while its ids arrive.

    Only whole characters enter `text`, and whatever could be the start of a stop string is not given out. So the
    pieces from `take`, joined, are the text in the end, and `decode` of all ids unless a stop string cut it.
    """

    def __init__(
        self,
        decode: Decode,
        *,
        stop: Sequence[str] = (),
        include_stop_str_in_output: bool = False,
        min_tokens: int = 0,
    ) -> None:
        self.text = ""
        self._decode = decode
        self._stop = tuple(stop)
        self._include_stop = include_stop_str_in_output
        self._min_tokens = min_tokens
        self._token_ids: list[int] = []
        self._window_start = 0
        self._num_window_chars = 0
        """How many characters of the window are in `text`."""
        self._open_start = 0
        """The first token after those that ended in whole characters; `_context` is the window's text up to there."""
        self._context = ""
        self._num_protected_chars = 0
        self._num_taken = 0
        self._is_final = False

    def append(self, token_id: int) -> str | None:
        """Add a token; returns the stop string it completes, if any, which ends the text.

        A stop string counts if it ends after the first `min_tokens` tokens. Of several, the one that is complete
        first wins; of those, the longest.
        """
        self._token_ids.append(token_id)
        num_old_chars = len(self.text)
        self.text += self._new_text()
        if len(self._token_ids) <= self._min_tokens:
            self._num_protected_chars = len(self.text)
            return None
        return self._find_stop(num_old_chars)

    def finish(self) -> None:
        """No more tokens will come: an unfinished character becomes text as well."""
        if not self._is_final:
            self._is_final = True
            self.text += self._decode(self._token_ids[self._window_start :])[self._num_window_chars :]

    def take(self) -> str:
        """The text that has not been given out yet and can no longer turn out to be part of a stop string."""
        end = len(self.text) if self._is_final else len(self.text) - self._num_held_chars()
        piece = self.text[self._num_taken : end]
        self._num_taken = max(end, self._num_taken)
        return piece

    def _new_text(self) -> str:
        window = self._decode(self._token_ids[self._window_start :])
        if not window.startswith(self._context):
            # Decoders with byte fallback spoil a whole run of bytes while its last character is unfinished.
            self._window_start = self._open_start
            self._num_window_chars -= len(self._context)
            self._context = ""
            window = self._decode(self._token_ids[self._window_start :])
        num_open = min(len(window) - len(window.rstrip(REPLACEMENT)), _MAX_OPEN)
        num_whole = len(window) - num_open
        new = window[self._num_window_chars : num_whole]
        self._num_window_chars = max(num_whole, self._num_window_chars)
        if not num_open:
            self._open_start, self._context = len(self._token_ids), window
            if len(self._token_ids) - self._window_start > _MAX_WINDOW:
                self._shorten_window()
        return new

    def _shorten_window(self) -> None:
        """Start the window at a token that begins with a whole character, if one is near."""
        for num_tokens in _CONTEXTS:
            context = self._decode(self._token_ids[-num_tokens:])
            if context and REPLACEMENT not in context:
                self._window_start = len(self._token_ids) - num_tokens
                self._num_window_chars, self._context = len(context), context
                return

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
        longest = max((len(stop) for stop in self._stop), default=1) - 1
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
