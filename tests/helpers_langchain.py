"""A model that echoes what it is asked, and all the ways to ask it through LangChain."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from langchain_core._api import LangChainBetaWarning
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.prompts import ChatPromptTemplate

from helpers_models import EOS, VOCAB_SIZE, make_tokenizer
from langchain_paged import ChatPaged
from paged_backend import LLM, Backend, SamplingParams
from paged_backend.chat.tokenizer import Tokenizer
from paged_backend.sampling.sampler import SampledToken

FOREVER = "forever"
OTHER_SETTINGS: dict[str, Any] = {
    "temperature": 0.5,
    "max_tokens": 3,
    "min_tokens": 2,
    "stop": ["said"],
    "stop_token_ids": [7],
    "seed": 5,
    "n": 2,
    "top_p": 0.5,
    "top_k": 3,
    "min_p": 0.1,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "repetition_penalty": 1.5,
    "logit_bias": {5: 1.0},
    "bad_words": ["x"],
    "ignore_eos": False,
    "logprobs": True,
    "top_logprobs": 2,
    "structured_outputs": {"regex": "[a-z]+"},
    "thinking_token_budget": 5,
    "timeout": 60.0,
    "priority": 1,
    "cache_salt": "salt",
}
"""A value of each setting that all models have, other than its default."""
SAY = "Say: "
NUM_BLOCKS = 2048
DEADLINE_S = 20.0

ignores_beta_warnings = pytest.mark.filterwarnings(f"ignore::{LangChainBetaWarning.__module__}.LangChainBetaWarning")


class EchoModel:
    """Runner and sampler in one: answers `You said: <last user message>`, or for ever if it is asked for that, or just
    what it is asked to say. No grammar keeps it from that."""

    vocab_size = VOCAB_SIZE
    num_blocks = NUM_BLOCKS
    block_size = 16

    def __init__(self, step_seconds: float) -> None:
        self.seen: list[SamplingParams] = []
        self._step_seconds = step_seconds
        self._never = threading.Event()

    def execute(self, output: Any) -> None:
        self._never.wait(self._step_seconds)

    def rows(self, logits: Any, rows: list[int]) -> None:
        return None

    def sample(self, logits: Any, sequences: list[Any]) -> list[SampledToken]:
        return [self._next(sequence) for sequence in sequences]

    def prompt_logprobs(self, logits: Any, token_ids: list[int], num_logprobs: int) -> list[Any]:
        raise NotImplementedError

    def candidates(self, logits: Any, sequences: list[Any], nums: list[int]) -> list[Any]:
        raise NotImplementedError

    def _next(self, sequence: Any) -> SampledToken:
        request = sequence.request
        question = request.prompt.rpartition("user\n")[2].partition("<|im_end|>")[0]
        done = len(sequence.token_ids) - sequence.num_prompt_tokens
        if done == 0:
            self.seen.append(request.params)
        if question == FOREVER:
            return self._token(ord("na "[done % 3]), request.params)
        answer = (question.removeprefix(SAY) if question.startswith(SAY) else f"You said: {question}").encode()
        return self._token(answer[done] if done < len(answer) else EOS, request.params)

    def _token(self, token_id: int, params: SamplingParams) -> SampledToken:
        num_best = params.logprobs
        if num_best is None:
            return SampledToken(token_id, None)
        best = {other: (-1.0 - rank, rank) for rank, other in enumerate(range(num_best), start=1)}
        return SampledToken(token_id, best | {token_id: (-0.5, num_best + 1)})


def make_llm(
    *,
    step_seconds: float = 0.0,
    model: EchoModel | None = None,
    default_sampling: dict[str, Any] | None = None,
    **config: Any,
) -> LLM:
    model = model or EchoModel(step_seconds)
    backend = Backend(
        name="echo",
        runner=model,
        sampler=model,
        tokenizer=Tokenizer(make_tokenizer()),
        max_model_len=NUM_BLOCKS * 16,
        eos_token_ids=frozenset({EOS}),
        default_sampling=default_sampling or {},
    )
    return LLM.from_backend(backend, **config)


def num_finished(llm: LLM) -> int:
    return sum(llm.stats().finished.values())


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"


async def wait_until_async(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        await asyncio.sleep(0)


def within_deadline(awaitable: Awaitable[Any]) -> Any:
    return asyncio.wait_for(awaitable, DEADLINE_S)


def joined(chunks: Any) -> Any:
    chunks = list(chunks)
    return sum(chunks[1:], chunks[0])


async def ajoined(chunks: AsyncIterator[Any]) -> Any:
    return joined([chunk async for chunk in chunks])


async def last_event(model: ChatPaged) -> AIMessage:
    events = [event async for event in model.astream_events("Hello.", version="v2")]
    message = events[-1]["data"]["output"]
    assert isinstance(message, AIMessage)
    return message


async def v3_output(model: ChatPaged) -> AIMessage:
    stream = await model.astream_events("Hello.", version="v3")
    return await stream.output


async def first_of(messages: Awaitable[list[AIMessage]]) -> AIMessage:
    return (await messages)[0]


async def first_generation(model: ChatPaged) -> AIMessage:
    result = await model.agenerate([[HumanMessage("Hello.")]])
    message = result.generations[0][0].message
    assert isinstance(message, AIMessage)
    return message


SYNC_WAYS: dict[str, Callable[[ChatPaged], AIMessage]] = {
    "invoke": lambda model: model.invoke("Hello."),
    "streaming invoke": lambda model: model.model_copy(update={"streaming": True}).invoke("Hello.", stream=True),
    "stream": lambda model: joined(model.stream("Hello.")),
    "not streaming stream": lambda model: joined(model.stream("Hello.", stream=False)),
    "batch": lambda model: model.batch(["Hello."])[0],
    "batch_as_completed": lambda model: dict(model.batch_as_completed(["Hello.", "Hi."]))[0],
    "generate": lambda model: model.generate([[HumanMessage("Hello.")]]).generations[0][0].message,
    "prompt": lambda model: (ChatPromptTemplate.from_messages([("user", "{x}")]) | model).invoke({"x": "Hello."}),
    "with_config": lambda model: model.with_config(tags=["x"]).invoke("Hello."),
    "v3": lambda model: model.stream_events("Hello.", version="v3").output,
}
ASYNC_WAYS: dict[str, Callable[[ChatPaged], Awaitable[AIMessage]]] = {
    "ainvoke": lambda model: model.ainvoke("Hello."),
    "astream": lambda model: ajoined(model.astream("Hello.")),
    "abatch": lambda model: first_of(model.abatch(["Hello."])),
    "agenerate": first_generation,
    "astream_events": last_event,
    "async v3": v3_output,
}


def answers(model: ChatPaged) -> dict[str, AIMessage]:
    async def ask_all() -> dict[str, AIMessage]:
        return {way: await within_deadline(ask(model)) for way, ask in ASYNC_WAYS.items()}

    return {way: ask(model) for way, ask in SYNC_WAYS.items()} | asyncio.run(ask_all())
