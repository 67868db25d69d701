"""FunctionGemma and Gemma 4: `call:name{key:value, ...}`, with strings in marks of their own."""

from __future__ import annotations

from typing import ClassVar

from paged_backend.chat.call_format import CallFormat
from paged_backend.chat.pieces import Draft
from paged_backend.chat.source import Reading
from paged_backend.chat.tool_parsers.base import ToolParser, dumps
from paged_backend.chat.tool_parsers.literals import Literals


class FunctionGemmaParser(ToolParser):
    start: ClassVar = "<start_function_call>"
    end: ClassVar = "<end_function_call>"
    markers = ("<start_function_call>", "<end_function_call>", "<escape>")
    call_format = CallFormat(
        call="<start_function_call>call:NAME{ARGUMENTS}<end_function_call>",
        trigger="<start_function_call>",
        style="fields",
        quote="<escape>",
    )

    def run(self) -> Reading[None]:
        while (yield from self.text_until(self.start)):
            yield from self.attempt(self._call)

    def _call(self, draft: Draft) -> Reading[None]:
        yield from self.source.expect("call:", after_space=True)
        draft.name = yield from self.source.word()
        yield from self.source.expect("{", after_space=True)
        text = yield from self._fields()
        literals = Literals(text, quote=self.call_format.quote)
        draft.begin_arguments()
        draft.add(dumps(literals.pairs("}", ":")))
        literals.end()
        draft.end()

    def _fields(self) -> Reading[str]:
        """All up to the end mark, but for those within a string."""
        text, quote = "", self.call_format.quote
        while True:
            piece, marker = yield from self.source.until(quote, self.end)
            text += piece
            if marker == self.end:
                return text
            string, _ = yield from self.source.until(quote)
            text += quote + string + quote


class Gemma4Parser(FunctionGemmaParser):
    start = "<|tool_call>"
    end = "<tool_call|>"
    markers = ("<|tool_call>", "<tool_call|>", '<|"|>')
    call_format = CallFormat(
        call="<|tool_call>call:NAME{ARGUMENTS}<tool_call|>", trigger="<|tool_call>", style="fields", quote='<|"|>'
    )
