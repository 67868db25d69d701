"""The engine's outputs as LangChain's results and chunks."""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Generic, Protocol, Self, TypeVar

from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_core.messages.ai import InputTokenDetails, UsageMetadata
from langchain_core.outputs import (
    ChatGeneration,
    ChatGenerationChunk,
    ChatResult,
    Generation,
    GenerationChunk,
    LLMResult,
)

from langchain_paged.tools import CallPieces, calls_of
from paged_backend import AsyncStream, CompletionOutput, Logprob, RequestOutput

Chunk = TypeVar("Chunk")
Chunk_co = TypeVar("Chunk_co", covariant=True)


def chat_result(output: RequestOutput, model_name: str, *, num_top_logprobs: int) -> ChatResult:
    """All answers to one conversation; each has the usage of the whole request."""
    usage = _usage(output, output.num_output_tokens)
    generations = [
        ChatGeneration(
            message=_message(answer, usage),
            generation_info=_logprobs(answer, num_top_logprobs) | _ending(answer, model_name),
        )
        for answer in output.outputs
    ]
    return ChatResult(generations=generations)


def llm_result(outputs: Sequence[RequestOutput], model_name: str, *, num_top_logprobs: int) -> LLMResult:
    """All texts of each prompt; `llm_output` has the tokens of all prompts together."""
    generations = [
        [
            Generation(
                text=answer.text,
                generation_info=_logprobs(answer, num_top_logprobs) | _ending(answer, model_name),
            )
            for answer in output.outputs
        ]
        for output in outputs
    ]
    return LLMResult(
        generations=generations, llm_output={"token_usage": _token_usage(outputs), "model_name": model_name}
    )


def _message(answer: CompletionOutput, usage: UsageMetadata) -> AIMessage:
    tool_calls, invalid_tool_calls = calls_of(answer)
    return AIMessage(
        content=answer.text,
        additional_kwargs=_reasoning(answer),
        tool_calls=tool_calls,
        invalid_tool_calls=invalid_tool_calls,
        usage_metadata=usage,
    )


def _reasoning(answer: CompletionOutput) -> dict[str, Any]:
    """Where LangChain looks for reasoning that it makes content blocks of."""
    return {} if answer.reasoning is None else {"reasoning_content": answer.reasoning}


class TextChunkWriter:
    """Turns a stream's outputs into chunks; the last one says why the text ended and what it took."""

    def __init__(self, model_name: str, *, num_top_logprobs: int) -> None:
        self._model_name = model_name
        self._num_top_logprobs = num_top_logprobs
        self._num_output_tokens = 0

    def write(self, output: RequestOutput) -> list[GenerationChunk]:
        """None at all if the output has nothing to show, such as half a character."""
        self._num_output_tokens += output.num_output_tokens
        (news,) = output.outputs
        details = _logprobs(news, self._num_top_logprobs)
        if output.finished:
            details |= _ending(news, self._model_name)
            details["usage_metadata"] = _usage(output, self._num_output_tokens)
        if not news.text and not details:
            return []
        return [GenerationChunk(text=news.text, generation_info=details or None)]


class MessageChunkWriter:
    """Turns a stream's outputs into chunks; the last one says why the answer ended and what it took."""

    def __init__(self, model_name: str, *, num_top_logprobs: int, with_usage: bool, as_blocks: bool) -> None:
        self._model_name = model_name
        self._num_top_logprobs = num_top_logprobs
        self._with_usage = with_usage
        self._num_output_tokens = 0
        self._calls = CallPieces(as_blocks=as_blocks)

    def write(self, output: RequestOutput) -> list[ChatGenerationChunk]:
        """None at all if the output has nothing to show, such as half a character."""
        self._num_output_tokens += output.num_output_tokens
        (news,) = output.outputs
        chunks = self._news(news)
        if output.finished:
            chunks.append(self._last(output, news))
        return chunks

    def _news(self, news: CompletionOutput) -> list[ChatGenerationChunk]:
        details = _logprobs(news, self._num_top_logprobs)
        reasoning, calls = _reasoning(news), self._calls.of(news)
        if not (news.text or details or reasoning or calls):
            return []
        message = AIMessageChunk(content=news.text, additional_kwargs=reasoning, tool_call_chunks=calls)
        return [ChatGenerationChunk(message=message, generation_info=details or None)]

    def _last(self, output: RequestOutput, news: CompletionOutput) -> ChatGenerationChunk:
        """A chunk of its own: in a last one, LangChain takes pieces of calls for whole ones."""
        usage = _usage(output, self._num_output_tokens) if self._with_usage else None
        message = AIMessageChunk(content="", usage_metadata=usage, chunk_position="last")
        return ChatGenerationChunk(message=message, generation_info=_ending(news, self._model_name))


