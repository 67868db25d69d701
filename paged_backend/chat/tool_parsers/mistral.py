"""Mistral: `[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]`, and since v11 `[TOOL_CALLS]name[ARGS]{...}`."""

from __future__ import annotations

from paged_backend.chat.call_format import CallFormat
from paged_backend.chat.pieces import Draft, short_id
from paged_backend.chat.source import Malformed, Reading
from paged_backend.chat.tool_parsers.json_calls import MarkedListParser

_MARKER = "[TOOL_CALLS]"


class MistralParser(MarkedListParser):
    """Reads both forms; writes the older one."""

    marker = _MARKER
    markers = (_MARKER, "[ARGS]", "[CALL_ID]")
    make_id = staticmethod(short_id)
    call_format = CallFormat(
        begin=_MARKER + "[",
        call='{"name": "NAME", "arguments": ARGUMENTS}',
        between=", ",
        end="]",
        trigger=_MARKER,
        has_short_ids=True,
    )

    def other_call(self, draft: Draft) -> Reading[None]:
        name = yield from self.source.word()
        if not name:
            raise Malformed("it has no name")
        draft.name = name
        if (yield from self.source.skip("[CALL_ID]")):
            draft.id = yield from self.source.word()
        yield from self.source.skip("[ARGS]")
        yield from self.source.skip_space()
        yield from self.arguments(draft)
        draft.end()


class MistralArgsParser(MistralParser):
    """The same; writes the newer form."""

    call_format = CallFormat(call="[TOOL_CALLS]NAME[ARGS]ARGUMENTS", trigger=_MARKER, has_short_ids=True)
