"""Anthropic's `/v1/messages`: translated into a chat, whose outputs become blocks."""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncGenerator, Iterator, Mapping
from typing import Any

from paged_backend import CompletionOutput, InvalidRequestError, RequestOutput, ToolCall
from paged_backend.server.calls import Calls
from paged_backend.server.chat import submit, tool_user
from paged_backend.server.protocol import (
    AnthropicMessage,
    AnthropicTool,
    ChatRequest,
    CountTokensRequest,
    MessagesRequest,
)
from paged_backend.server.serving import Serving
from paged_backend.server.streaming import Event, outputs_of, result_of

_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_STOP_REASONS = {"length": "max_tokens", "abort": "end_turn", "repetition": "end_turn"}
Block = dict[str, Any]


async def message(serving: Serving, body: MessagesRequest) -> dict[str, Any]:
    """The answer as a whole; cancelling aborts it."""
    chat = as_chat(body)
    output = await result_of(await submit(serving, chat), serving.metrics, tool_user(chat, "other"))
    part = output.outputs[0]
    thought = part.reasoning if _shows_thinking(body) else None
    content = [{"type": "thinking", "thinking": thought, "signature": ""}] if thought else []
    content += [{"type": "text", "text": part.text}] if part.text else []
    content += [_tool_use(call, json.loads(call.arguments)) for call in part.tool_calls]
    return {
        **_head(serving, body),
        "content": content,
        **_stop(part, has_called=bool(part.tool_calls)),
        "usage": _usage(output, output.num_output_tokens),
    }


async def stream_message(serving: Serving, body: MessagesRequest) -> AsyncGenerator[Event, None]:
    """The answer in events; what can be refused is refused before the first. Closing them aborts it."""
    chat = as_chat(body)
    outputs = outputs_of(await submit(serving, chat), serving.metrics, tool_user(chat, "other"))
    return _events(outputs, _head(serving, body), _Blocks(shows_thinking=_shows_thinking(body)))


async def count_tokens(serving: Serving, body: CountTokensRequest) -> dict[str, int]:
    """How long the prompt of such a message is."""
    wish = as_chat(MessagesRequest(**body.given(), max_tokens=1))
    token_ids = await serving.prepare(
        serving.llm.encode_chat,
        wish.messages,
        tools=wish.tools,
        tool_choice=wish.tool_choice,
        add_generation_prompt=wish.add_generation_prompt,
        continue_final_message=wish.continue_final_message,
    )
    return {"input_tokens": len(token_ids)}


async def _events(
    outputs: AsyncGenerator[RequestOutput, None], head: dict[str, Any], blocks: _Blocks
) -> AsyncGenerator[Event, None]:
    num_tokens = 0
    async for output in outputs:
        if num_tokens == 0:
            start = {**head, "content": [], "stop_reason": None, "stop_sequence": None, "usage": _usage(output, 0)}
            yield {"type": "message_start", "message": start}
        num_tokens += output.num_output_tokens
        (part,) = output.outputs
        for event in blocks.add(part):
            yield event
        if part.finished():
            for event in blocks.end():
                yield event
            delta = _stop(part, has_called=bool(blocks.calls))
            yield {"type": "message_delta", "delta": delta, "usage": _usage(output, num_tokens)}
    yield {"type": "message_stop"}


class _Blocks:
    """The blocks of a stream, one open at a time: reasoning, then text, then each call."""

    def __init__(self, *, shows_thinking: bool) -> None:
        self.calls = Calls()
        self._shows_thinking = shows_thinking
        self._num_begun = 0
        self._open: object = None

    def add(self, part: CompletionOutput) -> Iterator[Event]:
        self.calls.add(part)
        if part.reasoning and self._shows_thinking:
            yield from self._switch("thinking", {"type": "thinking", "thinking": "", "signature": ""})
            yield self._delta({"type": "thinking_delta", "thinking": part.reasoning})
        if part.text:
            yield from self._switch("text", {"type": "text", "text": ""})
            yield self._delta({"type": "text_delta", "text": part.text})
        for call in part.tool_calls:
            yield from self._switch(("call", call.index), _tool_use(call, {}))
            yield self._delta({"type": "input_json_delta", "partial_json": call.arguments})

    def end(self) -> Iterator[Event]:
        if self._open is not None:
            yield {"type": "content_block_stop", "index": self._num_begun - 1}
            self._open = None

    def _switch(self, kind: object, block: Block) -> Iterator[Event]:
        if self._open != kind:
            yield from self.end()
            yield {"type": "content_block_start", "index": self._num_begun, "content_block": block}
            self._num_begun += 1
            self._open = kind

    def _delta(self, delta: Mapping[str, Any]) -> Event:
        return {"type": "content_block_delta", "index": self._num_begun - 1, "delta": delta}