class _Writer(Protocol[Chunk_co]):
    def write(self, output: RequestOutput) -> Sequence[Chunk_co]: ...


class AsyncChunks(Generic[Chunk]):
    """The chunks of one answer, for an event loop.

    Dropping it aborts the request at once. An async generator would do so some turns of the loop later, or never if
    the loop ends first.
    """

    def __init__(
        self,
        start: Callable[[], Awaitable[AsyncStream]],
        writer: _Writer[Chunk],
        report: Callable[[Chunk], Awaitable[None]] | None = None,
    ) -> None:
        self._start = start
        self._writer = writer
        self._report = report
        self._stream: AsyncStream | None = None
        self._chunks: deque[Chunk] = deque()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Chunk:
        if self._stream is None:
            self._stream = await self._start()
        while not self._chunks:
            self._chunks.extend(self._writer.write(await anext(self._stream)))
        chunk = self._chunks.popleft()
        if self._report is not None:
            await self._report(chunk)
        return chunk

    async def aclose(self) -> None:
        if self._stream is not None:
            await self._stream.aclose()


def _usage(output: RequestOutput, num_output_tokens: int) -> UsageMetadata:
    num_input_tokens = len(output.prompt_token_ids)
    return UsageMetadata(
        input_tokens=num_input_tokens,
        output_tokens=num_output_tokens,
        total_tokens=num_input_tokens + num_output_tokens,
        input_token_details=InputTokenDetails(cache_read=output.num_cached_tokens),
    )


def _token_usage(outputs: Sequence[RequestOutput]) -> dict[str, int]:
    """The tokens of all prompts and texts, in OpenAI's words."""
    num_prompt = sum(len(output.prompt_token_ids) for output in outputs)
    num_output = sum(output.num_output_tokens for output in outputs)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
        "cached_tokens": sum(output.num_cached_tokens for output in outputs),
    }


def _ending(answer: CompletionOutput, model_name: str) -> dict[str, Any]:
    ending: dict[str, Any] = {
        "finish_reason": answer.finish_reason,
        "model_name": model_name,
        "model_provider": "paged",
    }
    return ending if answer.stop_reason is None else ending | {"stop_reason": answer.stop_reason}


def _logprobs(answer: CompletionOutput, num_top: int) -> dict[str, Any]:
    """OpenAI's form; nothing if they were not asked for."""
    if answer.logprobs is None:
        return {}
    tokens = zip(answer.token_ids, answer.logprobs, strict=True)
    return {"logprobs": {"content": [_position(token_id, logprobs, num_top) for token_id, logprobs in tokens]}}


def _position(token_id: int, logprobs: Mapping[int, Logprob], num_top: int) -> dict[str, Any]:
    best = sorted((logprob for logprob in logprobs.values() if logprob.rank <= num_top), key=lambda best: best.rank)
    return _token(logprobs[token_id]) | {"top_logprobs": [_token(logprob) for logprob in best]}


def _token(logprob: Logprob) -> dict[str, Any]:
    text = logprob.decoded_token or ""
    is_whole = "\ufffd" not in text  # half a character is not to be had as bytes
    return {"token": text, "logprob": logprob.logprob, "bytes": list(text.encode()) if is_whole else None}
