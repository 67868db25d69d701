"""Qwen3-Coder: `<tool_call><function=name><parameter=key>value</parameter></function></tool_call>`."""

from __future__ import annotations

from typing import Any

from paged_backend.chat.call_format import CallFormat
from paged_backend.chat.pieces import Draft
from paged_backend.chat.source import Malformed, Reading, loads
from paged_backend.chat.tool_parsers.base import ToolParser, dumps


class Qwen3CoderParser(ToolParser):
    """A value is what its parameter's schema says: a string as it stands, anything else as JSON."""

    markers = ("<tool_call>", "</tool_call>")
    call_format = CallFormat(
        call="<tool_call>\n<function=NAME>\nARGUMENTS</function>\n</tool_call>",
        between="\n",
        trigger="<tool_call>",
        style="xml",
    )

    def run(self) -> Reading[None]:
        while (yield from self.text_until("<tool_call>")):
            yield from self.attempt(self._call)

    def _call(self, draft: Draft) -> Reading[None]:
        yield from self.source.skip_space()
        if (yield from self.source.peek()) == "{":
            yield from self.json_call(draft)  # some fall back to the older form
        else:
            yield from self._function(draft)
        yield from self.source.skip("</tool_call>", after_space=True)

    def _function(self, draft: Draft) -> Reading[None]:
        source = self.source
        yield from source.expect("<function=")
        name, _ = yield from source.until(">")
        draft.name = name.strip()
        draft.begin_arguments()
        seen: set[str] = set()
        while (yield from source.skip("<parameter=", after_space=True)):
            key, _ = yield from source.until(">")
            text, _ = yield from source.until("</parameter>")
            if key in seen:
                raise Malformed(f"the parameter {key!r} is there twice")
            value = _value(text.removeprefix("\n").removesuffix("\n"), self._kinds(draft.name, key))
            draft.add(("{" if not seen else ", ") + f"{dumps(key)}: {dumps(value)}")
            seen.add(key)
        draft.add("}" if seen else "{}")
        yield from source.expect("</function>", after_space=True)
        draft.end()

    def _kinds(self, name: str, key: str) -> set[str]:
        """The types that the tool's schema allows for a parameter; none if it does not say."""
        properties = self.tools.get(name, {}).get("properties")
        return _kinds(properties.get(key)) if isinstance(properties, dict) else set()


def _kinds(schema: object) -> set[str]:
    """Whatever is no type in it counts as if it were not there: nobody has checked a client's schema."""
    if not isinstance(schema, dict):
        return set()
    kinds, branches = schema.get("type"), schema.get("anyOf")
    named = {kind for kind in (kinds if isinstance(kinds, list) else [kinds]) if isinstance(kind, str)}
    return named.union(*map(_kinds, branches if isinstance(branches, list) else []))


def _value(text: str, kinds: set[str]) -> Any:
    if kinds and kinds <= {"string", "null"} and not (text == "null" and "null" in kinds):
        return text
    try:
        return loads(text)
    except Malformed:
        return text
