"""`PagedLLM`: completions, on a model that answers with what it is asked."""

from __future__ import annotations

import asyncio
import copy
import pickle
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from langchain_core.caches import InMemoryCache
from langchain_core.callbacks import AsyncCallbackHandler, BaseCallbackHandler
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import PromptTemplate
from langchain_core.runnables import ConfigurableField

from helpers import is_given_up, is_idle
from helpers_langchain import (
    FOREVER,
    OTHER_SETTINGS,
    make_llm,
    num_finished,
    wait_until,
    wait_until_async,
    within_deadline,
)
from langchain_paged import PagedLLM
from langchain_paged.settings import RequestSettings
from paged_backend import LLM, SamplingParams

QUESTIONS = [f"question {number} of forty, with words enough that they meet" for number in range(40)]
ANSWERS = [f"You said: {question}" for question in QUESTIONS]


async def ajoined(texts: AsyncIterator[str]) -> str:
    return "".join([text async for text in texts])


async def first_of(texts: Awaitable[list[str]]) -> str:
    return (await texts)[0]


async def first_text(model: PagedLLM) -> str:
    return (await model.agenerate(["Hello."])).generations[0][0].text


async def last_event(model: PagedLLM) -> str:
    events = [event async for event in model.astream_events("Hello.", version="v2")]
    text: str = events[-1]["data"]["output"]["generations"][0][0]["text"]
    return text


SYNC_WAYS: dict[str, Callable[[PagedLLM], str]] = {
    "invoke": lambda model: model.invoke("Hello."),
    "stream": lambda model: "".join(model.stream("Hello.")),
    "batch": lambda model: model.batch(["Hello."])[0],
    "limited batch": lambda model: model.batch(["Hello.", "x"], {"max_concurrency": 1})[0],
    "batch_as_completed": lambda model: dict(model.batch_as_completed(["Hello.", "x"]))[0],
    "generate": lambda model: model.generate(["Hello."]).generations[0][0].text,
    "chain": lambda model: (PromptTemplate.from_template("{x}") | model | StrOutputParser()).invoke({"x": "Hello."}),
    "with_config": lambda model: model.with_config(tags=["x"]).invoke("Hello."),
}
ASYNC_WAYS: dict[str, Callable[[PagedLLM], Awaitable[str]]] = {
    "ainvoke": lambda model: model.ainvoke("Hello."),
    "astream": lambda model: ajoined(model.astream("Hello.")),
    "abatch": lambda model: first_of(model.abatch(["Hello."])),
    "limited abatch": lambda model: first_of(model.abatch(["Hello.", "x"], {"max_concurrency": 1})),
    "agenerate": first_text,
    "astream_events": last_event,
}


@pytest.mark.parametrize(
    ("settings", "answer"),
    [({}, "You said: Hello."), ({"max_tokens": 6}, "You sa"), ({"stop": ["sai"]}, "You "), ({"stop": "lo"}, None)],
)
def test_every_way_to_ask_gives_the_same_text(llm: LLM, settings: dict[str, Any], answer: str | None) -> None:
    async def ask_all() -> dict[str, str]:
        return {way: await within_deadline(ask(model)) for way, ask in ASYNC_WAYS.items()}

    model = PagedLLM(llm=llm, **settings)
    found = {way: ask(model) for way, ask in SYNC_WAYS.items()} | asyncio.run(ask_all())
    assert found == dict.fromkeys(found, "You said: Hel" if answer is None else answer)


def test_the_prompt_is_taken_as_it_is(llm: LLM) -> None:
    result = PagedLLM(llm=llm).generate(["Hello."])
    assert result.llm_output == {
        "model_name": "echo",
        "token_usage": {"prompt_tokens": 6, "completion_tokens": 17, "total_tokens": 23, "cached_tokens": 0},
    }


def test_generate_gives_n_texts_with_their_endings_and_logprobs(llm: LLM) -> None:
    result = PagedLLM(llm=llm, n=2, top_logprobs=1).generate(["one", "two"], max_tokens=4)
    assert [[one.text for one in texts] for texts in result.generations] == [["You "] * 2] * 2
    info = result.generations[1][1].generation_info
    assert info is not None
    assert (info["finish_reason"], info["model_name"]) == ("length", "echo")
    assert [token["token"] for token in info["logprobs"]["content"]] == list("You ")
    assert result.llm_output is not None
    assert result.llm_output["token_usage"]["completion_tokens"] == 16


def test_n_texts_cannot_be_streamed(llm: LLM) -> None:
    with pytest.raises(ValueError, match="n=2 answers cannot be streamed"):
        list(PagedLLM(llm=llm, n=2).stream("Hello."))


