"""DeepSeek: calls between `<｜tool▁calls▁begin｜>` and `<｜tool▁calls▁end｜>`."""

from __future__ import annotations

from paged_backend.chat.call_format import CallFormat
from paged_backend.chat.pieces import Draft
from paged_backend.chat.source import Reading
from paged_backend.chat.tool_parsers.base import ToolParser

_BEGIN, _END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL, _SEP, _CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"


class DeepSeekV3Parser(ToolParser):
    """V3 and R1: `function<sep>name`, and the arguments in a JSON fence. Reads V3.1's form too."""

    markers = (_BEGIN, _CALL, _SEP, _CALL_END, _END)
    call_format = CallFormat(
        begin=_BEGIN,
        call=f"{_CALL}function{_SEP}NAME\n```json\nARGUMENTS\n```{_CALL_END}",
        between="\n",
        end=_END,
        trigger=_BEGIN,
    )

    def run(self) -> Reading[None]:
        while (yield from self.text_until(_BEGIN)):
            is_call = yield from self.attempt(self._call)
            while is_call and (yield from self.source.skip(_CALL, after_space=True)):
                is_call = yield from self.attempt(self._call)
            if is_call:
                yield from self.source.skip(_END, after_space=True)
                self.source.settle()

    def _call(self, draft: Draft) -> Reading[None]:
        source = self.source
        yield from source.skip(_CALL, after_space=True)
        name, _ = yield from source.until(_SEP)
        yield from source.skip_space()
        is_fenced = (yield from source.peek()) != "{"
        if is_fenced:
            name, _ = yield from source.until("```json")
            yield from source.skip_space()
        draft.name = name.strip()
        yield from self.arguments(draft)
        draft.end()
        if is_fenced:
            yield from source.skip("```", after_space=True)
        yield from source.skip(_CALL_END, after_space=True)


class DeepSeekV31Parser(DeepSeekV3Parser):
    """V3.1: `name<sep>{...}`. Reads V3's form too."""

    call_format = CallFormat(begin=_BEGIN, call=f"{_CALL}NAME{_SEP}ARGUMENTS{_CALL_END}", end=_END, trigger=_BEGIN)
