"""LlamaIndex's tools as the engine takes them, and calls of them as LlamaIndex takes those."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from llama_index.core.base.llms.types import ChatMessage, ChatResponse, MessageRole, ToolCallBlock
from llama_index.core.llms.llm import ToolSelection
from llama_index.core.tools.types import BaseTool

_MODES = ("auto", "none", "required")


def chat_arguments(
    tools: Sequence[BaseTool],
    user_msg: str | ChatMessage | None,
    chat_history: Sequence[ChatMessage] | None,
    *,
    tool_choice: str | Mapping[str, Any] | None,
    tool_required: bool,
    allow_parallel_tool_calls: bool,
) -> dict[str, Any]:
    """What `chat` and its likes are called with."""
    messages = list(chat_history or ())
    if user_msg is not None:
        messages.append(ChatMessage(role=MessageRole.USER, content=user_msg) if isinstance(user_msg, str) else user_msg)
    if not tools:
        return {"messages": messages}
    return {
        "messages": messages,
        "tools": [_definition(tool) for tool in tools],
        "tool_choice": _tool_choice(tool_choice, tool_required),
        "parallel_tool_calls": allow_parallel_tool_calls,
    }


def selections(response: ChatResponse, *, error_on_no_tool_call: bool) -> list[ToolSelection]:
    """The calls in a response. Raises ValueError if there are none but should be."""
    calls = [block for block in response.message.blocks if isinstance(block, ToolCallBlock)]
    if not calls and error_on_no_tool_call:
        raise ValueError(
            f"the model called no tool but answered: {response.message.content!r}; give tool_required=True to make it "
            "call one, or error_on_no_tool_call=False"
        )
    return [
        ToolSelection(tool_id=call.tool_call_id or "", tool_name=call.tool_name, tool_kwargs=_as_mapping(call))
        for call in calls
    ]


def with_one_call(response: ChatResponse) -> ChatResponse:
    """The response with its first call only."""
    blocks, calls = [], 0
    for block in response.message.blocks:
        calls += isinstance(block, ToolCallBlock)
        if calls <= 1 or not isinstance(block, ToolCallBlock):
            blocks.append(block)
    response.message.blocks = blocks
    return response


def _definition(tool: BaseTool) -> dict[str, Any]:
    """OpenAI's form. LlamaIndex drops what a schema says of further arguments; functions refuse them."""
    definition = tool.metadata.to_openai_tool(skip_length_check=True)
    schema = tool.metadata.fn_schema
    takes_more = schema is not None and schema.model_config.get("extra") == "allow"
    definition["function"]["parameters"].setdefault("additionalProperties", takes_more)
    return definition


def _tool_choice(choice: str | Mapping[str, Any] | None, is_required: bool) -> str | Mapping[str, Any]:
    """OpenAI's form; a name of LlamaIndex's is that of a tool."""
    if choice is None:
        return "required" if is_required else "auto"
    if not isinstance(choice, str):
        return choice
    if choice == "any":
        return "required"
    return choice if choice in _MODES else {"type": "function", "function": {"name": choice}}


def _as_mapping(call: ToolCallBlock) -> dict[str, Any]:
    """While a call is being written its arguments are no JSON yet, and so none."""
    if not isinstance(call.tool_kwargs, str):
        return call.tool_kwargs
    try:
        arguments = json.loads(call.tool_kwargs)
    except ValueError:
        return {}
    return arguments if isinstance(arguments, dict) else {}