def test_a_text_has_256_tokens_at_most_unless_somebody_says_otherwise(llm: LLM) -> None:
    question = "x" * 300
    assert len(PagedLLM(llm=llm).invoke(question)) == 256
    assert PagedLLM(llm=llm, max_tokens=None).invoke(question) == f"You said: {question}"
    assert PagedLLM(llm=llm).invoke(question, max_tokens=None) == f"You said: {question}"


def test_a_calls_setting_wins_over_a_bound_one_and_that_over_the_field(llm: LLM) -> None:
    model = PagedLLM(llm=llm, stop=["Hello"], max_tokens=40)
    bound = model.bind(stop=["said"], max_tokens=8)
    assert model.invoke("Hello.") == "You said: "
    assert bound.invoke("Hello.") == "You "
    assert bound.invoke("Hello.", stop=["u"], max_tokens=2) == "Yo"
    assert "".join(bound.stream("Hello.", stop=[], max_tokens=9)) == "You said:"


def test_unknown_arguments_are_errors_in_a_call_and_warnings_in_the_constructor(llm: LLM) -> None:
    with pytest.raises(ValueError, match="a call of PagedLLM takes no argument 'max_token'; did you mean 'max_tokens'"):
        PagedLLM(llm=llm).invoke("Hello.", max_token=5)
    with pytest.raises(ValueError, match="'chat_template'"):
        PagedLLM(llm=llm).invoke("Hello.", chat_template="x")
    with pytest.warns(UserWarning, match="PagedLLM takes no argument 'max_token'"):
        PagedLLM(llm=llm, max_token=5)
    with pytest.raises(ValueError, match="temperature=-1"):
        PagedLLM(llm=llm, temperature=-1)


# Batches.


def test_a_batch_is_one_batch_of_the_engine(slow_llm: LLM) -> None:
    assert PagedLLM(llm=slow_llm).batch(QUESTIONS) == ANSWERS
    assert slow_llm.stats().largest_batch == 40


@pytest.mark.parametrize("is_async", [False, True])
def test_max_concurrency_is_honoured_without_waiting_for_the_slowest_of_a_slice(slow_llm: LLM, is_async: bool) -> None:
    # Three slots: the long answer keeps one of them busy while all others pass through the other two.
    prompts = ["long " * 40, *QUESTIONS[:8]]
    model, config = PagedLLM(llm=slow_llm), {"max_concurrency": 3}
    found = asyncio.run(within_deadline(model.abatch(prompts, config))) if is_async else model.batch(prompts, config)
    assert found[1:] == ANSWERS[:8]
    stats = slow_llm.stats()
    assert stats.largest_batch == 3
    in_slices = sum(max(len(prompt) for prompt in prompts[i : i + 3]) + 11 for i in (0, 3, 6))
    assert stats.num_steps < in_slices * 0.95


@pytest.mark.parametrize("is_async", [False, True])
def test_one_bad_prompt_is_one_error_with_return_exceptions(slow_llm: LLM, is_async: bool) -> None:
    prompts, model = ["one", "", "three"], PagedLLM(llm=slow_llm)
    if is_async:
        found = asyncio.run(within_deadline(model.abatch(prompts, return_exceptions=True)))
    else:
        found = model.batch(prompts, return_exceptions=True)
    assert (found[0], found[2]) == ("You said: one", "You said: three")
    assert isinstance(found[1], ValueError)
    with pytest.raises(ValueError, match="prompt 1: the prompt is empty"):
        model.batch(prompts)
    assert is_idle(slow_llm.stats())


def test_an_empty_batch_is_empty(llm: LLM) -> None:
    model = PagedLLM(llm=llm)
    assert (model.batch([]), model.batch([], return_exceptions=True)) == ([], [])
    assert asyncio.run(model.abatch([])) == []


# Callbacks.


class Tokens(BaseCallbackHandler):
    def __init__(self) -> None:
        self.tokens: list[str] = []
        self.ends: list[Any] = []

    def on_llm_new_token(self, token: Any, **kwargs: Any) -> None:
        self.tokens.append(token)

    def on_llm_end(self, response: Any, **kwargs: Any) -> None:
        self.ends.append(response)


class AsyncTokens(AsyncCallbackHandler):
    def __init__(self) -> None:
        self.tokens: list[str] = []

    async def on_llm_new_token(self, token: Any, **kwargs: Any) -> None:
        self.tokens.append(token)


def test_callbacks_hear_of_each_chunk_once_and_of_the_end(llm: LLM) -> None:
    tokens, async_tokens = Tokens(), AsyncTokens()
    chunks = list(PagedLLM(llm=llm).stream("Hello.", {"callbacks": [tokens]}))
    assert tokens.tokens == chunks
    (end,) = tokens.ends
    info = end.generations[0][0].generation_info
    assert (info["finish_reason"], info["usage_metadata"]["total_tokens"]) == ("stop", 23)
    text = asyncio.run(ajoined(PagedLLM(llm=llm).astream("Hello.", {"callbacks": [async_tokens]})))
    assert "".join(async_tokens.tokens) == text == "You said: Hello."


