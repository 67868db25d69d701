"""Calls as Python writes them: a list `[f(a=1), g()]`, or the lines of a `tool_code` block."""

from __future__ import annotations

from typing import ClassVar

from paged_backend.chat.call_format import CallFormat
from paged_backend.chat.pieces import Draft
from paged_backend.chat.source import Malformed, Reading
from paged_backend.chat.tool_parsers.base import ToolParser, dumps
from paged_backend.chat.tool_parsers.literals import Literals

_START, _END = "<|python_start|>", "<|python_end|>"
_FENCE = "```tool_code"


class PythonicParser(ToolParser):
    """Llama 3.2 and 4, and others: the answer begins with a list of calls, maybe within `<|python_start|>`."""

    markers: ClassVar[tuple[str, ...]] = (_START, _END)
    call_format = CallFormat(begin="[", call="NAME(ARGUMENTS)", between=", ", end="]", style="keywords")

    def run(self) -> Reading[None]:
        yield from self.source.skip_space()
        yield from self._list()
        while (yield from self.text_until(_START)):
            yield from self.source.skip_space()
            yield from self._list()

    def _list(self) -> Reading[None]:
        if (yield from self.source.peek()) != "[":
            self.pieces.add_text(self.source.unsettled)
            self.source.settle()
            return
        is_call = yield from self.attempt(self._first, is_marked=False)
        while is_call and (yield from self.source.skip(",", after_space=True)):
            yield from self.source.skip_space()
            is_call = yield from self.attempt(self.python_call, is_marked=False)
        if is_call:
            yield from self.source.skip("]", after_space=True)
            yield from self.source.skip(_END, after_space=True)
            self.source.settle()

    def _first(self, draft: Draft) -> Reading[None]:
        yield from self.source.skip(_START)
        yield from self.source.expect("[")
        yield from self.source.skip_space()
        yield from self.python_call(draft)

    def python_call(self, draft: Draft) -> Reading[None]:
        name = yield from self.source.word()
        if not name or (yield from self.source.peek()) != "(":
            raise Malformed("this is no call of a function")
        draft.name = name
        text = yield from self.source.balanced(quotes="\"'")
        literals = Literals(text)
        literals.expect("(")
        draft.begin_arguments()
        draft.add(dumps(literals.pairs(")", "=")))
        literals.end()
        draft.end()


class GemmaParser(PythonicParser):
    """Gemma 3, as its guide teaches it: calls in a `tool_code` block, a line each, maybe within `print(...)`."""

    markers = ()
    call_format = CallFormat(
        begin=_FENCE + "\n", call="NAME(ARGUMENTS)", between="\n", end="\n```", trigger=_FENCE, style="keywords"
    )

    def run(self) -> Reading[None]:
        while (yield from self.text_until(_FENCE)):
            is_call = yield from self.attempt(self._printed_call)
            while is_call and not (yield from self.source.skip("```", after_space=True)):
                yield from self.source.skip_space()
                if not (yield from self.source.peek()):
                    break
                is_call = yield from self.attempt(self._printed_call)
            self.source.settle()

    def _printed_call(self, draft: Draft) -> Reading[None]:
        yield from self.source.skip_space()
        is_printed = yield from self.source.skip("print(")
        is_listed = yield from self.source.skip("[")
        yield from self.python_call(draft)
        if is_listed:
            yield from self.source.skip("]", after_space=True)
        if is_printed:
            yield from self.source.skip(")", after_space=True)
