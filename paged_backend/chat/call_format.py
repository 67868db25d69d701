"""How a model family writes tool calls, as data: for grammars, and for prompts that must teach it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from typing import Any, Literal

Style = Literal["json", "keywords", "xml", "fields"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CallFormat:
    """Calls are written as `begin + call + (between + call)* + end`.

    In `call`, NAME and ARGUMENTS stand for those of a call.
    """

    call: str
    begin: str = ""
    between: str = ""
    end: str = ""
    trigger: str = ""
    """What a model writes where calls start, and nowhere else; empty if there is no such thing."""
    answer: str = ""
    """What opens an answer without calls, if anything does."""
    style: Style = "json"
    """What the arguments are: a JSON object; Python's keyword arguments; a tag for each; `key:value` fields."""
    quote: str = '"'
    """What strings stand in, in `fields`."""
    has_short_ids: bool = False
    """Templates of the family take ids of nine letters and digits, and no others."""

    def split_call(self) -> tuple[str, str, str]:
        """What is before the name, between the name and the arguments, and after them."""
        before, rest = self.call.split("NAME", 1)
        between, after = rest.split("ARGUMENTS", 1)
        return before, between, after

    def write(self, calls: Iterable[tuple[str, Mapping[str, Any]]]) -> str:
        """Calls, given as names and arguments, as the family writes them."""
        before, between, after = self.split_call()
        written = (f"{before}{name}{between}{self._arguments(arguments)}{after}" for name, arguments in calls)
        return self.begin + self.between.join(written) + self.end

    def _arguments(self, arguments: Mapping[str, Any]) -> str:
        if self.style == "keywords":
            return ", ".join(f"{key}={value!r}" for key, value in arguments.items())
        if self.style == "xml":
            return "".join(f"<parameter={key}>\n{_bare(value)}\n</parameter>\n" for key, value in arguments.items())
        if self.style == "fields":
            return self._fields(arguments)
        return _json(arguments)

    def _fields(self, arguments: Mapping[str, Any]) -> str:
        return ",".join(f"{key}:{self._field(value)}" for key, value in arguments.items())

    def _field(self, value: object) -> str:
        if isinstance(value, str):
            return self.quote + value + self.quote
        if isinstance(value, Mapping):
            return "{" + self._fields(value) + "}"
        if isinstance(value, (list, tuple)):
            return "[" + ",".join(map(self._field, value)) + "]"
        return _json(value)


def _bare(value: object) -> str:
    return value if isinstance(value, str) else _json(value)


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
