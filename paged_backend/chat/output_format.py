"""How the text of one request's outputs is read: which parsers, for which tools."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from paged_backend.chat.pieces import Pieces, long_id
from paged_backend.chat.reasoning import Reasoning, Stage
from paged_backend.chat.source import Reading, Source
from paged_backend.chat.tool_parsers.base import ToolParser
from paged_backend.outputs import CompletionOutput


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OutputFormat:
    """What is in an output besides text."""

    tool_parser: type[ToolParser] | None = None
    tools: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    """Name to the schema of the arguments."""
    max_calls: int | None = None
    reasoning: Reasoning | None = None

    @property
    def is_plain(self) -> bool:
        """Whether there is nothing but text."""
        return self.tool_parser is None and (self.reasoning is None or self.reasoning.stage is Stage.AFTER)

    @property
    def markers(self) -> tuple[str, ...]:
        """What must stay in the text, even if these are special tokens."""
        own = self.tool_parser.markers if self.tool_parser else ()
        return own if self.reasoning is None else (*own, self.reasoning.form.start, self.reasoning.form.end)

    def parser(self) -> OutputParser:
        """For one output."""
        return OutputParser(self)


class OutputParser:
    """Takes the pieces of one output in order; joined, what it makes of them is the same however they were cut."""

    def __init__(self, form: OutputFormat) -> None:
        self._form = form
        self._source = Source()
        self._pieces = Pieces(form.tool_parser.make_id if form.tool_parser else long_id)
        self._reading = self._read()

    def parse(self, news: CompletionOutput) -> None:
        """Replaces the text of `news` by the content, the reasoning and the calls in it."""
        self._source.feed(news.text, is_final=news.finished())
        next(self._reading, None)
        if news.finished():
            self._pieces.finish()
        self._pieces.take_into(news)

    def _read(self) -> Reading[None]:
        form = self._form
        if form.reasoning is not None and not (form.tool_parser and form.tool_parser.reads_reasoning):
            yield from form.reasoning.read(self._source, self._pieces)
        if form.tool_parser is not None:
            parser = form.tool_parser(self._source, self._pieces, form.tools, max_calls=form.max_calls)
            yield from parser.run()
        else:
            yield from self._source.through((), self._pieces.add_text)
