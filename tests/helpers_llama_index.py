"""LlamaIndex's `Paged` on a model that answers what it is told to, and keeps what it was asked."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
)
from llama_index.core.llms import LLM as LlamaIndexLLM

from helpers import FakeRunner, StepFailure, make_llm
from helpers_models import EOS, VOCAB_SIZE, make_tokenizer
from llama_index.llms.paged import Paged
from paged_backend import LLM
from paged_backend.chat.tokenizer import Tokenizer

ANSWER = "Grün 🙂 is a colour."
LONG_ANSWER = "A colour. " * 25
DEADLINE_S = 20.0
TOKENIZER = make_tokenizer()


class Recorder(FakeRunner):
    """Keeps the prompts that the model got to see, as text. Each step takes `step_seconds`."""

    def __init__(self, step_seconds: float = 0.0) -> None:
        super().__init__(num_blocks=4096, vocab_size=VOCAB_SIZE)
        self.prompts: list[str] = []
        self.is_failing = False
        self._step_seconds = step_seconds
        self._never = threading.Event()
        self.on_step = self._on_step

    def _on_step(self, output: Any) -> None:
        self._never.wait(self._step_seconds)
        if self.is_failing:
            raise StepFailure("on purpose")
        for sequence, _, num_logits in output.scheduled:
            if sequence.num_output_tokens == 0 and num_logits:
                prompt = sequence.token_ids[: sequence.num_prompt_tokens]
                self.prompts.append(TOKENIZER.decode(prompt, skip_special_tokens=False))


def make_paged_llm(step_seconds: float = 0.0) -> tuple[LLM, Recorder]:
    runner = Recorder(step_seconds)
    llm = make_llm(
        runner=runner,
        tokenizer=Tokenizer(TOKENIZER),
        eos_token_ids={EOS},
        max_model_len=2048,
        max_num_batched_tokens=2048,
    )
    return llm, runner


class Script:
    """Answers that follow each other, one for each request, where `forced` wants the ids of one."""

    def __init__(self, *answers: str) -> None:
        self._answers = iter([[*answer.encode(), EOS] for answer in answers])
        self._current: list[int] = []

    def __getitem__(self, position: int) -> int:
        if position == 0:
            self._current = next(self._answers)
        return self._current[position]


def saying(text: str) -> dict[str, Any]:
    """The settings with which the fake model answers `text`."""
    return {"extra_args": {"forced": [*text.encode(), EOS]}}


FOREVER = {"extra_args": {"forced": list(b"na" * 900)}}


def make_paged(llm: LLM, text: str = ANSWER, **settings: Any) -> Paged:
    return Paged(llm=llm, **saying(text) | settings)


def rendered(*messages: tuple[str, str]) -> str:
    """The prompt of a conversation as the tests' chat template writes it."""
    turns = "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in messages)
    return f"{turns}<|im_start|>assistant\n"


def within_deadline(awaitable: Awaitable[Any]) -> Any:
    return asyncio.wait_for(awaitable, DEADLINE_S)


async def acollected(responses: Awaitable[AsyncIterator[Any]]) -> list[Any]:
    return [response async for response in await responses]


def in_loop(awaitable: Awaitable[Any]) -> Any:
    return asyncio.run(within_deadline(awaitable))


def as_messages(question: str) -> list[ChatMessage]:
    return [ChatMessage(role="user", content=question)]


def num_finished(llm: LLM) -> int:
    return sum(llm.stats().finished.values())


async def wait_until_async(condition: Callable[[], bool]) -> None:
    async def wait() -> None:
        while not condition():
            await asyncio.sleep(0)

    await within_deadline(wait())


# The endpoints: each asks one question and gives all its responses, of which the last is the whole answer.


async def alone(response: Awaitable[Any]) -> list[Any]:
    return [await response]


Endpoint = Callable[..., list[Any]]

WHOLE: dict[str, Endpoint] = {
    "chat": lambda model, question, **kwargs: [model.chat(as_messages(question), **kwargs)],
    "complete": lambda model, question, **kwargs: [model.complete(question, **kwargs)],
    "achat": lambda model, question, **kwargs: in_loop(alone(model.achat(as_messages(question), **kwargs))),
    "acomplete": lambda model, question, **kwargs: in_loop(alone(model.acomplete(question, **kwargs))),
}
STREAMS: dict[str, Endpoint] = {
    "stream_chat": lambda model, question, **kwargs: list(model.stream_chat(as_messages(question), **kwargs)),
    "stream_complete": lambda model, question, **kwargs: list(model.stream_complete(question, **kwargs)),
    "astream_chat": lambda model, question, **kwargs: in_loop(
        acollected(model.astream_chat(as_messages(question), **kwargs))
    ),
    "astream_complete": lambda model, question, **kwargs: in_loop(
        acollected(model.astream_complete(question, **kwargs))
    ),
}
ENDPOINTS = WHOLE | STREAMS

each_endpoint = pytest.mark.parametrize("endpoint", ENDPOINTS)
each_stream = pytest.mark.parametrize("endpoint", STREAMS)


def ask(model: LlamaIndexLLM, endpoint: str, question: str = "Name a colour.", **kwargs: Any) -> list[Any]:
    return ENDPOINTS[endpoint](model, question, **kwargs)


def text_of(response: Any) -> str:
    text = response.message.content if isinstance(response, ChatResponse) else response.text
    assert isinstance(text, str)
    return text
