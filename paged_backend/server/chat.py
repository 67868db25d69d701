"""`/v1/chat/completions`."""

from __future__ import annotations

import inspect
import time
import uuid
from collections import defaultdict
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from paged_backend import (
    LLM,
    CompletionOutput,
    InvalidRequestError,
    RequestHandle,
    RequestOutput,
    RequestOutputKind,
    ToolCall,
)
from paged_backend.server.calls import Calls
from paged_backend.server.logprobs import Spelling, chat_logprobs, positions_of, prompt_logprobs_reply
from paged_backend.server.protocol import ChatRequest
from paged_backend.server.sampling import chat_sampling, request_options
from paged_backend.server.serving import Serving
from paged_backend.server.streaming import Event, TextTemplate, outputs_of, result_of
from paged_backend.server.usage import Usage


async def answer(serving: Serving, body: ChatRequest) -> dict[str, Any]:
    """The answer as a whole; cancelling aborts it."""
    output = await result_of(await submit(serving, body), serving.metrics, tool_user(body, "chat_completions"))
    return _Reply(serving, body).whole(output)


async def stream_answer(serving: Serving, body: ChatRequest) -> AsyncGenerator[Event, None]:
    """The answer in events; what can be refused is refused before the first. Closing them aborts it."""
    handle = await submit(serving, body)
    return _Reply(serving, body).events(handle, serving)


async def submit(serving: Serving, body: ChatRequest) -> RequestHandle:
    """Queue a chat; raises what says why it cannot be served."""
    llm = serving.llm

    def prepare() -> RequestHandle:
        kind = RequestOutputKind.DELTA if body.stream else RequestOutputKind.FINAL_ONLY
        params = llm.get_default_chat_params(**chat_sampling(body), output_kind=kind)
        return llm.stream_chat(
            body.messages,
            params,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            chat_template_kwargs=checked_template_kwargs(llm, body.chat_template_kwargs),
            tools=body.tools,
            tool_choice=body.tool_choice,
            parallel_tool_calls=body.parallel_tool_calls,
            **request_options(body, serving),
        )

    return await serving.prepare(prepare)


def tool_user(body: ChatRequest, kind: str) -> str | None:
    """The kind of the request, if it may call tools."""
    return kind if body.tools else None


def checked_template_kwargs(llm: LLM, kwargs: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """What a client may hand to a template: variables, but not the settings of the function that renders it."""
    settings = inspect.signature(llm.get_tokenizer().apply_chat_template).parameters
    for name in kwargs or ():
        if name in settings:
            message = f"chat_template_kwargs={name!r} is no variable of a template; leave it out"
            raise InvalidRequestError(message, field="chat_template_kwargs")
    return kwargs


class _Reply:
    """Turns outputs into messages, or into the chunks of a stream."""

    def __init__(self, serving: Serving, body: ChatRequest) -> None:
        self._body = body
        model = serving.model_name(body.model)
        self._head = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}
        self._spelling = Spelling(serving.llm, as_ids=body.return_tokens_as_token_ids)
        self._calls: defaultdict[int, Calls] = defaultdict(Calls)
        """By choice."""
        self._text_chunks: dict[int, TextTemplate] = {}
        """By choice: how the chunks look that bring text and nothing else, as most do."""

    def whole(self, output: RequestOutput) -> dict[str, Any]:
        parts = sorted(output.outputs, key=lambda part: part.index)
        result = {
            "object": "chat.completion",
            **self._head,
            "choices": [{**self._choice(part), "message": self._message(part)} for part in parts],
            "usage": Usage.of([output]).reply(),
        }
        if self._body.return_token_ids:
            result["prompt_token_ids"] = output.prompt_token_ids
        if self._body.prompt_logprobs is not None:
            result["prompt_logprobs"] = prompt_logprobs_reply(positions_of(output.prompt_logprobs))
        return result

    async def events(self, handle: RequestHandle, serving: Serving) -> AsyncGenerator[Event, None]:
        usage = Usage()
        begun: set[int] = set()
        async for output in outputs_of(handle, serving.metrics, tool_user(self._body, "chat_completions")):
            usage.add(output)
            for part in output.outputs:
                if part.index not in begun:
                    begun.add(part.index)
                    yield self._first_chunk(part.index, output)
                if self._is_mere_text(part):
                    yield self._text_chunk(part)
                    continue
                choice = {**self._choice(part), "delta": self._delta(part)}
                if choice["delta"] or choice["logprobs"] or choice["finish_reason"] or choice.get("token_ids"):
                    yield self._chunk(choice)
        if self._body.includes_usage:
            yield {"object": "chat.completion.chunk", **self._head, "choices": [], "usage": usage.reply()}

    def _is_mere_text(self, part: CompletionOutput) -> bool:
        """Whether a piece brings text, and nothing else is to be said of it."""
        is_more = part.finish_reason or part.reasoning or part.tool_calls or part.invalid_tool_calls or part.logprobs
        return bool(part.text) and not is_more and not self._body.return_token_ids

    def _text_chunk(self, part: CompletionOutput) -> bytes:
        if part.index not in self._text_chunks:
            choice = self._choice(CompletionOutput(part.index))
            self._text_chunks[part.index] = TextTemplate(
                lambda text: self._chunk({**choice, "delta": {"content": text}})
            )
        return self._text_chunks[part.index].event(part.text)

    def _choice(self, part: CompletionOutput) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": part.index,
            "logprobs": self._logprobs(part),
            "finish_reason": self._finish_reason(part),
            "stop_reason": part.stop_reason,
        }
        if self._body.return_token_ids:
            choice["token_ids"] = part.token_ids
        return choice

    def _finish_reason(self, part: CompletionOutput) -> str | None:
        calls = self._calls[part.index]
        calls.add(part)
        return "tool_calls" if part.finish_reason == "stop" and calls else part.finish_reason

    def _message(self, part: CompletionOutput) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": part.text, "refusal": None}
        if part.reasoning is not None and self._body.include_reasoning:
            message["reasoning"] = part.reasoning
        if part.tool_calls:
            message |= {"content": part.text or None, "tool_calls": [_call(call) for call in part.tool_calls]}
        return message

    def _delta(self, part: CompletionOutput) -> dict[str, Any]:
        """What is new, and nothing else. A call's id and name come with its first piece."""
        delta: dict[str, Any] = {"content": part.text} if part.text else {}
        if part.reasoning and self._body.include_reasoning:
            delta["reasoning"] = part.reasoning
        if part.tool_calls:
            delta["tool_calls"] = [{"index": call.index, **_call(call)} for call in part.tool_calls]
        return delta

    def _logprobs(self, part: CompletionOutput) -> dict[str, Any] | None:
        if not self._body.logprobs or (self._body.stream and not part.logprobs):
            return None
        return chat_logprobs(positions_of(part.logprobs), self._body.top_logprobs or 0, self._spelling)

    def _first_chunk(self, index: int, output: RequestOutput) -> dict[str, Any]:
        delta = {"role": "assistant", "content": ""}
        chunk = self._chunk({"index": index, "delta": delta, "logprobs": None, "finish_reason": None})
        if self._body.return_token_ids:
            chunk["prompt_token_ids"] = output.prompt_token_ids
        return chunk

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        optional = {"usage": None} if self._body.includes_usage else {}
        return {"object": "chat.completion.chunk", **self._head, "choices": [choice], **optional}


def _call(call: ToolCall) -> dict[str, Any]:
    """A call, or a piece of one."""
    if call.name is None:
        return {"function": {"arguments": call.arguments}}
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
