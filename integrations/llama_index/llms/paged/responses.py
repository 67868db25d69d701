"""The engine's outputs as LlamaIndex's responses, whole or growing."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator
from types import TracebackType
from typing import Any, Protocol, TypeVar

from llama_index.core.base.llms.types import ChatMessage, ChatResponse, CompletionResponse, MessageRole

from llama_index.llms.paged.answer import Answer
from paged_backend import AsyncStream, RequestHandle, RequestOutput

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Form(Protocol[T_co]):
    """How an answer is shown: as `chat_response` or `completion_response`."""

    def __call__(self, answer: Answer, *, is_delta: bool) -> T_co: ...


def chat_response(answer: Answer, *, is_delta: bool) -> ChatResponse:
    return ChatResponse(
        message=ChatMessage(role=MessageRole.ASSISTANT, blocks=answer.blocks),
        delta=answer.delta if is_delta else None,
        raw=answer.raw,
        logprobs=answer.logprobs,
        additional_kwargs=_reasoning(answer, is_delta),
    )


def completion_response(answer: Answer, *, is_delta: bool) -> CompletionResponse:
    return CompletionResponse(
        text=answer.text,
        delta=answer.delta if is_delta else None,
        raw=answer.raw,
        logprobs=answer.logprobs,
        additional_kwargs=_reasoning(answer, is_delta),
    )


def whole(output: RequestOutput, model_name: str, form: Form[T]) -> T:
    answer = Answer(model_name)
    answer.add(output)
    return form(answer, is_delta=False)


def growing(handle: RequestHandle, model_name: str, form: Form[T]) -> Generator[T, None, None]:
    """Closing or dropping it aborts the request."""
    answer = Answer(model_name)
    with handle:
        for output in handle:
            if answer.add(output):
                yield form(answer, is_delta=True)


class AsyncResponses(AsyncGenerator[T, None]):
    """`growing` for an event loop.

    Dropping it aborts the request at once. A real async generator would do so some turns of the loop later, or never if
    the loop ends first; and LlamaIndex's callbacks drop the generators they wrap without closing them.
    """

    def __init__(self, stream: AsyncStream, model_name: str, form: Form[T]) -> None:
        self._stream = stream
        self._answer = Answer(model_name)
        self._form = form

    async def asend(self, value: None) -> T:
        while True:
            if self._answer.add(await anext(self._stream)):
                return self._form(self._answer, is_delta=True)

    async def athrow(
        self,
        kind: type[BaseException] | BaseException,
        error: BaseException | object = None,
        trace: TracebackType | None = None,
    ) -> T:
        await self.aclose()
        raise kind

    async def aclose(self) -> None:
        await self._stream.aclose()


def _reasoning(answer: Answer, is_delta: bool) -> dict[str, Any]:
    """Where agents look for the reasoning that has just come."""
    return {"thinking_delta": answer.reasoning_delta} if is_delta and answer.reasoning_delta else {}
