"""`ChatPaged`: LangChain's own suites on the demo model, and our rules on a model that echoes what it is asked."""

from __future__ import annotations

import asyncio
import copy
import itertools
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from langchain_core._api import LangChainBetaWarning
from langchain_core.caches import InMemoryCache
from langchain_core.callbacks import BaseCallbackHandler, UsageMetadataCallbackHandler
from langchain_core.load import dumps
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage, ToolMessage, trim_messages
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import ConfigurableField, RunnableParallel
from langchain_tests.integration_tests import ChatModelIntegrationTests
from langchain_tests.unit_tests import ChatModelUnitTests

from helpers_models import CHAT_TEMPLATE, EOS, VOCAB_SIZE, make_tokenizer, save_model
from langchain_paged import ChatPaged
from langchain_paged.settings import RequestSettings
from paged_backend import LLM, Backend, EngineStats, SamplingParams
from paged_backend.chat.tokenizer import Tokenizer
from paged_backend.sampling.sampler import SampledToken

FOREVER = "forever"
NUM_BLOCKS = 2048
DEADLINE_S = 20.0

ignores_beta_warnings = pytest.mark.filterwarnings(f"ignore::{LangChainBetaWarning.__module__}.LangChainBetaWarning")


class EchoModel:
    """Runner and sampler in one: answers `You said: <last user message>`, or for ever if it is asked for that."""

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
        answer = f"You said: {question}".encode()
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


@pytest.fixture
def llm() -> Iterator[LLM]:
    with make_llm(enable_prefix_caching=False) as llm:
        yield llm


