"""Token ids to text as they come, whole characters only: from each token's bytes, or through a tokenizer's decode."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Mapping
from typing import Protocol

REPLACEMENT = "\ufffd"
Decode = Callable[[list[int]], str]

# An unfinished character shows as one U+FFFD per byte at most, and three of its four bytes can be there.
_MAX_OPEN = 3
# Long windows cost time to decode again, short ones leave no context for the next token.
_MAX_WINDOW = 16
_CONTEXTS = range(3, 9)


class IncrementalText(Protocol):
    """The text of ids that arrive one by one; what it returns, joined, is the text of all of them."""

    def append(self, token_id: int) -> str:
        """What is new, up to a character that is unfinished."""
        ...

    def finish(self) -> str:
        """What is left when no more tokens will come."""
        ...


class ByteText:
    """Where a text is its tokens' bytes, one after the other, as UTF-8: a token costs what its own bytes do."""

    def __init__(self, bytes_of: Mapping[int, bytes]) -> None:
        self._bytes_of = bytes_of
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._is_whole = True
        """No character is unfinished."""

    def append(self, token_id: int) -> str:
        spelled = self._bytes_of[token_id]
        if self._is_whole and spelled.isascii():  # as most are; the decoder takes three times as long
            return spelled.decode()
        text = self._decoder.decode(spelled)
        self._is_whole = not self._decoder.getstate()[0]
        return text

    def finish(self) -> str:
        return self._decoder.decode(b"", True)


class WindowText:
    """Decodes a window of the newest tokens with each token, and finds what is new in its text."""

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._token_ids: list[int] = []
        self._window_start = 0
        self._num_window_chars = 0
        """How many characters of the window were returned."""
        self._open_start = 0
        """The first token after those that ended in whole characters; `_context` is the window's text up to there."""
        self._context = ""

    def append(self, token_id: int) -> str:
        self._token_ids.append(token_id)
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

    def finish(self) -> str:
        return self._decode(self._token_ids[self._window_start :])[self._num_window_chars :]

    def _shorten_window(self) -> None:
        """Start the window at a token that begins with a whole character, if one is near."""
        for num_tokens in _CONTEXTS:
            context = self._decode(self._token_ids[-num_tokens:])
            if context and REPLACEMENT not in context:
                self._window_start = len(self._token_ids) - num_tokens
                self._num_window_chars, self._context = len(context), context
                return
