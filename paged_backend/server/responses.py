"""`/v1/responses`: a chat whose outputs become items. Nothing is stored."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator
from typing import Any

from paged_backend import CompletionOutput, RequestOutput
from paged_backend.server.chat import submit, tool_user
from paged_backend.server.logprobs import Spelling, chat_logprobs, positions_of
from paged_backend.server.response_items import ResponseItems
from paged_backend.server.responses_input import as_chat
from paged_backend.server.responses_protocol import ResponsesRequest
from paged_backend.server.serving import Serving
from paged_backend.server.streaming import Event, outputs_of, result_of


async def respond(serving: Serving, body: ResponsesRequest) -> dict[str, Any]:
    """The response as a whole; cancelling aborts it."""
    chat = as_chat(body)
    output = await result_of(await submit(serving, chat), serving.metrics, tool_user(chat, "responses"))
    reply = _Reply(serving, body)
    reply.add(output)
    reply.end()
    return await reply.done()


async def stream_response(serving: Serving, body: ResponsesRequest) -> AsyncGenerator[Event, None]:
    """The response in events; what can be refused is refused before the first. Closing them aborts it."""
    chat = as_chat(body)
    outputs = outputs_of(await submit(serving, chat), serving.metrics, tool_user(chat, "responses"))
    return _events(outputs, _Reply(serving, body))


async def _events(outputs: AsyncGenerator[RequestOutput, None], reply: _Reply) -> AsyncGenerator[Event, None]:
    has_begun = False
    async for output in outputs:
        if not has_begun:
            has_begun = True
            yield {"type": "response.created", "response": reply.unfinished()}
            yield {"type": "response.in_progress", "response": reply.unfinished()}
        for event in reply.add(output):
            yield event
    for event in reply.end():
        yield event
    response = await reply.done()
    yield {"type": f"response.{response['status']}", "response": response}


class _Reply:
    """The response object, from before its first output to its end."""

    def __init__(self, serving: Serving, body: ResponsesRequest) -> None:
        self._items = ResponseItems(shows_reasoning=body.include_reasoning)
        self._serving, self._body = serving, body
        self._spelling = Spelling(serving.llm, as_ids=False)
        self._head = {"id": f"resp_{uuid.uuid4().hex}", "object": "response", "created_at": int(time.time())}
        self._last: RequestOutput | None = None
        self._num_tokens = 0
        self._finish_reason: str | None = None

    def add(self, output: RequestOutput) -> list[Event]:
        (part,) = output.outputs
        self._last, self._finish_reason = output, part.finish_reason
        self._num_tokens += len(part.token_ids)
        return list(self._items.add(part, self._logprobs(part)))

    def end(self) -> list[Event]:
        return list(self._items.end(is_cut=self._is_cut))

    @property
    def _is_cut(self) -> bool:
        return self._finish_reason == "length"

    def unfinished(self) -> dict[str, Any]:
        return self._response("in_progress")

    async def done(self) -> dict[str, Any]:
        return {
            **self._response("incomplete" if self._is_cut else "completed"),
            "completed_at": None if self._is_cut else int(time.time()),
            "incomplete_details": {"reason": "max_output_tokens"} if self._is_cut else None,
            "output": self._items.output,
            "usage": await self._usage(),
        }

    async def _usage(self) -> dict[str, Any]:
        assert self._last is not None
        num_input = len(self._last.prompt_token_ids)
        reasoning, tokenizer = self._items.reasoning, self._serving.llm.tokenizer
        encode = self._serving.prepare(tokenizer.encode, reasoning, add_special_tokens=False) if reasoning else None
        return {
            "input_tokens": num_input,
            "input_tokens_details": {"cached_tokens": self._last.num_cached_tokens, "cache_write_tokens": 0},
            "output_tokens": self._num_tokens,
            "output_tokens_details": {"reasoning_tokens": 0 if encode is None else len(await encode)},
            "total_tokens": num_input + self._num_tokens,
        }

    def _logprobs(self, part: CompletionOutput) -> list[Any]:
        if not self._body.wants_logprobs:
            return []
        entries = chat_logprobs(positions_of(part.logprobs), self._body.top_logprobs or 0, self._spelling)
        return list(entries["content"])

    def _response(self, status: str) -> dict[str, Any]:
        body = self._body
        given = body.given()
        text = given.get("text") or {}
        return {
            **self._head,
            "status": status,
            "completed_at": None,
            "error": None,
            "incomplete_details": None,
            "model": self._serving.model_name(body.model),
            "output": [],
            "usage": None,
            "background": False,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "service_tier": "default",
            "store": False,
            "temperature": body.temperature,
            "text": {"format": {"type": "text"}, **text},
            "tool_choice": given.get("tool_choice", "auto"),
            "tools": [{"parameters": None, "strict": None, **tool} for tool in given.get("tools", ())],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": body.top_p,
            "truncation": "disabled",
            "user": body.user,
        }
