"""`/v1/completions`."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from paged_backend import LLM, CompletionOutput, RequestHandle, RequestOutput, RequestOutputKind
from paged_backend.server.logprobs import CompletionLogprobs, Spelling, positions_of, prompt_logprobs_reply
from paged_backend.server.protocol import CompletionRequest, prompts_of
from paged_backend.server.sampling import completion_sampling, request_options
from paged_backend.server.serving import Serving
from paged_backend.server.streaming import Event, TextTemplate, merged, outputs_of, result_of
from paged_backend.server.usage import Usage


async def complete(serving: Serving, body: CompletionRequest) -> dict[str, Any]:
    """The answer as a whole; cancelling aborts it."""
    handles, reply = await _submit(serving, body)
    try:
        outputs = [await result_of(handle, serving.metrics) for handle in handles]
    finally:
        for handle in handles:
            handle.abort()
    choices = [
        reply.choice(index, output, part)
        for index, output in enumerate(outputs)
        for part in sorted(output.outputs, key=lambda part: part.index)
    ]
    return {**reply.head(), "choices": choices, "usage": Usage.of(outputs).reply()}


async def stream_completion(serving: Serving, body: CompletionRequest) -> AsyncGenerator[Event, None]:
    """The answer in events; what can be refused is refused before the first. Closing them aborts it."""
    handles, reply = await _submit(serving, body)
    return reply.events(handles, serving)


async def _submit(serving: Serving, body: CompletionRequest) -> tuple[list[RequestHandle], _Reply]:
    llm = serving.llm

    def prepare() -> tuple[list[RequestHandle], _Reply]:
        kind = RequestOutputKind.DELTA if body.stream else RequestOutputKind.FINAL_ONLY
        params = llm.get_default_sampling_params(**completion_sampling(body), output_kind=kind)
        prompts = prompts_of(body.prompt)
        echoes = [_text(llm, prompt) for prompt in prompts] if body.echo else [""] * len(prompts)
        options = request_options(body, serving)
        return llm.submit_all(prompts, params, **options), _Reply(llm, body, serving.model_name(body.model), echoes)

    return await serving.prepare(prepare)


def _text(llm: LLM, prompt: str | list[int]) -> str:
    return prompt if isinstance(prompt, str) else llm.tokenizer.decode(prompt, skip_special_tokens=False)


class _Reply:
    """Turns outputs into choices; sample `i` of prompt `p` is choice `p * n + i`."""

    def __init__(self, llm: LLM, body: CompletionRequest, model: str, echoes: list[str]) -> None:
        self._body = body
        self._echoes = echoes
        self._head = {"id": f"cmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}
        self._spelling = Spelling(llm, as_ids=body.return_tokens_as_token_ids)
        self._logprobs: dict[int, CompletionLogprobs] = {}
        self._is_begun: set[int] = set()
        self._prompt_logprobs: dict[int, list[Any]] = {}
        """By prompt; a stream tells them once, however many samples echo them."""
        self._text_chunks: dict[int, TextTemplate] = {}
        """By choice: how the chunks look that bring text and nothing else, as most do."""

    def head(self) -> dict[str, Any]:
        return {"object": "text_completion", **self._head}

    def choice(self, prompt_index: int, output: RequestOutput, part: CompletionOutput) -> dict[str, Any]:
        """A choice, or the part of it that is new; the first part has what is told once: the echo, the prompt's ids."""
        body, index = self._body, prompt_index * self._body.n + part.index
        is_first = index not in self._is_begun
        self._is_begun.add(index)
        is_echo = body.echo and is_first
        if output.prompt_logprobs is not None:
            self._prompt_logprobs[prompt_index] = positions_of(output.prompt_logprobs)
        choice: dict[str, Any] = {
            "index": index,
            "text": (self._echoes[prompt_index] if is_echo else "") + part.text,
            "logprobs": None if body.logprobs is None else self._choice_logprobs(prompt_index, output, part, is_echo),
            "finish_reason": part.finish_reason,
            "stop_reason": part.stop_reason,
        }
        if body.return_token_ids:
            choice["token_ids"] = part.token_ids
            choice["prompt_token_ids"] = output.prompt_token_ids if is_first else None
        if body.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs_reply(self._prompt_logprobs[prompt_index])
        return choice

    def _choice_logprobs(
        self, prompt_index: int, output: RequestOutput, part: CompletionOutput, is_echo: bool
    ) -> dict[str, Any]:
        index = prompt_index * self._body.n + part.index
        token_ids, positions = list(part.token_ids), positions_of(part.logprobs)
        if is_echo:
            token_ids = output.prompt_token_ids + token_ids
            positions = self._prompt_logprobs[prompt_index] + positions
        if index not in self._logprobs:
            assert self._body.logprobs is not None
            self._logprobs[index] = CompletionLogprobs(self._body.logprobs, self._spelling)
        return self._logprobs[index].add(token_ids, positions)

    def _is_mere_text(self, prompt_index: int, part: CompletionOutput) -> bool:
        """Whether a piece brings text, and nothing else is to be said of it."""
        body = self._body
        is_plain = body.logprobs is None and body.prompt_logprobs is None and not body.return_token_ids
        is_begun = prompt_index * body.n + part.index in self._is_begun
        return is_plain and is_begun and bool(part.text) and not part.finish_reason

    def _text_chunk(self, prompt_index: int, part: CompletionOutput, optional: Mapping[str, Any]) -> bytes:
        index = prompt_index * self._body.n + part.index
        if index not in self._text_chunks:
            reasons = {"logprobs": None, "finish_reason": None, "stop_reason": None}
            self._text_chunks[index] = TextTemplate(
                lambda text: {**self.head(), "choices": [{"index": index, "text": text, **reasons}], **optional}
            )
        return self._text_chunks[index].event(part.text)

    async def events(self, handles: list[RequestHandle], serving: Serving) -> AsyncGenerator[Event, None]:
        usage = Usage()
        optional = {"usage": None} if self._body.includes_usage else {}
        streams = [outputs_of(handle, serving.metrics) for handle in handles]
        async for prompt_index, output in merged(streams):
            usage.add(output)
            for part in output.outputs:
                if self._is_mere_text(prompt_index, part):
                    yield self._text_chunk(prompt_index, part, optional)
                    continue
                choice = self.choice(prompt_index, output, part)
                if choice["text"] or choice["logprobs"] or choice["finish_reason"] or choice.get("token_ids"):
                    yield {**self.head(), "choices": [choice], **optional}
        if self._body.includes_usage:
            yield {**self.head(), "choices": [], "usage": usage.reply()}
