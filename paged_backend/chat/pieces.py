"""What parsers have made of an output's text: content, reasoning, tool calls."""

from __future__ import annotations

import secrets
import string
import uuid
from collections.abc import Callable, Collection

from paged_backend.chat.source import Malformed, loads
from paged_backend.outputs import CompletionOutput, InvalidToolCall, ToolCall

MakeId = Callable[[], str]


def long_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"


def short_id() -> str:
    """Nine letters and digits, which is what Mistral's templates take."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


class Pieces:
    """Collects what is new since it was last taken.

    Space around tool calls and at both ends of the reasoning is markup: it is given out only once something follows
    that it separates.
    """

    def __init__(self, make_id: MakeId = long_id) -> None:
        self._make_id = make_id
        self._text = ""
        self._space = ""
        self._has_text = False
        self._reasoning = ""
        self._reasoning_space = ""
        self._has_reasoning = False
        self.num_calls = 0
        self._next_index = 0
        self._calls: list[ToolCall] = []
        self._invalid: list[InvalidToolCall] = []

    def add_text(self, piece: str) -> None:
        piece = self._space + piece
        if self.num_calls and not self._has_text:
            piece = piece.lstrip()
        stripped = piece.rstrip()
        self._space = piece[len(stripped) :]
        self._text += stripped
        self._has_text = self._has_text or bool(stripped)

    def add_reasoning(self, piece: str) -> None:
        piece = self._reasoning_space + piece
        if not self._has_reasoning:
            piece = piece.lstrip()
        stripped = piece.rstrip()
        self._reasoning_space = piece[len(stripped) :]
        self._reasoning += stripped
        self._has_reasoning = self._has_reasoning or bool(stripped)

    def open_call(self, name: str, call_id: str | None) -> tuple[int, str]:
        """A new call; returns its index and id."""
        index, call_id = self._next_index, call_id or self._make_id()
        self._next_index += 1
        self.num_calls += 1
        self._calls.append(ToolCall(index, call_id, name))
        return index, call_id

    def add_arguments(self, index: int, piece: str) -> None:
        if self._calls and self._calls[-1].index == index:
            self._calls[-1].arguments += piece
        else:
            self._calls.append(ToolCall(index, None, None, piece))

    def reject(self, opened: tuple[int, str] | None, name: str | None, arguments: str, error: str) -> None:
        """Something that looked like a call; takes back what was given out of it."""
        index, call_id = opened or (self._next_index, self._make_id())
        if opened is None:
            self._next_index += 1
        else:
            self.num_calls -= 1
            self._calls = [call for call in self._calls if call.index != index]
        self._invalid.append(InvalidToolCall(index, call_id, name, arguments, error))

    def finish(self) -> None:
        """Nothing follows: the last space is text after all, unless it was behind a call."""
        if not self.num_calls:
            self._text += self._space
        self._space = ""

    def take_into(self, output: CompletionOutput) -> None:
        """Put what is new into `output`, whose text it replaces."""
        output.text, self._text = self._text, ""
        output.reasoning, self._reasoning = self._reasoning or None, ""
        output.tool_calls, self._calls = self._calls, []
        output.invalid_tool_calls, self._invalid = self._invalid, []


class Draft:
    """One call while it is read. Its arguments are given out as they come, once its name is known to be a tool's."""

    def __init__(self, pieces: Pieces, tools: Collection[str], max_calls: int | None = None) -> None:
        self.name: str | None = None
        self.id: str | None = None
        self.has_arguments = False
        self._pieces = pieces
        self._tools = tools
        self._is_too_many = max_calls is not None and pieces.num_calls >= max_calls
        self._arguments: list[str] = []
        self._opened: tuple[int, str] | None = None

    @property
    def is_call_shaped(self) -> bool:
        """Whether there are a name and arguments, so that nobody would write this by chance."""
        return self.name is not None and self.has_arguments

    def begin_arguments(self) -> None:
        if self.has_arguments:
            raise Malformed("it has arguments twice")
        self.has_arguments = True
        if self.name in self._tools and not self._is_too_many:
            self._open()

    def add(self, piece: str) -> None:
        self._arguments.append(piece)
        if self._opened is not None:
            self._pieces.add_arguments(self._opened[0], piece)

    def end(self) -> None:
        """All is read; raises Malformed if it is no call of a known tool with an object as arguments."""
        if self.name is None:
            raise Malformed("it has no name")
        if self.name not in self._tools:
            raise Malformed(f"there is no tool {self.name!r}; known tools: {', '.join(map(repr, self._tools))}")
        if self._is_too_many:
            raise Malformed("there was a call already, and parallel_tool_calls is False")
        if not self._arguments:
            self.add("{}")
        if not isinstance(loads("".join(self._arguments)), dict):
            raise Malformed("its arguments are no JSON object")
        if self._opened is None:
            arguments = "".join(self._arguments)
            self._open()
            assert self._opened is not None
            self._pieces.add_arguments(self._opened[0], arguments)

    def reject(self, error: str) -> None:
        self._pieces.reject(self._opened, self.name, "".join(self._arguments), error)

    def _open(self) -> None:
        assert self.name is not None
        self._opened = self._pieces.open_call(self.name, self.id)
