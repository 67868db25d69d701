"""Calls as bare JSON objects, alone or in a list, with or without a marker before them."""

from __future__ import annotations

from collections.abc import Callable

from paged_backend.chat.call_format import CallFormat
from paged_backend.chat.pieces import Draft
from paged_backend.chat.source import Malformed, Reading
from paged_backend.chat.tool_parsers.base import ToolParser

_FENCES = ("```json\n", "```tool_call\n", "```\n")


class JsonParser(ToolParser):
    """Any model that was told to answer with JSON. A call stands at the start of a line, may be in a fence, and may be
    one of a list; JSON that has no name and arguments is text."""

    call_format = CallFormat(call='{"name": "NAME", "arguments": ARGUMENTS}', between="\n")

    def run(self) -> Reading[None]:
        while (yield from self.source.peek()):
            yield from self._line()

    def _line(self) -> Reading[None]:
        yield from self.source.skip_space()
        fence = ""
        for candidate in _FENCES:
            if not fence and (yield from self.source.skip(candidate)):
                fence = candidate
        yield from self.source.skip_space()
        first = yield from self.source.peek()
        if first not in ("{", "["):
            self.pieces.add_text(self.source.unsettled)
            self.source.settle()
        elif (yield from self.calls(first)) and fence:
            yield from self._after_call("```")
        yield from self.rest_of_line()

    def rest_of_line(self) -> Reading[None]:
        if (yield from self.text_until("\n")):
            self.source.settle()
            self.pieces.add_text("\n")

    def calls(self, first: str) -> Reading[bool]:
        """One call, or a list of them; whether the first was one."""
        if first == "{":
            is_call = yield from self.attempt(self.json_call, is_marked=False)
            while is_call and (yield from self._separator()):
                yield from self.attempt(self.json_call, is_marked=False)
            return is_call
        is_call = yield from self._with_commas(self._first_of_list, is_marked=False)
        if is_call:
            yield from self._after_call("]")
        return is_call

    def _with_commas(self, read_first: Callable[[Draft], Reading[None]], *, is_marked: bool) -> Reading[bool]:
        """Calls with commas between them; whether the first was one."""
        is_call = yield from self.attempt(read_first, is_marked=is_marked)
        while is_call and (yield from self.source.skip(",", after_space=True)):
            yield from self.source.skip_space()
            yield from self.attempt(self.json_call, is_marked=is_marked)
        return is_call

    def _first_of_list(self, draft: Draft) -> Reading[None]:
        yield from self.source.expect("[")
        yield from self.source.skip_space()
        if (yield from self.source.peek()) != "{":
            raise Malformed("a list without a call")
        yield from self.json_call(draft)

    def _separator(self) -> Reading[bool]:
        """Whether another call is said to follow on the same line."""
        if not (yield from self.source.skip(";", after_space=True)):
            return False
        yield from self.source.skip_space()
        return True

    def _after_call(self, literal: str) -> Reading[None]:
        yield from self.source.skip(literal, after_space=True)
        self.source.settle()


class Llama3JsonParser(JsonParser):
    """Llama 3.1 and later: `{"name": ..., "parameters": {...}}`, sometimes after `<|python_tag|>`."""

    markers = ("<|python_tag|>",)
    call_format = CallFormat(call='{"name": "NAME", "parameters": ARGUMENTS}', between="; ")

    def run(self) -> Reading[None]:
        while (yield from self.source.peek()):
            yield from self.source.skip_space()
            yield from self.source.skip("<|python_tag|>")
            yield from self._line()


class MarkedListParser(JsonParser):
    """A marker, and a list of calls after it."""

    marker: str

    def run(self) -> Reading[None]:
        while (yield from self.text_until(self.marker)):
            yield from self.source.skip_space()
            first = yield from self.source.peek()
            if first in ("{", "["):
                yield from self.calls(first)
            else:
                yield from self.attempt(self.other_call)

    def other_call(self, draft: Draft) -> Reading[None]:
        """What follows the marker if it is neither an object nor a list."""
        yield from self.json_call(draft)

    def calls(self, first: str) -> Reading[bool]:
        read_first = self.json_call if first == "{" else self._first_of_list
        is_call = yield from self._with_commas(read_first, is_marked=True)
        if is_call and first == "[":
            yield from self._after_call("]")
        return is_call


class GraniteParser(MarkedListParser):
    """Granite 3: `<|tool_call|>[{...}, ...]`."""

    marker = "<|tool_call|>"
    markers = (marker,)
    call_format = CallFormat(
        begin="<|tool_call|>[",
        call='{"name": "NAME", "arguments": ARGUMENTS}',
        between=", ",
        end="]",
        trigger="<|tool_call|>",
    )


class Phi4MiniParser(MarkedListParser):
    """Phi-4 mini: `functools[{...}, ...]`."""

    marker = "functools"
    call_format = CallFormat(
        begin="functools[",
        call='{"name": "NAME", "arguments": ARGUMENTS}',
        between=", ",
        end="]",
        trigger="functools[",
    )
