"""What a chat template has a place for, found out by rendering; and messages that do without it.

A template knows nothing of tools, or of past calls, if what it renders does not hold them. Then the tools go into the
system message, with how to call them; past calls are written out as text; and results come as messages of the user.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from paged_backend.chat.call_format import CallFormat

Chat = Sequence[Mapping[str, Any]]
Definitions = Sequence[Mapping[str, Any]]
Render = Callable[[Chat, Definitions | None], str]
"""May raise whatever the template raises."""

_TOOL = {
    "type": "function",
    "function": {
        "name": "probe_tool",
        "description": "probe_description",
        "parameters": {
            "type": "object",
            "properties": {"probe_key": {"type": "string", "description": "probe"}},
            "required": ["probe_key"],
        },
    },
}
_QUESTION = {"role": "user", "content": "probe_question"}
_RESULT = {"role": "tool", "tool_call_id": "probe0001", "name": "probe_tool", "content": "probe_result"}
_ARGUMENTS = {"probe_key": "probe_value"}


class History(NamedTuple):
    """The form in which a template takes past calls."""

    arguments_as_text: bool
    content_is_none: bool
    """Whether a message of calls alone has None as its content, not an empty text."""


class TemplateSupport(NamedTuple):
    """What a template has a place for."""

    tools: bool
    system: bool
    history: History | None
    """None: past calls and their results must be text."""


def support_of(render: Render) -> TemplateSupport:
    tools = _holds(render, [_QUESTION], [_TOOL], ["probe_tool", "probe_key"])
    forms = (History(as_text, is_none) for as_text in (False, True) for is_none in (False, True))
    return TemplateSupport(
        tools=tools,
        system=_holds(render, [{"role": "system", "content": "probe_system"}, _QUESTION], None, ["probe_system"]),
        history=next((form for form in forms if _takes(render, form, [_TOOL] if tools else None)), None),
    )


def adapted(messages: Chat, tools: Definitions | None, support: TemplateSupport, form: CallFormat) -> Chat:
    """The messages, such that a template with this support renders all of them; tools that it has no place for too."""
    if form.has_short_ids:
        messages = [_with_short_ids(message) for message in messages]
    if support.history is None:
        messages = _as_text(messages, form)
    else:
        messages = [_in_form(message, support.history) for message in messages]
    if tools and not support.tools:
        return _instructed(messages, instructions(tools, form), support.system)
    return messages


def instructions(tools: Definitions, form: CallFormat) -> str:
    """Tells a model which tools there are and how to call one."""
    listed = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    example = form.write([("function_name", {"argument_name": "value"})])
    return (
        f"You can call these functions, each given with the JSON schema of its arguments:\n<tools>\n{listed}\n</tools>"
        f"\n\nTo call a function, write its name and its arguments exactly like this:\n{example}\n\n"
        "Results come back in <tool_response></tool_response>. Call a function only if it helps to answer."
    )


def _holds(render: Render, messages: Chat, tools: Definitions | None, texts: list[str]) -> bool:
    try:
        rendered = render(messages, tools)
    except Exception:  # templates are programs: they raise what they like
        return False
    return all(text in rendered for text in texts)


def _takes(render: Render, form: History, tools: Definitions | None) -> bool:
    call = {"id": "probe0001", "type": "function", "function": {"name": "probe_tool", "arguments": _ARGUMENTS}}
    message = _in_form({"role": "assistant", "content": "", "tool_calls": [call]}, form)
    try:
        rendered = render([_QUESTION, message, _RESULT], tools)
    except Exception:
        return False
    is_garbled = "'probe_key'" in rendered or '\\"probe_key\\"' in rendered  # a mapping as text, or text quoted again
    return not is_garbled and "probe_value" in rendered and "probe_result" in rendered


def _in_form(message: Mapping[str, Any], form: History) -> Mapping[str, Any]:
    if not message.get("tool_calls"):
        return message
    changed = dict(message)
    if form.content_is_none and not message.get("content"):
        changed["content"] = None
    if form.arguments_as_text:
        changed["tool_calls"] = [_with_text_arguments(call) for call in message["tool_calls"]]
    return changed


def _with_text_arguments(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    return {**call, "function": {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}}


def _with_short_ids(message: Mapping[str, Any]) -> Mapping[str, Any]:
    changed = dict(message)
    if message.get("tool_calls"):
        changed["tool_calls"] = [{**call, "id": _short_id(call.get("id"))} for call in message["tool_calls"]]
    if "tool_call_id" in message:
        changed["tool_call_id"] = _short_id(message["tool_call_id"])
    return changed


def _short_id(call_id: object) -> str:
    """The id itself if it is a short one, or always the same one for it."""
    text = str(call_id)
    is_short = len(text) == 9 and text.isascii() and text.isalnum()
    return text if is_short else hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:9]


def _as_text(messages: Chat, form: CallFormat) -> Chat:
    """Calls as the text a model would write; results in a row, and what the user says next, as one message."""
    result: list[dict[str, Any]] = []
    follows_result = False
    for message in messages:
        is_result = message["role"] in ("tool", "function")
        if is_result:
            content = f"<tool_response>\n{message['content']}\n</tool_response>"
        else:
            content = _with_calls(message, form)
        if follows_result and (is_result or message["role"] == "user"):
            result[-1]["content"] += "\n" + content
        else:
            kept = {"role": "user"} if is_result else {k: v for k, v in message.items() if k != "tool_calls"}
            result.append({**kept, "content": content})
        follows_result = is_result
    return result


def _with_calls(message: Mapping[str, Any], form: CallFormat) -> str:
    calls = [
        (call["function"].get("name", ""), call["function"]["arguments"]) for call in message.get("tool_calls", ())
    ]
    parts = [message["content"], form.write(calls) if calls else ""]
    return "\n".join(part for part in parts if part)


def _instructed(messages: Chat, text: str, has_system: bool) -> Chat:
    """The text at the end of the system message, or before the first message where the template refuses that role."""
    first, rest = dict(messages[0]), list(messages[1:])
    if first["role"] == "system":
        return [{**first, "content": f"{first['content']}\n\n{text}"}, *rest]
    if has_system:
        return [{"role": "system", "content": text}, first, *rest]
    if first["role"] == "user":
        return [{**first, "content": f"{text}\n\n{first['content']}"}, *rest]
    return [{"role": "user", "content": text}, first, *rest]
