"""Many calls in one engine, one bad call among them, and calls that end early."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnableParallel

from helpers import is_given_up, is_idle
from helpers_langchain import (
    DEADLINE_S,
    FOREVER,
    ajoined,
    ignores_beta_warnings,
    joined,
    make_llm,
    wait_until,
    wait_until_async,
    within_deadline,
)
from langchain_paged import ChatPaged
from paged_backend import LLM

# Together in one engine.


QUESTIONS = [f"question {number} of sixty-four, with some words to make the answer long enough" for number in range(64)]
ANSWERS = [f"You said: {question}" for question in QUESTIONS]


def test_a_batch_of_64_is_in_the_engine_together(slow_llm: LLM) -> None:
    answers = ChatPaged(llm=slow_llm).batch(QUESTIONS)
    assert [answer.content for answer in answers] == ANSWERS
    assert slow_llm.stats().largest_batch >= 32


def test_a_batch_through_a_chain_is_in_the_engine_together(slow_llm: LLM) -> None:
    chain = ChatPromptTemplate.from_messages([("user", "{x}")]) | ChatPaged(llm=slow_llm) | StrOutputParser()
    assert chain.batch([{"x": question} for question in QUESTIONS]) == ANSWERS
    assert slow_llm.stats().largest_batch >= 32


def test_batch_as_completed_gives_each_answer_with_its_index(slow_llm: LLM) -> None:
    answers = dict(ChatPaged(llm=slow_llm).bind(seed=1).batch_as_completed(QUESTIONS))
    assert [answers[index].content for index in range(64)] == ANSWERS
    assert slow_llm.stats().largest_batch >= 32


def test_a_batch_never_starts_more_threads_than_the_engine_has_room_for() -> None:
    with make_llm(step_seconds=0.001, max_num_seqs=4) as llm:
        before = threading.active_count()
        most = before
        model = ChatPaged(llm=llm)
        for _ in model.batch_as_completed(QUESTIONS[:12]):
            most = max(most, threading.active_count())
    assert most <= before + 4 + 1  # and the engine's own


@pytest.mark.parametrize("way", ["batch", "batch_as_completed", "abatch"])
def test_max_concurrency_is_honoured(slow_llm: LLM, way: str) -> None:
    model, config = ChatPaged(llm=slow_llm), {"max_concurrency": 5}
    if way == "batch":
        assert [answer.content for answer in model.batch(QUESTIONS[:20], config)] == ANSWERS[:20]
    elif way == "batch_as_completed":
        assert len(list(model.batch_as_completed(QUESTIONS[:20], config))) == 20
    else:
        assert len(asyncio.run(within_deadline(model.abatch(QUESTIONS[:20], config)))) == 20
    assert 2 <= slow_llm.stats().largest_batch <= 5


async def test_an_abatch_of_64_is_in_the_engine_together(slow_llm: LLM) -> None:
    answers = await within_deadline(ChatPaged(llm=slow_llm).abatch(QUESTIONS))
    assert [answer.content for answer in answers] == ANSWERS
    assert slow_llm.stats().largest_batch >= 32


def test_an_empty_batch_is_empty(llm: LLM) -> None:
    assert ChatPaged(llm=llm).batch([]) == []
    assert list(ChatPaged(llm=llm).batch_as_completed([])) == []


def test_threads_and_tasks_of_several_loops_share_one_engine(slow_llm: LLM) -> None:
    def in_a_loop(questions: list[str]) -> list[str]:
        async def ask(question: str) -> str:
            chunks = [chunk async for chunk in ChatPaged(llm=slow_llm).astream(question)]
            return "".join(str(chunk.content) for chunk in chunks)

        async def ask_all() -> list[str]:
            return await within_deadline(asyncio.gather(*map(ask, questions)))

        return asyncio.run(ask_all())

    def in_a_thread(questions: list[str]) -> list[str]:
        return [str(ChatPaged(llm=slow_llm).invoke(question).content) for question in questions]

    with ThreadPoolExecutor(8) as threads:
        parts = [QUESTIONS[start : start + 4] for start in range(0, 32, 4)]
        ways = itertools.cycle([in_a_loop, in_a_thread])
        futures = [threads.submit(way, part) for way, part in zip(ways, parts, strict=False)]
        found = [answer for future in futures for answer in future.result(DEADLINE_S)]
    assert found == ANSWERS[:32]
    assert slow_llm.stats().largest_batch >= 8


def test_branches_of_a_runnable_parallel_meet_in_the_engine(slow_llm: LLM) -> None:
    model = ChatPaged(llm=slow_llm) | StrOutputParser()
    assert RunnableParallel(a=model, b=model).invoke(QUESTIONS[0]) == {"a": ANSWERS[0], "b": ANSWERS[0]}
    assert slow_llm.stats().largest_batch == 2


def test_three_event_loops_in_a_row_use_one_engine(llm: LLM) -> None:
    model = ChatPaged(llm=llm)
    for _ in range(3):
        assert asyncio.run(within_deadline(model.ainvoke("Hello."))).content == "You said: Hello."


async def test_the_event_loop_goes_on_while_answers_are_made(slow_llm: LLM) -> None:
    gaps: list[float] = []

    async def tick() -> None:
        while True:
            start = time.monotonic()
            await asyncio.sleep(0.02)
            gaps.append(time.monotonic() - start)

    ticker = asyncio.create_task(tick())
    model = ChatPaged(llm=slow_llm, max_tokens=30)
    one, eight, long = model.ainvoke(QUESTIONS[0]), model.abatch(QUESTIONS[:8]), model.ainvoke("word " * 5000)
    await within_deadline(asyncio.gather(one, eight, long, ajoined(model.astream(QUESTIONS[0]))))
    ticker.cancel()
    assert len(gaps) >= 3
    assert max(gaps) < 0.2


async def test_loading_a_model_leaves_the_event_loop_alone(folder: str) -> None:
    model = ChatPaged(model=folder, engine_kwargs={"num_gpu_blocks_override": 63})
    task = asyncio.create_task(model.ainvoke("Hello."))
    num_turns = 0
    while not task.done():
        num_turns += 1
        await asyncio.sleep(0)
    assert task.result().response_metadata["model_name"] == folder
    assert num_turns > 100


# One bad request.


def test_one_bad_prompt_in_a_batch_harms_no_other(llm: LLM) -> None:
    questions = ["one", "bad \ud83d", "three"]
    first, second, third = ChatPaged(llm=llm).batch(questions, return_exceptions=True)
    assert (first.content, third.content) == ("You said: one", "You said: three")
    assert isinstance(second, ValueError)


def test_a_failed_batch_leaves_nothing_behind(llm: LLM) -> None:
    model = ChatPaged(llm=llm)
    with pytest.raises(ValueError, match="surrogate"):
        model.batch(["one", "two", "bad \ud83d", "four"])
    assert is_idle(llm.stats())
    assert [answer.content for answer in model.batch(["five", "six"])] == ["You said: five", "You said: six"]


# Ending early.


def test_leaving_a_stream_frees_its_blocks(slow_llm: LLM) -> None:
    for chunk in ChatPaged(llm=slow_llm).stream(FOREVER):
        assert chunk.content
        break
    wait_until(lambda: is_given_up(slow_llm.stats()))


def test_closing_a_stream_through_a_chain_frees_its_blocks(slow_llm: LLM) -> None:
    # With a parser behind the model, LangChain 1.8 itself reads the model's stream to its end when it is closed.
    chain = ChatPromptTemplate.from_messages([("user", "{x}")]) | ChatPaged(llm=slow_llm)
    stream = chain.stream({"x": FOREVER})
    next(stream)
    stream.close()
    wait_until(lambda: is_given_up(slow_llm.stats()))


async def test_leaving_an_async_stream_frees_its_blocks(slow_llm: LLM) -> None:
    async for chunk in ChatPaged(llm=slow_llm).astream(FOREVER):
        assert chunk.content
        break
    await wait_until_async(lambda: is_given_up(slow_llm.stats()))


async def test_closing_an_async_stream_frees_its_blocks(slow_llm: LLM) -> None:
    stream = ChatPaged(llm=slow_llm).astream(FOREVER)
    await anext(stream)
    await stream.aclose()
    await wait_until_async(lambda: is_given_up(slow_llm.stats()))


async def test_leaving_an_event_stream_frees_its_blocks(slow_llm: LLM) -> None:
    events = ChatPaged(llm=slow_llm).astream_events(FOREVER, version="v2")
    async for event in events:
        if event["event"] == "on_chat_model_stream":
            break
    await events.aclose()
    await wait_until_async(lambda: is_given_up(slow_llm.stats()))


@ignores_beta_warnings
async def test_closing_a_v3_event_stream_frees_its_blocks(slow_llm: LLM) -> None:
    async with await ChatPaged(llm=slow_llm).astream_events(FOREVER, version="v3") as stream:
        await anext(aiter(stream.text))
    await wait_until_async(lambda: is_given_up(slow_llm.stats()))


def test_an_event_loop_that_ends_within_a_stream_frees_its_blocks(slow_llm: LLM) -> None:
    async def begin() -> None:
        stream = ChatPaged(llm=slow_llm).astream(FOREVER)
        await anext(stream)

    asyncio.run(within_deadline(begin()))
    wait_until(lambda: is_given_up(slow_llm.stats()))


async def cancel_when_running(llm: LLM, awaitable: Any) -> None:
    task = asyncio.ensure_future(awaitable)
    await wait_until_async(lambda: llm.stats().num_running > 0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await within_deadline(task)
    await wait_until_async(lambda: is_given_up(llm.stats()))


async def test_cancelling_a_task_frees_its_blocks(slow_llm: LLM) -> None:
    model = ChatPaged(llm=slow_llm)
    await cancel_when_running(slow_llm, model.ainvoke(FOREVER))
    await cancel_when_running(slow_llm, ajoined(model.astream(FOREVER)))
    await cancel_when_running(slow_llm, model.abatch([FOREVER] * 4))
    await cancel_when_running(slow_llm, (model | StrOutputParser()).ainvoke(FOREVER))


async def test_cancelling_one_of_several_leaves_the_others_alone(slow_llm: LLM) -> None:
    model = ChatPaged(llm=slow_llm)
    others = [asyncio.create_task(model.ainvoke(question)) for question in QUESTIONS[:4]]
    doomed = asyncio.create_task(model.ainvoke(FOREVER))
    await wait_until_async(lambda: slow_llm.stats().num_running == 5)
    doomed.cancel()
    assert [answer.content for answer in await within_deadline(asyncio.gather(*others))] == ANSWERS[:4]
    await wait_until_async(lambda: is_idle(slow_llm.stats()))


@pytest.mark.parametrize("way", ["invoke", "stream", "ainvoke", "astream"])
def test_a_timeout_ends_the_request(slow_llm: LLM, way: str) -> None:
    model = ChatPaged(llm=slow_llm, timeout=0.05)
    with pytest.raises(TimeoutError, match=r"0\.\d s after arrival"):
        ask(model, way)
    assert is_idle(slow_llm.stats())


def ask(model: ChatPaged, way: str) -> Any:
    if way == "invoke":
        return model.invoke(FOREVER)
    if way == "stream":
        return joined(model.stream(FOREVER))
    return asyncio.run(model.ainvoke(FOREVER) if way == "ainvoke" else ajoined(model.astream(FOREVER)))
