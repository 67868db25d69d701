"""Hermes, Qwen 2.5 and 3, and many others: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""

from __future__ import annotations

from paged_backend.chat.call_format import CallFormat
from paged_backend.chat.pieces import Draft
from paged_backend.chat.source import Reading
from paged_backend.chat.tool_parsers.base import ToolParser

_START, _END = "<tool_call>", "</tool_call>"


class HermesParser(ToolParser):
    """What a model writes too much between a call and its end mark is text; more calls there are calls."""

    markers = (_START, _END)
    call_format = CallFormat(
        call='<tool_call>\n{"name": "NAME", "arguments": ARGUMENTS}\n</tool_call>',
        between="\n",
        trigger=_START,
    )

    def run(self) -> Reading[None]:
        is_open = False
        while (mark := (yield from self._next_mark(is_open))) is not None:
            is_open = mark == _START and (yield from self._calls())
            self.source.settle()

    def _next_mark(self, is_open: bool) -> Reading[str | None]:
        return (yield from self.source.through(self.markers if is_open else (_START,), self.pieces.add_text))

    def _calls(self) -> Reading[bool]:
        """Whether there were calls whose end mark is still to come."""
        while (yield from self.attempt(self._call)):
            if (yield from self.source.skip(_END, after_space=True)):
                return False
            yield from self.source.skip_space()
            if (yield from self.source.peek()) != "{":
                self.pieces.add_text(self.source.unsettled)
                return True
        return False

    def _call(self, draft: Draft) -> Reading[None]:
        yield from self.source.skip_space()
        yield from self.json_call(draft)
