"""Hermes, Qwen 2.5 and 3, and many others: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""

from __future__ import annotations

from paged_backend.chat.call_format import CallFormat
from paged_backend.chat.pieces import Draft
from paged_backend.chat.source import Reading
from paged_backend.chat.tool_parsers.base import ToolParser


class HermesParser(ToolParser):
    markers = ("<tool_call>", "</tool_call>")
    call_format = CallFormat(
        call='<tool_call>\n{"name": "NAME", "arguments": ARGUMENTS}\n</tool_call>',
        between="\n",
        trigger="<tool_call>",
    )

    def run(self) -> Reading[None]:
        while (yield from self.text_until("<tool_call>")):
            yield from self.attempt(self._call)

    def _call(self, draft: Draft) -> Reading[None]:
        yield from self.source.skip_space()
        yield from self.json_call(draft)
        yield from self.source.skip("</tool_call>", after_space=True)
