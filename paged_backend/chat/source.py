"""Text that arrives in pieces, for parsers that read it as if all of it were there."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Sequence
from typing import Any, TypeVar

T = TypeVar("T")
Reading = Generator[None, None, T]
"""A coroutine that yields whenever it needs more text than there is, and returns what it has read."""

Emit = Callable[[str], None]

_WORD = re.compile(r"[\w.\-/]*")
_SCALAR = re.compile(r"[-+.\w]*")


class Malformed(Exception):
    """The text is not what it should be here; the message says why."""


class Source:
    """What is read is kept as `unsettled` until somebody says what became of it, so that nothing can get lost.

    What a method returns, and where it leaves the position, depends on the text alone and not on how it was cut into
    pieces: each one waits until no further text could change its result.
    """

    def __init__(self) -> None:
        self._text = ""
        self._position = 0
        self._is_final = False
        self._unsettled: list[str] = []

    def feed(self, text: str, *, is_final: bool) -> None:
        self._text = self._text[self._position :] + text
        self._position = 0
        self._is_final = is_final

    @property
    def unsettled(self) -> str:
        """Read, but given out neither as text nor as anything else."""
        return "".join(self._unsettled)

    def settle(self) -> None:
        self._unsettled.clear()

    def peek(self) -> Reading[str]:
        """The next character, or "" at the end."""
        while self._position == len(self._text):
            if self._is_final:
                return ""
            yield
        return self._text[self._position]

    def skip(self, literal: str, *, after_space: bool = False) -> Reading[bool]:
        """Read `literal` if it comes next, and the space before it if that may be there; nothing otherwise."""
        while True:
            rest = self._text[self._position :]
            stripped = rest.lstrip() if after_space else rest
            if stripped.startswith(literal):
                self._take(len(rest) - len(stripped) + len(literal))
                return True
            if self._is_final or not literal.startswith(stripped):
                return False
            yield

    def expect(self, literal: str, *, after_space: bool = False) -> Reading[None]:
        if not (yield from self.skip(literal, after_space=after_space)):
            following = yield from self.peek()
            raise Malformed(f"{literal!r} is missing" + ("" if following else " at the end"))

    def skip_space(self) -> Reading[None]:
        while (yield from self.peek()).isspace():
            self._take(1)

    def word(self) -> Reading[str]:
        """The letters, digits and `_ . - /` that come next."""
        return (yield from self._matching(_WORD))

    def until(self, *markers: str) -> Reading[tuple[str, str]]:
        """What comes before the first of `markers`, and which one it was; both are read. Malformed without one."""
        pieces: list[str] = []
        marker = yield from self.through(markers, pieces.append)
        if marker is None:
            self._unsettled += pieces
            raise Malformed(f"the text ends before {' or '.join(map(repr, markers))}")
        self._unsettled[-1:-1] = pieces
        return "".join(pieces), marker

    def through(self, markers: Sequence[str], emit: Emit) -> Reading[str | None]:
        """Give out all before the first of `markers` (no part of it, at any time) and read that; None: the end came."""
        while True:
            found = [(start, marker) for marker in markers if (start := self._text.find(marker, self._position)) >= 0]
            if found:
                start, marker = min(found)
                emit(self._text[self._position : start])
                self._position = start
                self._take(len(marker))
                return marker
            end = len(self._text) if self._is_final else len(self._text) - self._num_held(markers)
            if end > self._position:
                emit(self._text[self._position : end])
                self._position = end
            if self._is_final:
                return None
            yield

    def json_value(self, emit: Emit = lambda piece: None) -> Reading[str]:
        """The text of the JSON value that comes next; it is given out while it is read, and checked at its end."""
        first = yield from self.peek()
        if first not in ("{", "[", '"') or not first:
            raw = yield from self._matching(_SCALAR)
            loads(raw)
            emit(raw)
            return raw
        raw = yield from self.balanced(emit)
        loads(raw)
        return raw

    def balanced(self, emit: Emit = lambda piece: None, *, quotes: str = '"') -> Reading[str]:
        """The string or bracketed text that comes next, with all brackets in it closed."""
        extent, pieces = _Extent(quotes), list[str]()
        while not extent.is_complete:
            if not (yield from self.peek()):
                raise Malformed("the text ends too early")
            end = extent.advance(self._text, self._position)
            piece = self._take(end - self._position)
            pieces.append(piece)
            emit(piece)
        return "".join(pieces)

    def _matching(self, pattern: re.Pattern[str]) -> Reading[str]:
        """The longest match at the position; of a pattern that may match nothing."""
        while True:
            match = pattern.match(self._text, self._position)
            assert match is not None
            if match.end() < len(self._text) or self._is_final:
                return self._take(match.end() - self._position)
            yield

    def _take(self, num_characters: int) -> str:
        piece = self._text[self._position : self._position + num_characters]
        self._position += num_characters
        self._unsettled.append(piece)
        return piece

    def _num_held(self, markers: Sequence[str]) -> int:
        """The length of the longest end of the text that some marker starts with."""
        longest = min(max(map(len, markers), default=1) - 1, len(self._text) - self._position)
        last = self._text[len(self._text) - longest :] if longest > 0 else ""
        if not any(marker[0] in last for marker in markers):
            return 0
        for length in range(longest, 0, -1):
            tail = self._text[-length:]
            if any(marker.startswith(tail) for marker in markers):
                return length
        return 0


class _Extent:
    """Where a string, or a text in brackets, ends."""

    def __init__(self, quotes: str) -> None:
        self.is_complete = False
        self._depth = 0
        self._quote = ""
        self._is_escaped = False
        self._structure = re.compile(f"[{{}}()\\[\\]{quotes}]")

    def advance(self, text: str, position: int) -> int:
        """Go on at `position`; how far it reaches in `text`."""
        while position < len(text) and not self.is_complete:
            if self._is_escaped:
                self._is_escaped = False
                position += 1
                continue
            match = (re.compile(rf"[\\{self._quote}]") if self._quote else self._structure).search(text, position)
            if match is None:
                return len(text)
            position = match.end()
            self._note(match[0])
        return position

    def _note(self, character: str) -> None:
        if character == "\\":
            self._is_escaped = True
        elif character in "{[(":
            self._depth += 1
        elif character in "}])":
            self._depth -= 1
        else:
            self._quote = "" if self._quote else character
        self.is_complete = self._depth <= 0 and not self._quote


def loads(text: str) -> Any:
    """`json.loads`, strict; raises Malformed."""
    try:
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise Malformed(f"this is no JSON: {error}") from None


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON number")
