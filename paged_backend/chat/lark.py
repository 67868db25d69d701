"""Pieces of grammars in llguidance's Lark dialect."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

ANY_TEXT = r"/(.|\n)*/"
_WHITESPACE = {"whitespace_pattern": r"( |\n {0,16})"}
"""Enough for any style of JSON, and too little for a model to lose itself in."""


class LarkWriter:
    """Writes rules for one tokenizer; what is a special token there can stand in no text, and is named by its id."""

    def __init__(self, special_ids: Mapping[str, int]) -> None:
        self._special_ids = special_ids
        self._rules: list[str] = []
        longest_first = sorted(special_ids, key=len, reverse=True)
        self._special = re.compile("(" + "|".join(map(re.escape, longest_first)) + ")") if special_ids else None

    def rule(self, name: str, body: str) -> str:
        """Add a rule; returns its name."""
        self._rules.append(f"{name}: {body}")
        return name

    def literal(self, text: str) -> str:
        """Exactly this text; its special tokens are tokens."""
        parts = self._special.split(text) if self._special else [text]
        return " ".join(self._part(part) for part in parts if part) or '""'

    def text_through(self, name: str, end: str) -> str:
        """Any text up to `end`, and that; a rule of this name."""
        if end in self._special_ids:
            return self.rule(name, f"TEXT {self.literal(end)}")
        return self.rule(f"{name}[lazy]", f"{ANY_TEXT} {_quoted(end)}").removesuffix("[lazy]")

    def json(self, name: str, schema: Mapping[str, Any] | bool) -> str:
        """JSON that a schema allows; a rule of this name."""
        closed = {**schema, "x-guidance": _WHITESPACE} if isinstance(schema, Mapping) else {"x-guidance": _WHITESPACE}
        return self.rule(name, f"%json {json.dumps(closed)}")

    def grammar(self) -> str:
        return "\n".join(["%llguidance {}", *self._rules, f"TEXT: {ANY_TEXT}"])

    def _part(self, text: str) -> str:
        return f"<[{self._special_ids[text]}]>" if text in self._special_ids else _quoted(text)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
