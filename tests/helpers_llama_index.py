"""LlamaIndex's `Paged` on a model that answers what it is told to, and keeps what it was asked."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable
from typing import Any

from llama_index.core.base.llms.types import ChatMessage

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
