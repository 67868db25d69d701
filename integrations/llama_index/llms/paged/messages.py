"""LlamaIndex's messages in the form that the engine takes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from llama_index.core.base.llms.types import (
    CachePoint,
    ChatMessage,
    MessageRole,
    TextBlock,
    ThinkingBlock,
    ToolCallBlock,
)

_ROLES = {MessageRole.CHATBOT: "assistant", MessageRole.MODEL: "assistant"}
_NOT_CONTENT = (CachePoint, ThinkingBlock, ToolCallBlock)
_PASSED_ON = ("name", "tool_call_id")


def to_openai(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """OpenAI's form. Parts that are not text stay, so that the engine refuses them."""
    return [_to_openai(message) for message in messages]


def has_open_answer(messages: Sequence[ChatMessage]) -> bool:
    """Whether the last message is the beginning of an answer, to be continued."""
    last = messages[-1] if messages else None
    return last is not None and _role(last) == "assistant" and not _tool_calls(last) and bool(last.content)


def _to_openai(message: ChatMessage) -> dict[str, Any]:
    converted: dict[str, Any] = {"role": _role(message), "content": _content(message)}
    converted |= {name: message.additional_kwargs[name] for name in _PASSED_ON if name in message.additional_kwargs}
    thoughts = "".join(block.content or "" for block in message.blocks if isinstance(block, ThinkingBlock))
    if thoughts:
        converted["reasoning"] = thoughts  # templates know which of it to leave out
    calls = _tool_calls(message)
    return converted | {"tool_calls": calls} if calls else converted


def _role(message: ChatMessage) -> str:
    return _ROLES.get(message.role, message.role.value)


def _content(message: ChatMessage) -> str | list[dict[str, Any]]:
    """`message.content`, which joins blocks of text by line breaks; parts, if some are not text."""
    blocks = [block for block in message.blocks if not isinstance(block, _NOT_CONTENT)]
    if all(isinstance(block, TextBlock) for block in blocks):
        return message.content or ""
    return [{"type": block.block_type} for block in blocks]


def _tool_calls(message: ChatMessage) -> list[dict[str, Any]]:
    """From the blocks, else from where LlamaIndex used to keep them."""
    calls = [_tool_call(block) for block in message.blocks if isinstance(block, ToolCallBlock)]
    return calls or [_as_dict(call) for call in message.additional_kwargs.get("tool_calls") or ()]


def _tool_call(block: ToolCallBlock) -> dict[str, Any]:
    kwargs = block.tool_kwargs
    arguments = kwargs if isinstance(kwargs, str) else json.dumps(kwargs, ensure_ascii=False)
    function = {"name": block.tool_name, "arguments": arguments}
    return {"id": block.tool_call_id, "type": "function", "function": function}


def _as_dict(call: Any) -> dict[str, Any]:
    """OpenAI's own class, or its dump."""
    return dict(call.model_dump() if hasattr(call, "model_dump") else call)
