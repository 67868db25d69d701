"""Calls that end early, and many calls in one engine."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from helpers import is_given_up, is_idle, num_ended, wait_until
from helpers_llama_index import (
    ANSWER,
    FOREVER,
    LONG_ANSWER,
    acollected,
    as_messages,
    in_loop,
    make_paged,
    text_of,
    wait_until_async,
    within_deadline,
)
from helpers_models import EOS
from llama_index.llms.paged import Paged
from paged_backend import LLM

# Ends before the end.


def start_stream(model: Paged, endpoint: str) -> Any:
    return model.stream_chat(as_messages("Sing.")) if endpoint == "stream_chat" else model.stream_complete("Sing.")


async def astart_stream(model: Paged, endpoint: str) -> Any:
    if endpoint == "astream_chat":
        return await model.astream_chat(as_messages("Sing."))
    return await model.astream_complete("Sing.")


@pytest.mark.parametrize("endpoint", ["stream_chat", "stream_complete"])
@pytest.mark.parametrize("has_begun", [True, False])
def test_closing_or_dropping_a_stream_frees_its_blocks(slow_llm: LLM, endpoint: str, has_begun: bool) -> None:
    model = Paged(llm=slow_llm, **FOREVER)
    for leave in (lambda stream: stream.close(), lambda stream: None):
        stream = start_stream(model, endpoint)
        if has_begun:
            next(stream)
        leave(stream)
        del stream
        wait_until(lambda: is_given_up(slow_llm.stats()))


@pytest.mark.parametrize("endpoint", ["astream_chat", "astream_complete"])
async def test_closing_an_async_stream_aborts_before_anything_else_runs(slow_llm: LLM, endpoint: str) -> None:
    stream = await astart_stream(Paged(llm=slow_llm, **FOREVER), endpoint)
    await anext(stream)
    closing = stream.aclose()
    with pytest.raises(StopIteration):
        closing.send(None)
    wait_until(lambda: is_given_up(slow_llm.stats()))  # without another turn of the loop


@pytest.mark.parametrize("endpoint", ["astream_chat", "astream_complete"])
async def test_leaving_an_async_stream_frees_its_blocks_within_a_few_turns_of_the_loop(
    slow_llm: LLM, endpoint: str
) -> None:
    async for response in await astart_stream(Paged(llm=slow_llm, **FOREVER), endpoint):
        assert response.delta
        break
    for _ in range(3):
        await asyncio.sleep(0)
    wait_until(lambda: is_given_up(slow_llm.stats()))


def test_an_event_loop_that_ends_within_a_stream_frees_its_blocks(slow_llm: LLM) -> None:
    async def begin() -> None:
        stream = await Paged(llm=slow_llm, **FOREVER).astream_complete("Sing.")
        await anext(stream)

    in_loop(begin())
    wait_until(lambda: is_given_up(slow_llm.stats()))


ASYNC_WAYS: dict[str, Callable[[Paged], Awaitable[Any]]] = {
    "achat": lambda model: model.achat(as_messages("Sing.")),
    "acomplete": lambda model: model.acomplete("Sing."),
    "astream_chat": lambda model: acollected(model.astream_chat(as_messages("Sing."))),
    "astream_complete": lambda model: acollected(model.astream_complete("Sing.")),
}


@pytest.mark.parametrize("endpoint", ASYNC_WAYS)
async def test_cancelling_a_task_frees_its_blocks_and_leaves_others_alone(slow_llm: LLM, endpoint: str) -> None:
    model = Paged(llm=slow_llm, **FOREVER)
    task = asyncio.ensure_future(ASYNC_WAYS[endpoint](model))
    await wait_until_async(lambda: slow_llm.stats().num_running == 1)
    other = asyncio.ensure_future(make_paged(slow_llm).achat(as_messages("Name a colour.")))
    await wait_until_async(lambda: slow_llm.stats().num_running == 2)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await within_deadline(task)
    assert text_of(await within_deadline(other)) == ANSWER
    await wait_until_async(lambda: is_idle(slow_llm.stats()))
    assert num_ended(slow_llm.stats()) == 1  # the other


# Together in one engine.


@pytest.mark.parametrize("endpoint", ["achat", "acomplete"])
async def test_eight_calls_are_in_the_engine_together(slow_llm: LLM, endpoint: str) -> None:
    model = make_paged(slow_llm, LONG_ANSWER)
    calls = [
        model.achat(as_messages(f"Question {i}")) if endpoint == "achat" else model.acomplete(f"Question {i}")
        for i in range(8)
    ]
    responses = await within_deadline(asyncio.gather(*calls))
    assert [text_of(response) for response in responses] == [LONG_ANSWER] * 8
    assert slow_llm.stats().largest_batch == 8


async def test_the_event_loop_goes_on_while_answers_are_made(slow_llm: LLM) -> None:
    loop, gaps, is_over = asyncio.get_running_loop(), [0.0], asyncio.Event()

    async def tick() -> None:
        last = loop.time()
        while not is_over.is_set():
            await asyncio.sleep(0.005)
            gaps.append(loop.time() - last)
            last = loop.time()

    ticker = asyncio.create_task(tick())
    model = Paged(llm=slow_llm, extra_args={"forced": [*b"na" * 50, EOS]})
    long_prompt = "A question. " * 100
    await within_deadline(
        asyncio.gather(
            *(model.achat(as_messages("Sing.")) for _ in range(4)),
            acollected(model.astream_chat(as_messages(long_prompt))),
            acollected(model.astream_complete("Sing.")),
            model.acomplete("Sing.", formatted=True),
        )
    )
    is_over.set()
    await ticker
    assert len(gaps) > 20
    assert max(gaps) < 0.2
