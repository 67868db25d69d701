"""Tool calls of an output while its pieces come."""

from __future__ import annotations

from paged_backend import CompletionOutput


class Calls:
    """The calls of an output so far; true while there is one that was not taken back."""

    def __init__(self) -> None:
        self._indices: set[int] = set()

    def add(self, part: CompletionOutput) -> None:
        if part.tool_calls or part.invalid_tool_calls:
            self._indices |= {call.index for call in part.tool_calls}
            self._indices -= {call.index for call in part.invalid_tool_calls}

    def __bool__(self) -> bool:
        return bool(self._indices)
