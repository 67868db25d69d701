"""Chat messages in OpenAI's form, brought into the one form that chat templates understand."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from paged_backend.errors import InvalidRequestError, blamed_on

Message = Mapping[str, Any]
_ROLE_NAMES = {"developer": "system", "function": "tool"}
"""What templates call them."""
ROLES = ("system", "developer", "user", "assistant", "tool", "function")


def normalised(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Copies of the messages: text parts joined, arguments of tool calls as mappings, `developer` as `system`, and
    OpenAI's older `function_call` and role `function` as tool calls and their results.

    Raises InvalidRequestError for what no template can be given: no messages, unknown roles, parts that are not text,
    arguments that are no JSON object.
    """
    with blamed_on("messages"):
        if isinstance(messages, (str, Mapping)) or not isinstance(messages, Sequence) or not messages:
            raise InvalidRequestError(f"messages={messages!r} must be a list with at least one message")
        return [_normalised(message, index) for index, message in enumerate(messages)]


def _normalised(message: Message, index: int) -> dict[str, Any]:
    if not isinstance(message, Mapping) or "role" not in message:
        raise InvalidRequestError(f"messages[{index}]={message!r} must be a mapping with 'role' and 'content'")
    role = message["role"]
    if role not in ROLES:
        raise InvalidRequestError(f"messages[{index}] has the role {role!r}; known roles: {', '.join(ROLES)}")
    message = _without_legacy_call(message)
    result = {key: value for key, value in message.items() if value is not None and key != "tool_calls"}
    result["role"] = _ROLE_NAMES.get(role, role)
    if isinstance(result.get("reasoning"), str):
        result.setdefault("reasoning_content", result["reasoning"])  # the name that templates know
    result["content"] = _text(message.get("content"), index)
    if message.get("tool_calls"):
        result["tool_calls"] = _tool_calls(message["tool_calls"], index)
    return result


def _without_legacy_call(message: Message) -> Message:
    """OpenAI's older form of a call, in the newer one."""
    call = message.get("function_call")
    others = {key: value for key, value in message.items() if key != "function_call"}
    return others if call is None else {"tool_calls": [{"type": "function", "function": call}], **others}


def _text(content: object, index: int) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, (Mapping, bytes)) or not isinstance(content, Iterable):
        raise InvalidRequestError(f"messages[{index}] has content of type {type(content).__name__}; give text")
    return "".join(_part_text(part, index) for part in content)


def _part_text(part: object, index: int) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, Mapping) and part.get("type", "text") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    raise InvalidRequestError(f"messages[{index}] holds a part of type {kind!r}; this engine reads text only")


def _tool_calls(calls: object, index: int) -> list[dict[str, Any]]:
    if not isinstance(calls, Sequence):
        raise InvalidRequestError(f"messages[{index}] has tool_calls of type {type(calls).__name__}; give a list")
    return [_tool_call(call, index) for call in calls]


def _tool_call(call: Mapping[str, Any], index: int) -> dict[str, Any]:
    if not isinstance(call, Mapping) or not isinstance(call.get("function"), Mapping):
        raise InvalidRequestError(f"messages[{index}] has a tool call without 'function': {call!r}")
    function = dict(call["function"])
    function["arguments"] = _arguments(function.get("arguments"), index)
    return {**call, "function": function}


def _arguments(arguments: object, index: int) -> Mapping[str, Any]:
    """Arguments travel as a JSON string, but templates loop over them as a mapping; nothing at all means none."""
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else None
        except (ValueError, RecursionError):
            raise InvalidRequestError(
                f"messages[{index}] has tool call arguments that are no JSON: {arguments!r}"
            ) from None
    if arguments is None:
        return {}
    if not isinstance(arguments, Mapping):
        raise InvalidRequestError(f"messages[{index}] has tool call arguments that are no JSON object: {arguments!r}")
    return arguments
