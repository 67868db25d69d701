"""A request to `/v1/responses` in the words of a chat: its items become messages."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from paged_backend import InvalidRequestError
from paged_backend.server.protocol import ChatRequest, SamplingBody
from paged_backend.server.responses_protocol import FunctionChoice, FunctionTool, ResponsesRequest

_ROLES = ("user", "assistant", "system", "developer")
_TEXT_PARTS = ("input_text", "output_text", "text", "refusal", "reasoning_text", "summary_text")
Item = Mapping[str, Any]


def as_chat(body: ResponsesRequest) -> ChatRequest:
    """The same wish as a chat. Raises InvalidRequestError for items that a model of text cannot be given."""
    same = {name: getattr(body, name) for name in SamplingBody.model_fields if name in body.model_fields_set}
    return ChatRequest(
        **same,
        messages=messages_of(body),
        stream=body.stream,
        max_tokens=body.max_output_tokens,
        tools=None if body.tools is None else [_tool(tool) for tool in body.tools],
        tool_choice=_tool_choice(body.tool_choice),
        parallel_tool_calls=body.parallel_tool_calls,
        response_format=_response_format(body),
        logprobs=body.wants_logprobs,
        top_logprobs=(body.top_logprobs or 0) if body.wants_logprobs else None,
        chat_template_kwargs=body.chat_template_kwargs,
        include_reasoning=body.include_reasoning,
    )


def messages_of(body: ResponsesRequest) -> list[dict[str, Any]]:
    """The conversation; `instructions` come first, in one message with what a first system message says."""
    conversation = _Conversation()
    items = [{"role": "user", "content": body.input}] if isinstance(body.input, str) else body.input
    for index, item in enumerate(items):
        conversation.add(item, f"input[{index}]")
    messages = conversation.messages
    if body.instructions is None:
        return messages
    if messages and messages[0]["role"] in ("system", "developer"):
        first = {"role": "system", "content": f"{body.instructions}\n\n{messages[0]['content']}"}
        return [first, *messages[1:]]
    return [{"role": "system", "content": body.instructions}, *messages]


class _Conversation:
    """Messages. Reasoning, text and calls that follow each other are one message of the assistant."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []

    def add(self, item: Item, where: str) -> None:
        match item.get("type") or "message":
            case "message":
                self._add_message(item, where)
            case "reasoning":
                text = _text(item.get("content") or item.get("summary"), where)
                self._assistant("reasoning", "content", "tool_calls")["reasoning"] = text
            case "function_call":
                self._assistant().setdefault("tool_calls", []).append(_call(item, where))
            case "function_call_output":
                output = _text(item.get("output"), where)
                self.messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": output})
            case "item_reference":
                raise _bad(where, "refers to a stored item, and this server stores none; send it again")
            case kind:
                raise _bad(where, f"is of type {kind!r}, which this server does not know")

    def _add_message(self, item: Item, where: str) -> None:
        role, text = item.get("role"), _text(item.get("content"), where)
        if role not in _ROLES:
            raise _bad(where, f"has the role {role!r}; known roles: {', '.join(_ROLES)}")
        if role == "assistant":
            self._assistant("content", "tool_calls")["content"] = text
        else:
            self.messages.append({"role": role, "content": text})

    def _assistant(self, *unless: str) -> dict[str, Any]:
        """The assistant's message that goes on, or a new one if the last one has any of these keys."""
        last = self.messages[-1] if self.messages else None
        if last is None or last["role"] != "assistant" or any(key in last for key in unless):
            last = {"role": "assistant"}
            self.messages.append(last)
        return last


def _text(content: Any, where: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise _bad(where, f"has content of type {type(content).__name__}; give text or a list of parts")
    return "".join(_part_text(part, where) for part in content)


def _part_text(part: Any, where: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    if kind not in _TEXT_PARTS:
        raise _bad(where, f"holds a part of type {kind!r}; this server reads text only")
    text = part.get("text", part.get("refusal"))
    if not isinstance(text, str):
        raise _bad(where, "holds a part without text")
    return text


def _call(item: Item, where: str) -> dict[str, Any]:
    name, arguments = item.get("name"), item.get("arguments") or "{}"
    if not isinstance(name, str):
        raise _bad(where, "is a call without a name")
    if not _is_json_object(arguments):
        raise _bad(where, f"has arguments that are no JSON object: {arguments!r}")
    return {"id": item.get("call_id"), "type": "function", "function": {"name": name, "arguments": arguments}}


def _is_json_object(text: Any) -> bool:
    """Or null, which stands for no arguments."""
    try:
        return isinstance(json.loads(text), dict | None)
    except (TypeError, ValueError, RecursionError):
        return False


def _bad(where: str, what: str) -> InvalidRequestError:
    return InvalidRequestError(f"{where} {what}", field="input")


def _tool(tool: FunctionTool) -> dict[str, Any]:
    return {"type": "function", "function": {key: value for key, value in tool.given().items() if key != "type"}}


def _tool_choice(choice: str | FunctionChoice | None) -> Any:
    """`auto`, which clients send without tools too, is what holds without a choice."""
    if isinstance(choice, FunctionChoice):
        return {"type": "function", "function": {"name": choice.name}}
    return None if choice == "auto" else choice


def _response_format(body: ResponsesRequest) -> Any:
    form = None if body.text is None else body.text.format
    if form is None:
        return None
    if form.type != "json_schema":
        return {"type": form.type}
    schema = {"name": form.name, "schema": form.schema_, "description": form.description, "strict": form.strict}
    return {"type": "json_schema", "json_schema": schema}