def as_chat(body: MessagesRequest) -> ChatRequest:
    """The same wish in OpenAI's words. Raises InvalidRequestError for blocks that a model of text cannot be given."""
    fields: dict[str, Any] = {
        "model": body.model,
        "messages": [*_system(body), *(part for each in body.messages for part in _messages(each))],
        "max_tokens": body.max_tokens,
        "stream": body.stream,
        "stop": body.stop_sequences,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "top_k": body.top_k,
        "tools": None if body.tools is None else [_tool(tool) for tool in body.tools],
    }
    if (choice := body.tool_choice) is not None:
        named = {"type": "function", "function": {"name": choice.name}}
        fields["tool_choice"] = named if choice.type == "tool" else _CHOICES[choice.type]
        fields["parallel_tool_calls"] = not choice.disable_parallel_tool_use
    if body.output_config is not None and (form := body.output_config.format) is not None:
        schema = {"name": "output", "schema": form.schema_}
        fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    if body.thinking is not None and body.thinking.type == "enabled":
        fields["thinking_token_budget"] = body.thinking.budget_tokens
    if body.messages[-1].role == "assistant":
        fields |= {"continue_final_message": True, "add_generation_prompt": False}
    return ChatRequest(**fields)


def _shows_thinking(body: MessagesRequest) -> bool:
    return body.thinking is None or (body.thinking.type != "disabled" and body.thinking.display != "omitted")


def _system(body: MessagesRequest) -> Iterator[dict[str, Any]]:
    if body.system:
        yield {"role": "system", "content": _text(body.system, "system", "it")}


def _messages(message: AnthropicMessage) -> Iterator[dict[str, Any]]:
    """Results of tools are messages of their own, before what the user says to them."""
    if isinstance(message.content, str):
        yield {"role": message.role, "content": message.content}
        return
    results = [block for block in message.content if block.get("type") == "tool_result"]
    for block in results:
        content = block.get("content")
        text = "" if content is None else _text(content, "messages", "a tool_result")
        yield {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": text}
    calls = [_call(block) for block in message.content if block.get("type") == "tool_use"]
    thoughts = [str(block.get("thinking", "")) for block in message.content if block.get("type") == "thinking"]
    others = [block for block in message.content if block.get("type") not in ("tool_result", "tool_use", "thinking")]
    if others or calls or not results:
        optional: dict[str, Any] = {"tool_calls": calls} if calls else {}
        optional |= {"reasoning": "".join(thoughts)} if thoughts else {}
        yield {"role": message.role, "content": _text(others, "messages", "a message"), **optional}


def _text(content: object, field: str, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        message = f"{field}: {where} has content={content!r}; give a string or a list of blocks"
        raise InvalidRequestError(message, field=field)
    for block in content:
        if not isinstance(block, dict) or block.get("type") != "text" or not isinstance(block.get("text"), str):
            kind = block.get("type") if isinstance(block, dict) else type(block).__name__
            message = f"{field}: {where} holds a block of type {kind!r}; this server reads text only"
            raise InvalidRequestError(message, field=field)
    return "".join(block["text"] for block in content)


def _call(block: Block) -> dict[str, Any]:
    function = {"name": block.get("name"), "arguments": block.get("input") or {}}
    return {"id": block.get("id"), "type": "function", "function": function}


def _tool(tool: AnthropicTool) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
    return {"type": "function", "function": {**function, "strict": tool.strict}}


def _tool_use(call: ToolCall, arguments: Any) -> Block:
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": arguments}


def _head(serving: Serving, body: MessagesRequest) -> dict[str, Any]:
    model = serving.model_name(body.model)
    return {"id": f"msg_{uuid.uuid4().hex}", "type": "message", "role": "assistant", "model": model}


def _stop(part: CompletionOutput, *, has_called: bool) -> dict[str, Any]:
    sequence = part.stop_reason if isinstance(part.stop_reason, str) else None
    reason = _STOP_REASONS.get(part.finish_reason or "", "end_turn")
    if sequence is not None:
        reason = "stop_sequence"
    elif has_called and part.finish_reason == "stop":
        reason = "tool_use"
    return {"stop_reason": reason, "stop_sequence": sequence}


def _usage(output: RequestOutput, num_output_tokens: int) -> dict[str, int]:
    return {
        "input_tokens": len(output.prompt_token_ids) - output.num_cached_tokens,
        "cache_read_input_tokens": output.num_cached_tokens,
        "cache_creation_input_tokens": 0,
        "output_tokens": num_output_tokens,
    }