# LLM caches.


def test_every_setting_is_tried_below() -> None:
    # Adapters need a model: tests/test_lora_in_frameworks.py.
    assert set(OTHER_SETTINGS) | {"lora_request"} == set(RequestSettings.model_fields)


@pytest.mark.parametrize("name", OTHER_SETTINGS)
def test_an_llm_cache_answers_only_for_the_same_settings_of_model_and_call(reasoning_llm: LLM, name: str) -> None:
    llm, cache, setting = reasoning_llm, InMemoryCache(), {name: OTHER_SETTINGS[name]}
    plain, other = PagedLLM(llm=llm, cache=cache), PagedLLM(llm=llm, cache=cache, **setting)
    plain.invoke("Hello.")
    answer = other.invoke("Hello.")
    assert num_finished(llm) == 2
    assert other.invoke("Hello.") == answer
    assert asyncio.run(other.ainvoke("Hello.")) == answer
    assert num_finished(llm) == 2
    # LangChain's own key has the call's stop and nothing else of the call.
    assert plain.invoke("Hello.", **setting) == answer
    assert asyncio.run(plain.ainvoke("Hello.", **setting)) == answer
    assert plain.invoke("Hello.") == "You said: Hello."


def test_an_llm_cache_tells_models_apart() -> None:
    models = [
        PagedLLM(model="demo"),
        PagedLLM(model="other"),
        PagedLLM(model="demo", engine_kwargs={"dtype": "float32"}),
    ]
    assert len({str(sorted(model.asdict().items())) for model in models}) == len(models)


# Ending early.


def test_leaving_a_stream_frees_its_blocks(slow_llm: LLM) -> None:
    for text in PagedLLM(llm=slow_llm, max_tokens=None).stream(FOREVER):
        assert text
        break
    wait_until(lambda: is_given_up(slow_llm.stats()))


async def test_leaving_an_async_stream_or_cancelling_a_task_frees_its_blocks(slow_llm: LLM) -> None:
    model = PagedLLM(llm=slow_llm, max_tokens=None)
    async for text in model.astream(FOREVER):
        assert text
        break
    await wait_until_async(lambda: is_given_up(slow_llm.stats()))
    task = asyncio.ensure_future(model.abatch([FOREVER] * 3))
    await wait_until_async(lambda: slow_llm.stats().num_running > 0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await within_deadline(task)
    await wait_until_async(lambda: is_given_up(slow_llm.stats()))


def test_a_timeout_ends_the_request(slow_llm: LLM) -> None:
    with pytest.raises(TimeoutError, match="after arrival"):
        PagedLLM(llm=slow_llm, timeout=0.05, max_tokens=None).invoke(FOREVER)
    assert is_idle(slow_llm.stats())


# Copies, and what is shared.


def test_copies_share_the_engine_and_pickles_hold_settings_only(llm: LLM) -> None:
    model = PagedLLM(llm=llm, max_tokens=3)
    for copied in (copy.copy(model), copy.deepcopy(model), model.model_copy()):
        assert (copied.invoke("Hello."), copied) == ("You", model)
    with pytest.raises(TypeError, match="an engine lives in one process"):
        pickle.dumps(model)
    named = PagedLLM(model="demo", temperature=0.5)
    assert pickle.loads(pickle.dumps(named)) == named
    configurable = model.configurable_fields(max_tokens=ConfigurableField(id="limit"))
    assert configurable.invoke("Hello.", {"configurable": {"limit": 1}}) == "Y"


def test_token_counts_are_those_of_the_model(llm: LLM) -> None:
    assert PagedLLM(llm=llm).get_num_tokens("Hé") == 3


def test_traces_name_provider_model_and_settings(llm: LLM) -> None:
    params = PagedLLM(llm=llm, temperature=0.5, max_tokens=9, stop="x")._get_ls_params()
    assert (params["ls_provider"], params["ls_model_name"], params["ls_model_type"]) == ("paged", "echo", "llm")
    assert (params["ls_temperature"], params["ls_max_tokens"], params["ls_stop"]) == (0.5, 9, ["x"])


def test_what_nobody_gave_comes_from_the_models_authors() -> None:
    recommended = {"temperature": 0.2, "top_p": 0.9}
    with make_llm(default_sampling=recommended) as llm:
        model = PagedLLM(llm=llm)
        assert model._call(None, {}).sampling_params(llm) == SamplingParams(max_tokens=256, **recommended)
        assert model._call(None, {"temperature": 0}).sampling_params(llm).temperature == 0
