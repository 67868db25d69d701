"""LangChain's messages in the form that the engine takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from langchain_core.messages import AIMessage, BaseMessage, convert_to_openai_messages

# Templates leave out past reasoning, and calls are in `tool_calls` already.
_NO_TEXT_OF_AN_ANSWER = frozenset({"reasoning", "thinking", "redacted_thinking", "tool_call", "function_call"})


def to_openai(messages: Sequence[BaseMessage]) -> list[dict[str, Any]]:
    """OpenAI's form. Parts that are not text stay, so that the engine refuses them."""
    converted = convert_to_openai_messages(list(messages), text_format="block")
    assert isinstance(converted, list)
    return [_without_reasoning(message) for message in converted]


def has_open_answer(messages: Sequence[BaseMessage]) -> bool:
    """Whether the last message is the beginning of an answer, to be continued."""
    last = messages[-1] if messages else None
    return isinstance(last, AIMessage) and not last.tool_calls and bool(last.text)


def _without_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    if message["role"] != "assistant":
        return message
    return message | {"content": [part for part in message["content"] if part.get("type") not in _NO_TEXT_OF_AN_ANSWER]}
