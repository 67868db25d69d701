"""Values as Python, JSON and Gemma write them, all in one grammar."""

from __future__ import annotations

import json
import re
import sys
from typing import Any

from paged_backend.chat.source import Malformed

_SPACE = re.compile(r"\s*")
_KEY = re.compile(r"[\w.\-$]+")
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"|\'(?:[^\'\\]|\\.)*\'', re.DOTALL)
_NUMBER = re.compile(r"[-+]?(?:\d[\d_]*)?\.?\d+(?:[eE][-+]?\d+)?|[-+]?\d+\.")
_ESCAPE = re.compile(r"\\(u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|x[0-9a-fA-F]{2}|.)", re.DOTALL)
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "0": "\0", "\n": ""} | {c: c for c in "\\'\"/"}
_CONSTANTS = {"true": True, "false": False, "null": None, "True": True, "False": False, "None": None}
_MAX_DEPTH = 100


class Literals:
    """Reads a text from left to right; raises Malformed where it is not what was asked for.

    Strings stand in either kind of quotes, or between two of `quote`, with nothing escaped.
    """

    def __init__(self, text: str, *, quote: str | None = None) -> None:
        self._text = text
        self._position = 0
        self._quote = quote
        self._depth = 0

    def skip(self, literal: str) -> bool:
        """Read `literal` if it comes next, and the space before it."""
        start = self._after_space()
        if not self._text.startswith(literal, start):
            return False
        self._position = start + len(literal)
        return True

    def expect(self, literal: str) -> None:
        if not self.skip(literal):
            raise Malformed(f"{literal!r} is missing before {self._rest()!r}")

    def end(self) -> None:
        if self._after_space() < len(self._text):
            raise Malformed(f"{self._rest()!r} is too much")

    def key(self) -> str:
        """A name, or a string."""
        self._position = self._after_space()
        match = _KEY.match(self._text, self._position)
        if match is None:
            value = self.value()
            if not isinstance(value, str):
                raise Malformed(f"the key {value!r} is no string")
            return value
        self._position = match.end()
        return match[0]

    def value(self) -> Any:
        if self._depth >= _MAX_DEPTH:
            raise Malformed("its arguments are nested too deeply")
        self._depth += 1
        try:
            return self._value()
        finally:
            self._depth -= 1

    def pairs(self, end: str, separator: str) -> dict[str, Any]:
        """`key separator value`, with commas between them, up to `end`."""
        result: dict[str, Any] = {}
        while not self.skip(end):
            if result:
                self.expect(",")
                if self.skip(end):
                    break
            key = self.key()
            self.expect(separator)
            if key in result:
                raise Malformed(f"the key {key!r} is there twice")
            result[key] = self.value()
        return result

    def _value(self) -> Any:
        if self.skip("{"):
            return self.pairs("}", ":")
        for opening, closing in (("[", "]"), ("(", ")")):
            if self.skip(opening):
                return self._items(closing)
        if self._quote is not None and self.skip(self._quote):
            return self._quoted(self._quote)
        self._position = self._after_space()
        for pattern, read in ((_STRING, _string), (_NUMBER, _number), (_KEY, _constant)):
            match = pattern.match(self._text, self._position)
            if match is not None:
                self._position = match.end()
                return read(match[0])
        raise Malformed(f"a value is missing before {self._rest()!r}")

    def _items(self, end: str) -> list[Any]:
        result: list[Any] = []
        while not self.skip(end):
            if result:
                self.expect(",")
                if self.skip(end):
                    break
            result.append(self.value())
        return result

    def _quoted(self, quote: str) -> str:
        end = self._text.find(quote, self._position)
        if end < 0:
            raise Malformed("a string does not end")
        start, self._position = self._position, end + len(quote)
        return self._text[start:end]

    def _after_space(self) -> int:
        match = _SPACE.match(self._text, self._position)
        assert match is not None
        return match.end()

    def _rest(self) -> str:
        return self._text[self._after_space() :][:20]


def _string(text: str) -> str:
    """As JSON says, or else as Python does; an escape that Python does not know stays as it is."""
    try:
        return str(json.loads(text))
    except ValueError:
        return _joined_surrogates(_ESCAPE.sub(_unescaped, text[1:-1]))


def _unescaped(match: re.Match[str]) -> str:
    escape = match[1]
    if len(escape) == 1:
        return _ESCAPED.get(escape, match[0])
    code = int(escape[1:], 16)
    return chr(code) if code <= sys.maxunicode else match[0]


def _joined_surrogates(text: str) -> str:
    """Two escapes may be the halves of one character."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _number(text: str) -> int | float:
    try:
        return int(text)
    except ValueError:
        pass
    try:
        return float(text)
    except ValueError:
        raise Malformed(f"{text[:20]!r} is no number") from None


def _constant(text: str) -> object:
    if text not in _CONSTANTS:
        raise Malformed(f"{text[:20]!r} is no value")
    return _CONSTANTS[text]
