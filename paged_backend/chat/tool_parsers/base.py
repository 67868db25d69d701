"""What all parsers of tool calls share."""

from __future__ import annotations

import abc
import json
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from paged_backend.chat.call_format import CallFormat
from paged_backend.chat.pieces import Draft, MakeId, Pieces, long_id
from paged_backend.chat.source import Malformed, Reading, Source


class ToolParser(abc.ABC):
    """Reads one output of a model family: what is no call becomes text, what is one becomes a call.

    Nothing in an output is an error: malformed markup is text, and listed as an invalid call with the reason.
    """

    call_format: ClassVar[CallFormat]
    """How the family writes calls."""
    markers: ClassVar[tuple[str, ...]] = ()
    """What may be special tokens of the family's tokenizers, and must stay in the text."""
    make_id: ClassVar[MakeId] = staticmethod(long_id)
    reads_reasoning: ClassVar[bool] = False
    """Whether the reasoning is part of the same markup."""

    def __init__(
        self,
        source: Source,
        pieces: Pieces,
        tools: Mapping[str, Mapping[str, Any]],
        *,
        max_calls: int | None = None,
    ) -> None:
        """`tools` maps each name to the schema of its arguments."""
        self.source = source
        self.pieces = pieces
        self.tools = tools
        self._max_calls = max_calls

    @abc.abstractmethod
    def run(self) -> Reading[None]:
        """Read to the end."""

    def text_until(self, *markers: str) -> Reading[bool]:
        """Give out text up to one of `markers` and read that; False: there was none."""
        return (yield from self.source.through(markers, self.pieces.add_text)) is not None

    def attempt(self, read_call: Callable[[Draft], Reading[None]], *, is_marked: bool = True) -> Reading[bool]:
        """Whether there was a call. If not, what was read is text; and an invalid call too, if it was marked as a call
        or has the shape of one."""
        draft = Draft(self.pieces, self.tools, self._max_calls)
        try:
            yield from read_call(draft)
        except Malformed as error:
            if is_marked or draft.is_call_shaped:
                draft.reject(str(error))
            self.pieces.add_text(self.source.unsettled)
            return False
        finally:
            self.source.settle()
        return True

    def arguments(self, draft: Draft) -> Reading[None]:
        """A JSON object, given out as it comes."""
        draft.begin_arguments()
        if (yield from self.source.peek()) != "{":
            raise Malformed("its arguments are no JSON object")
        yield from self.source.json_value(draft.add)

    def json_call(self, draft: Draft) -> Reading[None]:
        """`{"name": ..., "arguments": {...}}` in any order, with `parameters` for `arguments`, or within `function`."""
        yield from self._members(draft)
        draft.end()

    def _members(self, draft: Draft) -> Reading[None]:
        source = self.source
        yield from source.expect("{")
        while True:
            yield from source.skip_space()
            if (yield from source.peek()) != '"':
                raise Malformed("a key is missing")
            key = json.loads((yield from source.json_value()))
            yield from source.expect(":", after_space=True)
            yield from source.skip_space()
            yield from self._member(draft, key)
            if (yield from source.skip("}", after_space=True)):
                return
            yield from source.expect(",", after_space=True)

    def _member(self, draft: Draft, key: str) -> Reading[None]:
        first = yield from self.source.peek()
        if key in ("arguments", "parameters"):
            yield from self._arguments_member(draft, first)
        elif key == "function" and first == "{":
            yield from self._members(draft)
        else:
            value = json.loads((yield from self.source.json_value()))
            if key == "name" or (key == "function" and draft.name is None):
                if not isinstance(value, str):
                    raise Malformed("its name is no string")
                draft.name = value

    def _arguments_member(self, draft: Draft, first: str) -> Reading[None]:
        """Some models write the object as a string that holds it, or null."""
        if first == "{":
            yield from self.arguments(draft)
            return
        draft.begin_arguments()
        value = json.loads((yield from self.source.json_value()))
        if value is not None:
            draft.add(value if isinstance(value, str) else json.dumps(value))


def dumps(value: object) -> str:
    """JSON in the way models write it; raises Malformed for what has none."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        return text if _is_unicode(text) else json.dumps(value, allow_nan=False)
    except (ValueError, RecursionError) as error:
        raise Malformed(f"its arguments have no JSON: {error}") from None


def _is_unicode(text: str) -> bool:
    """False with a lone surrogate, which only an escape can write."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