@pytest.fixture
def slow_llm() -> Iterator[LLM]:
    """Each step takes 3 ms, as with a small model, so that requests meet."""
    with make_llm(step_seconds=0.003) as llm:
        yield llm


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A real, tiny checkpoint whose authors recommend greedy answers of 7 tokens."""
    recommended = {"do_sample": False, "max_new_tokens": 7, "repetition_penalty": 1.1}
    return str(save_model(tmp_path_factory.mktemp("model"), generation_config=recommended))


def is_idle(stats: EngineStats) -> bool:
    return (stats.num_running, stats.num_waiting, stats.num_free_blocks) == (0, 0, stats.num_blocks)


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


# LangChain's suites.


@pytest.mark.filterwarnings("ignore:ChatPaged takes no argument '(api_key|max_retries)'")
class TestLangChainUnits(ChatModelUnitTests):
    @property
    def chat_model_class(self) -> type[ChatPaged]:
        return ChatPaged

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": "demo"}


@ignores_beta_warnings
class TestLangChainIntegration(ChatModelIntegrationTests):
    @property
    def chat_model_class(self) -> type[ChatPaged]:
        return ChatPaged

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {
            "model": "demo",
            "temperature": 0,
            "max_tokens": 5,
            "engine_kwargs": {"kv_cache_memory": "128MiB"},
        }

    @property
    def supported_usage_metadata_details(self) -> Any:
        return {"invoke": ["cache_read_input"], "stream": ["cache_read_input"]}

    def invoke_with_cache_read_input(self, *, stream: bool = False) -> AIMessage:
        model = ChatPaged(**self.chat_model_params)
        question = "Name as many colours as you can. " * 5
        model.invoke(question)
        message: Any = None
        for chunk in model.stream(question):
            message = chunk if message is None else message + chunk
        answer: AIMessage = message if stream else model.invoke(question)
        assert answer.usage_metadata is not None
        assert answer.usage_metadata["input_token_details"]["cache_read"] > 0
        return answer


# One text, whatever the way.


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


@ignores_beta_warnings
@pytest.mark.parametrize("settings", [{}, {"max_tokens": 6}, {"stop": ["sai"]}, {"stop": "lo", "max_tokens": 50}])
def test_every_way_to_ask_gives_the_same_text_usage_and_ending(llm: LLM, settings: dict[str, Any]) -> None:
    found = answers(ChatPaged(llm=llm, **settings))
    first = found["invoke"]
    assert {way: answer.text for way, answer in found.items()} == dict.fromkeys(found, first.text)
    assert {way: answer.usage_metadata for way, answer in found.items()} == dict.fromkeys(found, first.usage_metadata)
    for key in ("finish_reason", "stop_reason", "model_name", "model_provider"):
        values = {way: answer.response_metadata.get(key) for way, answer in found.items()}
        assert values == dict.fromkeys(found, first.response_metadata.get(key)), key


@ignores_beta_warnings
def test_output_version_v1_gives_blocks_with_the_same_text(llm: LLM) -> None:
    found = answers(ChatPaged(llm=llm, output_version="v1"))
    assert {way: answer.text for way, answer in found.items()} == dict.fromkeys(found, "You said: Hello.")
    assert {block["type"] for answer in found.values() for block in answer.content} == {"text"}


def test_an_answer_says_how_it_ended_and_what_it_took(llm: LLM) -> None:
    answer = ChatPaged(llm=llm).invoke("Hello.")
    prompt = "<|im_start|>user\nHello.<|im_end|>\n<|im_start|>assistant\n"
    num_input_tokens = len(llm.tokenizer.encode(prompt, add_special_tokens=False))
    assert answer.content == "You said: Hello."
    assert answer.response_metadata == {"finish_reason": "stop", "model_name": "echo", "model_provider": "paged"}
    assert answer.usage_metadata == {
        "input_tokens": num_input_tokens,
        "output_tokens": len("You said: Hello.") + 1,
        "total_tokens": num_input_tokens + len("You said: Hello.") + 1,
        "input_token_details": {"cache_read": 0},
    }


def test_a_stop_text_is_named_and_cut_from_the_answer(llm: LLM) -> None:
    answer = ChatPaged(llm=llm, stop=["said", "zzz"]).invoke("Hello.")
    assert (answer.content, answer.response_metadata["stop_reason"]) == ("You ", "said")


def test_only_the_last_chunk_says_how_the_answer_ended_and_what_it_took(slow_llm: LLM) -> None:
    *others, last = ChatPaged(llm=slow_llm, max_tokens=9).stream("Hello.")
    assert others
    assert [(chunk.response_metadata, chunk.usage_metadata, chunk.chunk_position) for chunk in others] == [
        ({}, None, None)
    ] * len(others)
    assert last.response_metadata["finish_reason"] == "length"
    assert last.usage_metadata is not None
    assert (last.usage_metadata["output_tokens"], last.chunk_position) == (9, "last")


def test_usage_in_a_stream_can_be_left_out(llm: LLM) -> None:
    assert joined(ChatPaged(llm=llm, stream_usage=False).stream("Hello.")).usage_metadata is None
    assert joined(ChatPaged(llm=llm).stream("Hello.", stream_usage=False)).usage_metadata is None


def test_cached_prompt_tokens_are_counted() -> None:
    with make_llm() as llm:
        model = ChatPaged(llm=llm)
        question = "A question that fills several blocks of sixteen tokens, since each byte is one."
        messages = [model.invoke(question), model.invoke(question), joined(model.stream(question))]
    cached = [message.usage_metadata["input_token_details"]["cache_read"] for message in messages]
    assert cached[0] == 0
    assert cached[1] == cached[2] >= 64


def test_text_that_is_split_within_a_character_streams_whole(llm: LLM) -> None:
    chunks = [chunk.content for chunk in ChatPaged(llm=llm).stream("smile 🙂 ünd")]
    assert "".join(chunks) == "You said: smile 🙂 ünd"
    assert "\ufffd" not in "".join(chunks)


@pytest.mark.parametrize("num_top", [None, 0, 3])
def test_logprobs_come_in_openais_form_streamed_or_not(llm: LLM, num_top: int | None) -> None:
    model = ChatPaged(llm=llm, logprobs=True, top_logprobs=num_top, max_tokens=4)
    invoked = model.invoke("Hello.").response_metadata["logprobs"]
    assert joined(model.stream("Hello.")).response_metadata["logprobs"] == invoked
    assert [token["token"] for token in invoked["content"]] == list("You ")
    assert [token["bytes"] for token in invoked["content"]] == [[byte] for byte in b"You "]
    assert [len(token["top_logprobs"]) for token in invoked["content"]] == [num_top or 0] * 4


def test_top_logprobs_alone_asks_for_logprobs(llm: LLM) -> None:
    assert "logprobs" in ChatPaged(llm=llm, top_logprobs=2).invoke("Hello.").response_metadata
    assert "logprobs" not in ChatPaged(llm=llm, top_logprobs=2, logprobs=False).invoke("Hello.").response_metadata


def test_n_answers_come_from_generate_and_cannot_be_streamed(llm: LLM) -> None:
    model = ChatPaged(llm=llm, n=3)
    (generations,) = model.generate([[HumanMessage("Hello.")]]).generations
    assert [generation.text for generation in generations] == ["You said: Hello."] * 3
    assert model.invoke("Hello.").content == "You said: Hello."
    with pytest.raises(ValueError, match="n=3"):
        list(model.stream("Hello."))


# Which setting counts.


def test_a_calls_setting_wins_over_a_bound_one_and_that_over_the_field(llm: LLM) -> None:
    model = ChatPaged(llm=llm, stop=["Hello"], max_tokens=40)
    bound = model.bind(stop=["said"], max_tokens=8)
    assert model.invoke("Hello.").content == "You said: "
    assert bound.invoke("Hello.").content == "You "
    assert bound.invoke("Hello.", stop=["id"]).content == "You sa"
    assert bound.invoke("Hello.", stop=["u"], max_tokens=2).content == "Yo"
    assert bound.invoke("Hello.", stop=[]).content == "You said"
    assert bound.invoke("Hello.", stop=[], max_tokens=None).content == "You said: Hello."


def test_what_nobody_gave_comes_from_the_models_authors_and_falsy_values_count_as_given() -> None:
    recommended = {"temperature": 0.2, "top_p": 0.9, "top_k": 5, "repetition_penalty": 1.1, "max_tokens": 7}
    echo = EchoModel(0.0)
    with make_llm(model=echo, default_sampling=recommended) as llm:
        ChatPaged(llm=llm).invoke("Hello.")
        ChatPaged(llm=llm, temperature=0, top_p=1.0, repetition_penalty=1.0, max_tokens=9).invoke("Hello.")
        ChatPaged(llm=llm, temperature=0.7).invoke("Hello.", temperature=0.0, seed=0)
    first, second, third = echo.seen
    assert {name: getattr(first, name) for name in recommended} == recommended
    assert (second.temperature, second.repetition_penalty, second.max_tokens) == (0.0, 1.0, 9)
    assert (third.temperature, third.seed, third.max_tokens) == (0.0, 0, 7)


def test_an_answer_has_no_limit_unless_somebody_set_one(llm: LLM) -> None:
    question = "A question longer than the sixteen tokens that completions get."
    assert ChatPaged(llm=llm).invoke(question).content == f"You said: {question}"
    assert ChatPaged(llm=llm, temperature=0.5).invoke(question).content == f"You said: {question}"


def test_generation_config_of_a_checkpoint_counts(folder: str) -> None:
    model = ChatPaged(model=folder, engine_kwargs={"num_gpu_blocks_override": 64})
    recommended = model.invoke("Hello.", ignore_eos=True)
    assert recommended.usage_metadata is not None
    assert recommended.usage_metadata["output_tokens"] == 7
    shorter = model.invoke("Hello.", ignore_eos=True, max_tokens=3)
    assert shorter.usage_metadata is not None
    assert shorter.usage_metadata["output_tokens"] == 3
    assert recommended.response_metadata["model_name"] == folder


def test_a_call_may_name_another_model(llm: LLM, folder: str) -> None:
    model = ChatPaged(llm=llm, engine_kwargs={"num_gpu_blocks_override": 64})
    assert model.invoke("Hello.", model=folder).response_metadata["model_name"] == folder
    assert joined(model.stream("Hello.", model=folder)).response_metadata["model_name"] == folder
    assert asyncio.run(model.ainvoke("Hello.", model=folder)).response_metadata["model_name"] == folder
    assert model.invoke("Hello.").response_metadata["model_name"] == "echo"


def test_unknown_arguments_of_a_call_are_errors_that_name_the_nearest(llm: LLM) -> None:
    model = ChatPaged(llm=llm)
    with pytest.raises(ValueError, match="'temprature'; did you mean 'temperature'"):
        model.invoke("Hello.", temprature=0)
    with pytest.raises(ValueError, match="'max_token'; did you mean 'max_tokens'"):
        model.bind(max_token=5).invoke("Hello.")
    assert num_finished(llm) == 0


def test_unknown_arguments_of_the_constructor_are_warnings_that_name_the_nearest() -> None:
    with pytest.warns(UserWarning, match="'max_token'; did you mean 'max_tokens'") as warnings:
        ChatPaged(model="demo", max_token=5)
    assert warnings[0].filename == __file__


@pytest.mark.parametrize(
    "asked", [{"tools": [{"type": "function"}]}, {"response_format": {"type": "json_object"}}, {"functions": [{}]}]
)
def test_what_is_not_available_yet_is_refused_by_name(llm: LLM, asked: dict[str, Any]) -> None:
    with pytest.raises(NotImplementedError, match=next(iter(asked))):
        ChatPaged(llm=llm).invoke("Hello.", **asked)
    assert ChatPaged(llm=llm).invoke("Hello.", **dict.fromkeys(asked)).content == "You said: Hello."


@pytest.mark.parametrize(
    ("name", "value"),
    [("temperature", -1), ("top_p", 0), ("max_tokens", -1), ("n", 0), ("seed", 2**64), ("logit_bias", {5: 1000})],
)
def test_an_impossible_setting_is_refused_by_name_wherever_it_is_given(llm: LLM, name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=name):
        ChatPaged(llm=llm, **{name: value})
    with pytest.raises(ValueError, match=name):
        ChatPaged(llm=llm).invoke("Hello.", **{name: value})


def test_an_impossible_engine_setting_is_refused_when_the_model_is_made() -> None:
    with pytest.raises(ValueError, match="did you mean 'block_size'"):
        ChatPaged(model="demo", engine_kwargs={"blocksize": 16})


def test_both_spellings_of_model_and_stop_are_understood() -> None:
    model = ChatPaged(model_name="demo", stop_sequences=["x"])
    assert (model.model, model.stop) == ("demo", ["x"])


@pytest.mark.parametrize("arguments", [{"model": object()}, {"model": None}, {"model": ""}, {}])
def test_without_a_model_the_error_says_what_to_give(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"for a loaded model give llm=LLM\(model, tokenizer\)"):
        ChatPaged(**arguments)


def test_a_path_can_be_given_as_model(tmp_path: Path) -> None:
    assert ChatPaged(model=tmp_path).model == str(tmp_path)


def test_an_engine_can_be_given_as_model(llm: LLM) -> None:
    assert ChatPaged(model=llm).invoke("Hello.").content == "You said: Hello."


# Messages.


def test_a_final_ai_message_is_continued(llm: LLM) -> None:
    messages = [HumanMessage("Who?"), AIMessage("According to")]
    model = ChatPaged(llm=llm)
    continued = "<|im_start|>user\nWho?<|im_end|>\n<|im_start|>assistant\nAccording to"
    closed = f"{continued}<|im_end|>\n<|im_start|>assistant\n"
    num_tokens = {text: len(llm.tokenizer.encode(text, add_special_tokens=False)) for text in (continued, closed)}
    assert model.get_num_tokens_from_messages(messages) == num_tokens[continued]
    assert model.invoke(messages).usage_metadata["input_tokens"] == num_tokens[continued]
    answer = model.invoke(messages, continue_final_message=False)
    assert answer.usage_metadata["input_tokens"] == num_tokens[closed]


@pytest.mark.parametrize(
    "message",
    [
        HumanMessage([{"type": "text", "text": "Hel"}, "lo", {"type": "text", "text": "."}]),
        HumanMessage(content_blocks=[{"type": "text", "text": "Hello."}]),
    ],
)
def test_text_parts_are_joined(llm: LLM, message: BaseMessage) -> None:
    assert ChatPaged(llm=llm).invoke([message]).content == "You said: Hello."


def test_reasoning_in_the_history_is_left_out(llm: LLM) -> None:
    plain = AIMessage("Blue.")
    reasoned = AIMessage([{"type": "reasoning", "reasoning": "A colour..."}, {"type": "text", "text": "Blue."}])
    model = ChatPaged(llm=llm)
    counts = [
        model.get_num_tokens_from_messages([HumanMessage("Hi."), answer, HumanMessage("Why?")])
        for answer in (plain, reasoned)
    ]
    assert counts[0] == counts[1]


def test_a_tool_history_reaches_the_template_with_arguments_as_a_mapping(llm: LLM) -> None:
    template = (
        "{% for m in messages %}{{ m.role }}:{{ m.content }}"
        "{% for call in m.tool_calls or [] %}{% for key, value in call.function.arguments.items() %}"
        "{{ key }}={{ value }};{% endfor %}{% endfor %}|{% endfor %}user\nHello.<|im_end|>"
    )
    call = {"name": "add", "args": {"a": 1, "b": "zwei"}, "id": "1", "type": "tool_call"}
    messages = [
        SystemMessage("Sys"),
        HumanMessage("Add."),
        AIMessage("", tool_calls=[call]),
        ToolMessage([{"type": "text", "text": "3"}], tool_call_id="1"),
    ]
    model = ChatPaged(llm=llm, chat_template=template)
    rendered = "system:Sys|user:Add.|assistant:a=1;b=zwei;|tool:3|user\nHello.<|im_end|>"
    expected = len(llm.tokenizer.encode(rendered, add_special_tokens=False))
    assert model.get_num_tokens_from_messages(messages) == expected
    assert model.invoke(messages).content == "You said: Hello."


@pytest.mark.parametrize(
    "question",
    [
        "lone surrogate \ud83d",
        [HumanMessage([{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}])],
        [HumanMessage([{"type": "audio", "base64": "AAAA", "mime_type": "audio/wav"}])],
        [],
    ],
)
def test_what_no_text_model_can_read_is_a_value_error_on_every_path(llm: LLM, question: Any) -> None:
    model = ChatPaged(llm=llm)
    with pytest.raises(ValueError, match=r"surrogate|reads text only|at least one message"):
        model.invoke(question)
    with pytest.raises(ValueError, match=r"surrogate|reads text only|at least one message"):
        list(model.stream(question))
    with pytest.raises(ValueError, match=r"surrogate|reads text only|at least one message"):
        asyncio.run(within_deadline(model.ainvoke(question)))
    assert num_finished(llm) == 0


def test_a_template_that_refuses_the_messages_is_a_value_error(llm: LLM) -> None:
    model = ChatPaged(llm=llm, chat_template="{{ raise_exception('no system messages') }}")
    with pytest.raises(ValueError, match="no system messages"):
        model.invoke([SystemMessage("Be kind."), HumanMessage("Hello.")])


# Tokens.


def test_token_counts_are_those_of_the_model(llm: LLM) -> None:
    model = ChatPaged(llm=llm)
    assert model.get_token_ids("Hé") == list("Hé".encode())
    assert model.get_num_tokens("Hé") == 3
    messages = [SystemMessage("Be kind."), HumanMessage("Hello."), AIMessage("Hi."), HumanMessage("Why?")]
    usage = model.invoke(messages).usage_metadata
    assert usage is not None
    assert model.get_num_tokens_from_messages(messages) == usage["input_tokens"]


def test_messages_can_be_trimmed_by_the_models_own_count(llm: LLM) -> None:
    model = ChatPaged(llm=llm)
    messages = [HumanMessage("x" * 100), HumanMessage("y" * 10), HumanMessage("z" * 10)]
    kept = trim_messages(messages, max_tokens=80, token_counter=model, strategy="last")
    assert kept == messages[1:]


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
    wait_until(lambda: is_idle(slow_llm.stats()))


def test_closing_a_stream_through_a_chain_frees_its_blocks(slow_llm: LLM) -> None:
    # With a parser behind the model, LangChain 1.8 itself reads the model's stream to its end when it is closed.
    chain = ChatPromptTemplate.from_messages([("user", "{x}")]) | ChatPaged(llm=slow_llm)
    stream = chain.stream({"x": FOREVER})
    next(stream)
    stream.close()
    wait_until(lambda: is_idle(slow_llm.stats()))


async def test_leaving_an_async_stream_frees_its_blocks(slow_llm: LLM) -> None:
    async for chunk in ChatPaged(llm=slow_llm).astream(FOREVER):
        assert chunk.content
        break
    await wait_until_async(lambda: is_idle(slow_llm.stats()))


async def test_closing_an_async_stream_frees_its_blocks(slow_llm: LLM) -> None:
    stream = ChatPaged(llm=slow_llm).astream(FOREVER)
    await anext(stream)
    await stream.aclose()
    await wait_until_async(lambda: is_idle(slow_llm.stats()))


async def test_leaving_an_event_stream_frees_its_blocks(slow_llm: LLM) -> None:
    events = ChatPaged(llm=slow_llm).astream_events(FOREVER, version="v2")
    async for event in events:
        if event["event"] == "on_chat_model_stream":
            break
    await events.aclose()
    await wait_until_async(lambda: is_idle(slow_llm.stats()))


@ignores_beta_warnings
async def test_closing_a_v3_event_stream_frees_its_blocks(slow_llm: LLM) -> None:
    async with await ChatPaged(llm=slow_llm).astream_events(FOREVER, version="v3") as stream:
        await anext(aiter(stream.text))
    await wait_until_async(lambda: is_idle(slow_llm.stats()))


def test_an_event_loop_that_ends_within_a_stream_frees_its_blocks(slow_llm: LLM) -> None:
    async def begin() -> None:
        stream = ChatPaged(llm=slow_llm).astream(FOREVER)
        await anext(stream)

    asyncio.run(within_deadline(begin()))
    wait_until(lambda: is_idle(slow_llm.stats()))


async def cancel_when_running(llm: LLM, awaitable: Any) -> None:
    task = asyncio.ensure_future(awaitable)
    await wait_until_async(lambda: llm.stats().num_running > 0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await within_deadline(task)
    await wait_until_async(lambda: is_idle(llm.stats()))


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


# Callbacks.


class TokenCounter(BaseCallbackHandler):
    def __init__(self) -> None:
        self.tokens: list[str] = []
        self.num_ends = 0

    def on_llm_new_token(self, token: Any, **kwargs: Any) -> None:
        self.tokens.append(token)

    def on_llm_end(self, response: Any, **kwargs: Any) -> None:
        self.num_ends += 1


def test_callbacks_hear_of_each_chunk_once(llm: LLM) -> None:
    counter = TokenCounter()
    chunks = list(ChatPaged(llm=llm, callbacks=[counter]).stream("Hello."))
    assert counter.tokens == [chunk.content for chunk in chunks]
    assert "".join(counter.tokens) == "You said: Hello."
    assert counter.num_ends == 1


def test_usage_callback_adds_up_by_model(llm: LLM) -> None:
    usage = UsageMetadataCallbackHandler()
    messages = ChatPaged(llm=llm).batch(["one", "two"], {"callbacks": [usage]})
    total = sum(message.usage_metadata["total_tokens"] for message in messages)
    assert usage.usage_metadata["echo"]["total_tokens"] == total


# LLM caches.


class RecordingCache(InMemoryCache):
    def __init__(self) -> None:
        super().__init__()
        self.keys: list[str] = []

    def update(self, prompt: str, llm_string: str, return_val: Any) -> None:
        self.keys.append(llm_string)
        super().update(prompt, llm_string, return_val)


OTHER_VALUES: dict[str, Any] = {
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
    "timeout": 60.0,
    "priority": 1,
    "cache_salt": "salt",
    "chat_template": CHAT_TEMPLATE + " ",
    "chat_template_kwargs": {"enable_thinking": False},
    "continue_final_message": False,
    "stream_usage": False,
}


def test_every_setting_is_tried_below() -> None:
    assert set(OTHER_VALUES) == set(RequestSettings.model_fields)


@pytest.mark.parametrize("name", OTHER_VALUES)
def test_an_llm_cache_answers_only_for_the_same_settings(llm: LLM, name: str) -> None:
    cache, setting = RecordingCache(), {name: OTHER_VALUES[name]}
    plain, other = ChatPaged(llm=llm, cache=cache), ChatPaged(llm=llm, cache=cache, **setting)
    plain.invoke("Hello.")
    answer = other.invoke("Hello.")
    assert num_finished(llm) == 2
    assert ChatPaged(llm=llm, cache=cache, **setting).invoke("Hello.").content == answer.content
    assert num_finished(llm) == 2
    assert plain.invoke("Hello.", **setting).content == answer.content
    assert not any(" at 0x" in key or str(id(llm)) in key for key in cache.keys)


def test_an_llm_cache_tells_models_and_engines_apart() -> None:
    models = [
        ChatPaged(model="demo"),
        ChatPaged(model="other"),
        ChatPaged(model="demo", engine_kwargs={"dtype": "float32"}),
        ChatPaged(model="demo", engine_kwargs={"max_model_len": 64}),
    ]
    keys = [str(sorted(model.asdict().items())) for model in models]
    assert len(set(keys)) == len(models)


def test_the_order_of_engine_kwargs_does_not_matter_to_an_llm_cache() -> None:
    one = ChatPaged(model="demo", engine_kwargs={"dtype": "float32", "kv_cache_memory": "1KiB"})
    two = ChatPaged(model="demo", engine_kwargs={"kv_cache_memory": 1024, "dtype": "float32"})
    assert str(one.asdict()) == str(two.asdict())


# Copies, pickles, and what is shared.


@pytest.mark.parametrize(
    "make_copy",
    [copy.copy, copy.deepcopy, lambda model: model.model_copy(), lambda model: model.model_copy(deep=True)],
)
def test_copies_share_the_engine(llm: LLM, make_copy: Callable[[ChatPaged], ChatPaged]) -> None:
    model = ChatPaged(llm=llm, max_tokens=3)
    copied = make_copy(model)
    assert (copied, repr(copied)) == (model, repr(model))
    assert copied.invoke("Hello.").content == model.invoke("Hello.").content == "You"
    assert num_finished(llm) == 2


def test_a_changed_copy_uses_what_was_changed(llm: LLM) -> None:
    model = ChatPaged(llm=llm, max_tokens=3)
    assert model.model_copy(update={"max_tokens": 2}).invoke("Hello.").content == "Yo"
    configurable = model.configurable_fields(max_tokens=ConfigurableField(id="limit"))
    assert configurable.invoke("Hello.", {"configurable": {"limit": 1}}).content == "Y"
    assert joined(configurable.stream("Hello.", {"configurable": {"limit": 4}})).content == "You "


def test_objects_on_the_same_model_share_one_engine(folder: str) -> None:
    settings: dict[str, Any] = {"model": folder, "engine_kwargs": {"num_gpu_blocks_override": 62}}
    model = ChatPaged(**settings)
    models = [model, ChatPaged(**settings, temperature=0.5), pickle.loads(pickle.dumps(model))]
    for model in models:
        model.invoke("Hello.")
    assert num_finished(LLM.shared(folder, num_gpu_blocks_override=62)) == 3


def test_a_pickle_holds_settings_and_no_weights() -> None:
    model = ChatPaged(model="demo", temperature=0.5, stop=["x"])
    pickled = pickle.dumps(model)
    assert pickle.loads(pickled) == model
    assert len(pickled) < 5000


def test_a_model_with_an_engine_of_its_own_says_why_it_cannot_be_pickled(llm: LLM) -> None:
    with pytest.raises(TypeError, match="an engine lives in one process"):
        pickle.dumps(ChatPaged(llm=llm))


def test_nothing_shows_the_engine(llm: LLM) -> None:
    model = ChatPaged(llm=llm, temperature=0.5)
    shown = [repr(model), dumps(model), str(model.model_dump()), str(model.asdict())]
    assert not any(" at 0x" in text or "LLM object" in text for text in shown)
    assert not ChatPaged.is_lc_serializable()


def test_traces_name_provider_model_and_settings(llm: LLM) -> None:
    model = ChatPaged(llm=llm, temperature=0.5, max_tokens=9, stop="x")
    params = model._get_ls_params()
    assert (params["ls_provider"], params["ls_model_name"], params["ls_model_type"]) == ("paged", "echo", "chat")
    assert (params["ls_temperature"], params["ls_max_tokens"], params["ls_stop"]) == (0.5, 9, ["x"])
    assert model._get_ls_params(stop=["y"], model="other")["ls_stop"] == ["y"]
    assert model.metadata is not None
    assert "paged-backend" in model.metadata["lc_versions"]


def test_the_profile_knows_the_context_if_the_engine_is_there(llm: LLM) -> None:
    profile = ChatPaged(llm=llm).profile
    assert profile is not None
    assert profile["max_input_tokens"] == llm.max_model_len
    assert ChatPaged(model="demo", engine_kwargs={"max_model_len": 99}).profile["max_input_tokens"] == 99


def test_importing_without_langchain_names_the_extra(tmp_path: Path) -> None:
    code = "import sys; sys.modules['langchain_core'] = None; import langchain_paged"
    environment = {"PYTHONPATH": ":".join(path for path in sys.path if path)}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert run.stderr.strip().splitlines()[-1].endswith("pip install 'paged-backend[langchain]'")


def test_importing_and_making_a_model_loads_no_torch() -> None:
    code = "import sys, langchain_paged; langchain_paged.ChatPaged(model='demo'); print('torch' in sys.modules)"
    environment = {"PYTHONPATH": ":".join(path for path in sys.path if path)}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert run.stdout.strip() == "False", run.stderr
