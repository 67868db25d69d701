"""An answer as the items of `/v1/responses`, and as the events that tell how they grow."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from typing import Any

from paged_backend import CompletionOutput, ToolCall
from paged_backend.server.streaming import Event

Item = dict[str, Any]


class ResponseItems:
    """Reasoning, messages and calls, one open at a time, in the order in which they begin.

    What is added is a whole output or a piece of one: whole answers and streams are made by the same rules. A call that
    is taken back is done as `incomplete`, and is no part of the output.
    """

    def __init__(self, *, shows_reasoning: bool) -> None:
        self.reasoning = ""
        self._shows_reasoning = shows_reasoning
        self._items: list[Item] = []
        self._key: object = None
        """What the open item is of; None: none is open."""
        self._taken_back: set[str] = set()
        """The ids of their items."""
        self._item_of_call: dict[int, Item] = {}
        self._logprobs: list[Any] = []
        """Of tokens that have not shown any text yet."""

    @property
    def output(self) -> list[Item]:
        return [item for item in self._items if item["id"] not in self._taken_back]

    def add(self, part: CompletionOutput, logprobs: Sequence[Any]) -> Iterator[Event]:
        self._logprobs += logprobs
        for invalid in part.invalid_tool_calls:
            if (item := self._item_of_call.get(invalid.index)) is not None:
                self._taken_back.add(item["id"])
        if part.reasoning:
            self.reasoning += part.reasoning
            if self._shows_reasoning:
                yield from self._switch("reasoning", _reasoning_item())
                yield from self._grow_text("response.reasoning_text.delta", part.reasoning)
        if part.text:
            yield from self._switch("message", _message_item())
            yield from self._grow_text("response.output_text.delta", part.text)
        for call in part.tool_calls:
            yield from self._switch(("call", call.index), _call_item(call))
            self._item_of_call[call.index] = self._items[-1]
            yield from self._grow_call(call.arguments)

    def end(self, *, is_cut: bool) -> Iterator[Event]:
        """Close what is open, which is incomplete if the answer was cut; an answer of nothing is an empty message."""
        if not self.output:
            yield from self._switch("message", _message_item())
        yield from self._close(is_cut=is_cut)

    def _switch(self, key: object, item: Item) -> Iterator[Event]:
        if self._key == key:
            return
        yield from self._close()
        self._key = key
        self._items.append(item)
        if "content" not in item:
            yield self._event("response.output_item.added", item=dict(item))
        else:
            yield self._event("response.output_item.added", item={**item, "content": []})
            yield self._event("response.content_part.added", content_index=0, part=dict(item["content"][0]))

    def _close(self, *, is_cut: bool = False) -> Iterator[Event]:
        if self._key is None:
            return
        self._key = None
        item = self._items[-1]
        match item["type"]:
            case "message":
                item["content"][0]["logprobs"] += self._taken_logprobs()
                text, logprobs = item["content"][0]["text"], item["content"][0]["logprobs"]
                yield self._event("response.output_text.done", content_index=0, text=text, logprobs=logprobs)
            case "reasoning":
                text = item["content"][0]["text"]
                yield self._event("response.reasoning_text.done", content_index=0, text=text)
            case _:
                arguments, name = item["arguments"], item["name"]
                yield self._event("response.function_call_arguments.done", arguments=arguments, name=name)
        if "content" in item:
            yield self._event("response.content_part.done", content_index=0, part=dict(item["content"][0]))
        item["status"] = "incomplete" if is_cut or item["id"] in self._taken_back else "completed"
        yield self._event("response.output_item.done", item=dict(item))

    def _grow_text(self, kind: str, text: str) -> Iterator[Event]:
        content = self._items[-1]["content"][0]
        content["text"] += text
        optional: dict[str, Any] = {}
        if "logprobs" in content:
            optional["logprobs"] = self._taken_logprobs()
            content["logprobs"] += optional["logprobs"]
        yield self._event(kind, content_index=0, delta=text, **optional)

    def _grow_call(self, arguments: str) -> Iterator[Event]:
        if arguments:
            self._items[-1]["arguments"] += arguments
            yield self._event("response.function_call_arguments.delta", delta=arguments)

    def _taken_logprobs(self) -> list[Any]:
        taken, self._logprobs = self._logprobs, []
        return taken

    def _event(self, kind: str, **fields: Any) -> Event:
        """An event about the newest item."""
        where = {} if "item" in fields else {"item_id": self._items[-1]["id"]}
        return {"type": kind, "output_index": len(self._items) - 1, **where, **fields}


def _reasoning_item() -> Item:
    content = [{"type": "reasoning_text", "text": ""}]
    return {"id": _id("rs"), "type": "reasoning", "summary": [], "content": content, "status": "in_progress"}


def _message_item() -> Item:
    content = [{"type": "output_text", "text": "", "annotations": [], "logprobs": []}]
    return {"id": _id("msg"), "type": "message", "role": "assistant", "content": content, "status": "in_progress"}


def _call_item(call: ToolCall) -> Item:
    name = {"call_id": call.id, "name": call.name, "arguments": ""}
    return {"id": _id("fc"), "type": "function_call", **name, "status": "in_progress"}


def _id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"
