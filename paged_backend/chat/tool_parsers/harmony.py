"""GPT-OSS: messages of channels, `<|channel|>commentary to=functions.name<|message|>{...}<|call|>`."""

from __future__ import annotations

import re

from paged_backend.chat.call_format import CallFormat
from paged_backend.chat.pieces import Draft
from paged_backend.chat.source import Emit, Reading
from paged_backend.chat.tool_parsers.base import ToolParser

_START, _CHANNEL, _MESSAGE, _CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>")
_RECIPIENT = re.compile(r"\bto=(?:functions\.)?([^\s<]+)")


class HarmonyParser(ToolParser):
    """Calls are messages to `functions.name`; of the others, those of the analysis channel are reasoning."""

    markers = (_START, _CHANNEL, _MESSAGE, _CONSTRAIN, *_ENDS)
    reads_reasoning = True
    call_format = CallFormat(
        call="<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>ARGUMENTS",
        between="<|call|><|start|>assistant",
        answer="<|channel|>final<|message|>",
    )

    def run(self) -> Reading[None]:
        while (yield from self.text_until(_START, _CHANNEL)):
            yield from self.attempt(self._message, is_marked=False)

    def _message(self, draft: Draft) -> Reading[None]:
        header, _ = yield from self.source.until(_MESSAGE)
        recipient = _RECIPIENT.search(header)
        if recipient is not None and self.tools:
            yield from self._call(draft, recipient[1])
        elif header.partition(_CHANNEL)[2].strip().startswith("analysis") or header.strip().startswith("analysis"):
            yield from self._body(self.pieces.add_reasoning)
            self.pieces.add_reasoning("\n")
        else:
            yield from self._body(self.pieces.add_text)

    def _body(self, emit: Emit) -> Reading[None]:
        self.source.settle()
        yield from self.source.through(_ENDS, emit)

    def _call(self, draft: Draft, name: str) -> Reading[None]:
        draft.name = name
        yield from self.source.skip_space()
        yield from self.arguments(draft)
        draft.end()
        yield from self.source.skip_space()
        for end in _ENDS:
            if (yield from self.source.skip(end)):
                break
