"""`Paged`: rules that hold for each of LlamaIndex's eight endpoints, and LlamaIndex's own parts on top of it."""

from __future__ import annotations

import asyncio
import copy
import gc
import json
import pickle
import subprocess
import sys
import weakref
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from llama_index.core import Document, MockEmbedding, PromptTemplate, Settings, SummaryIndex, VectorStoreIndex
from llama_index.core.base.llms.types import (
    CacheControl,
    CachePoint,
    ChatMessage,
    ChatResponse,
    ImageBlock,
    TextBlock,
    ThinkingBlock,
    ToolCallBlock,
)
from llama_index.core.callbacks import CallbackManager, CBEventType, TokenCountingHandler
from llama_index.core.callbacks.base_handler import BaseCallbackHandler
from llama_index.core.chat_engine import SimpleChatEngine
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.instrumentation.events.llm import (
    LLMChatEndEvent,
    LLMChatStartEvent,
    LLMCompletionEndEvent,
    LLMCompletionStartEvent,
)
from llama_index.core.llms import LLM as LlamaIndexLLM
from llama_index.core.memory import ChatMemoryBuffer
from llama_index.core.node_parser import SentenceSplitter

from helpers import is_idle, wait_until
from helpers_llama_index import (
    ANSWER,
    FOREVER,
    LONG_ANSWER,
    Recorder,
    acollected,
    as_messages,
    in_loop,
    make_paged,
    make_paged_llm,
    rendered,
    saying,
    within_deadline,
)
from helpers_models import CHAT_TEMPLATE, EOS, MAX_POSITIONS, make_model, make_tokenizer, save_model
from llama_index.llms.paged import Paged
from paged_backend import LLM, EngineError, InvalidRequestError


@pytest.fixture
def llm_and_runner() -> Iterator[tuple[LLM, Recorder]]:
    llm, runner = make_paged_llm()
    with llm:
        yield llm, runner


@pytest.fixture
def llm(llm_and_runner: tuple[LLM, Recorder]) -> LLM:
    return llm_and_runner[0]


@pytest.fixture
def runner(llm_and_runner: tuple[LLM, Recorder]) -> Recorder:
    return llm_and_runner[1]


@pytest.fixture
def slow_llm() -> Iterator[LLM]:
    """Each step takes 3 ms, as with a small model, so that requests meet."""
    with make_paged_llm(step_seconds=0.003)[0] as llm:
        yield llm


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A real, tiny checkpoint whose authors recommend greedy answers of 7 tokens."""
    recommended = {"do_sample": False, "max_new_tokens": 7}
    return str(save_model(tmp_path_factory.mktemp("model"), generation_config=recommended))


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


# What is true of every endpoint.


@pytest.mark.parametrize(
    ("settings", "text", "ending", "num_tokens"),
    [
        ({}, ANSWER, ("stop", None), len(ANSWER.encode()) + 1),
        ({"max_tokens": 3}, "Gr", ("length", None), 3),  # and half an ü, which is shown at no time
        ({"stop": ["is a"]}, "Grün 🙂 ", ("stop", "is a"), len("Grün 🙂 is a".encode())),
        ({"stop": "ü", "max_tokens": 50}, "Gr", ("stop", "ü"), 4),
        ({"min_tokens": 2, "stop_token_ids": [ord("n")]}, "Grü", ("stop", ord("n")), 5),
    ],
)
def test_every_endpoint_gives_the_same_text_usage_and_ending(
    llm: LLM, settings: dict[str, Any], text: str, ending: tuple[str, Any], num_tokens: int
) -> None:
    model = make_paged(llm, **settings)
    last = {endpoint: ask(model, endpoint)[-1] for endpoint in ENDPOINTS}
    found = {endpoint: text_of(response).rstrip("\ufffd") for endpoint, response in last.items()}
    assert found == dict.fromkeys(ENDPOINTS, text)
    endings = {endpoint: (answer.raw["finish_reason"], answer.raw["stop_reason"]) for endpoint, answer in last.items()}
    assert endings == dict.fromkeys(ENDPOINTS, ending)
    counts = {endpoint: answer.raw["usage"]["completion_tokens"] for endpoint, answer in last.items()}
    assert counts == dict.fromkeys(ENDPOINTS, num_tokens)


@each_endpoint
def test_an_answer_says_what_it_took(llm: LLM, endpoint: str) -> None:
    num_prompt_tokens = len(llm.tokenizer.encode(rendered(("user", "Name a colour.")), add_special_tokens=False))
    raws = [ask(make_paged(llm, "Red"), endpoint)[-1].raw for _ in range(2)]
    cached = [raw["usage"].pop("prompt_tokens_details")["cached_tokens"] for raw in raws]
    usage = {"prompt_tokens": num_prompt_tokens, "completion_tokens": 4, "total_tokens": num_prompt_tokens + 4}
    assert [raw["usage"] for raw in raws] == [usage, usage]
    assert cached[0] == 0 < cached[1] < num_prompt_tokens
    assert {raw["model"] for raw in raws} == {"fake"}


@each_stream
def test_a_stream_gives_the_text_so_far_and_what_is_new(llm: LLM, endpoint: str) -> None:
    responses = ask(make_paged(llm), endpoint)
    so_far = ""
    for response in responses:
        so_far += response.delta
        assert text_of(response) == so_far
        assert "\ufffd" not in so_far
    assert so_far == ANSWER


@each_stream
def test_only_the_last_of_a_stream_has_usage_and_an_ending(slow_llm: LLM, endpoint: str) -> None:
    *others, last = ask(make_paged(slow_llm), endpoint)
    assert len(others) > 1
    assert not any("usage" in response.raw or response.raw["finish_reason"] for response in others)
    assert last.raw["finish_reason"] == "stop"
    assert "usage" in last.raw


@each_stream
def test_an_empty_answer_streams_as_one_response(llm: LLM, endpoint: str) -> None:
    (response,) = ask(make_paged(llm, ""), endpoint)
    assert (text_of(response), response.delta, response.raw["finish_reason"]) == ("", "", "stop")


@each_endpoint
def test_the_chat_template_is_applied_once(llm: LLM, runner: Recorder, endpoint: str) -> None:
    ask(make_paged(llm), endpoint)
    assert runner.prompts == [rendered(("user", "Name a colour."))]


@each_endpoint
def test_a_call_wins_over_the_fields(llm: LLM, endpoint: str) -> None:
    model = make_paged(llm, "Red and green.", stop=["green"], max_tokens=40, timeout=50)
    assert text_of(ask(model, endpoint)[-1]) == "Red and "
    assert text_of(ask(model, endpoint, stop=[])[-1]) == "Red and green."
    assert text_of(ask(model, endpoint, max_tokens=3, temperature=0)[-1]) == "Red"
    assert text_of(ask(model, endpoint, **saying("Blue"))[-1]) == "Blue"


@each_endpoint
def test_unknown_arguments_of_a_call_are_errors_that_name_the_nearest(llm: LLM, endpoint: str) -> None:
    with pytest.raises(InvalidRequestError, match="'temprature'; did you mean 'temperature'"):
        ask(make_paged(llm), endpoint, temprature=0)
    with pytest.raises(InvalidRequestError, match="'max_new_tokens'; did you mean 'max_tokens'"):
        ask(make_paged(llm), endpoint, max_new_tokens=5)
    assert num_finished(llm) == 0


@each_endpoint
@pytest.mark.parametrize(("name", "value"), [("temperature", -1), ("top_p", 0), ("max_tokens", -1), ("n", 2)])
def test_an_impossible_setting_of_a_call_is_refused_by_name(llm: LLM, endpoint: str, name: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError, match=f"{name}={value}"):
        ask(make_paged(llm), endpoint, **{name: value})
    assert num_finished(llm) == 0


@each_endpoint
def test_a_prompt_that_is_no_text_is_refused(llm: LLM, endpoint: str) -> None:
    with pytest.raises(InvalidRequestError, match="surrogate"):
        ask(make_paged(llm), endpoint, "lone surrogate \ud83d")


@each_endpoint
def test_an_error_of_the_engine_reaches_the_caller(llm: LLM, runner: Recorder, endpoint: str) -> None:
    runner.is_failing = True
    with pytest.raises(EngineError):
        ask(make_paged(llm), endpoint)
    runner.is_failing = False
    assert text_of(ask(make_paged(llm), endpoint)[-1]) == ANSWER


@each_endpoint
def test_a_timeout_ends_the_request(slow_llm: LLM, endpoint: str) -> None:
    with pytest.raises(TimeoutError, match=r"0\.\d+ s after arrival"):
        ask(Paged(llm=slow_llm, timeout=0.05, **FOREVER), endpoint)
    assert is_idle(slow_llm.stats())


@each_endpoint
def test_logprobs_come_for_each_token(llm: LLM, endpoint: str) -> None:
    responses = ask(make_paged(llm, "Red", logprobs=0), endpoint)
    positions = [position for response in responses for position in response.logprobs or ()]
    assert [position[0].token for position in positions][:3] == list("Red")
    assert [position[0].bytes for position in positions][:3] == [[byte] for byte in b"Red"]
    assert all(position[0].logprob <= 0 for position in positions)
    assert ask(make_paged(llm, "Red"), endpoint)[-1].logprobs is None


# Callbacks.


class Counter(BaseCallbackHandler):
    def __init__(self) -> None:
        super().__init__([], [])
        self.num_starts = 0
        self.num_ends = 0

    def on_event_start(self, event_type: CBEventType, *args: Any, **kwargs: Any) -> str:
        self.num_starts += event_type == CBEventType.LLM
        return ""

    def on_event_end(self, event_type: CBEventType, *args: Any, **kwargs: Any) -> None:
        self.num_ends += event_type == CBEventType.LLM

    def start_trace(self, trace_id: str | None = None) -> None:
        return None

    def end_trace(self, trace_id: str | None = None, trace_map: Any = None) -> None:
        return None


@each_endpoint
def test_callbacks_hear_of_each_call_once_also_if_it_fails(llm: LLM, runner: Recorder, endpoint: str) -> None:
    counter = Counter()
    model = make_paged(llm, callback_manager=CallbackManager([counter]))
    ask(model, endpoint)
    assert (counter.num_starts, counter.num_ends) == (1, 1)
    runner.is_failing = True
    with pytest.raises(EngineError):
        ask(model, endpoint)
    assert (counter.num_starts, counter.num_ends) == (2, 2)


class EventLog(BaseEventHandler):
    names: list[str]
    payloads: list[dict[str, Any]]

    def handle(self, event: Any, **kwargs: Any) -> None:
        self.names.append(type(event).__name__)
        self.payloads.append(getattr(event, "model_dict", {}))


@pytest.fixture
def events() -> Iterator[EventLog]:
    log, root = EventLog(names=[], payloads=[]), get_dispatcher()
    root.add_event_handler(log)
    yield log
    root.event_handlers.remove(log)


@each_endpoint
def test_instrumentation_sees_one_start_and_one_end(llm: LLM, events: EventLog, endpoint: str) -> None:
    ask(make_paged(llm), endpoint)
    start, end = (
        (LLMChatStartEvent, LLMChatEndEvent)
        if endpoint.endswith("chat")
        else (LLMCompletionStartEvent, LLMCompletionEndEvent)
    )
    seen = [name for name in events.names if "InProgress" not in name]
    assert seen == [start.__name__, end.__name__]
    assert events.payloads[0]["model_name"] == "fake"


@each_endpoint
def test_token_counting_equals_the_usage(llm: LLM, endpoint: str) -> None:
    model = make_paged(llm)
    counter = TokenCountingHandler(tokenizer=model.tokenizer)
    model.callback_manager = CallbackManager([counter])
    usage = ask(model, endpoint)[-1].raw["usage"]
    counted = (counter.prompt_llm_token_count, counter.completion_llm_token_count, counter.total_llm_token_count)
    assert counted == (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"])


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
        wait_until(lambda: is_idle(slow_llm.stats()))


@pytest.mark.parametrize("endpoint", ["astream_chat", "astream_complete"])
async def test_closing_an_async_stream_aborts_before_anything_else_runs(slow_llm: LLM, endpoint: str) -> None:
    stream = await astart_stream(Paged(llm=slow_llm, **FOREVER), endpoint)
    await anext(stream)
    closing = stream.aclose()
    with pytest.raises(StopIteration):
        closing.send(None)
    wait_until(lambda: is_idle(slow_llm.stats()))  # without another turn of the loop


@pytest.mark.parametrize("endpoint", ["astream_chat", "astream_complete"])
async def test_leaving_an_async_stream_frees_its_blocks_within_a_few_turns_of_the_loop(
    slow_llm: LLM, endpoint: str
) -> None:
    async for response in await astart_stream(Paged(llm=slow_llm, **FOREVER), endpoint):
        assert response.delta
        break
    for _ in range(3):
        await asyncio.sleep(0)
    wait_until(lambda: is_idle(slow_llm.stats()))


def test_an_event_loop_that_ends_within_a_stream_frees_its_blocks(slow_llm: LLM) -> None:
    async def begin() -> None:
        stream = await Paged(llm=slow_llm, **FOREVER).astream_complete("Sing.")
        await anext(stream)

    in_loop(begin())
    wait_until(lambda: is_idle(slow_llm.stats()))


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


# What is asked.


def test_formatted_text_goes_to_the_model_as_it_is(llm: LLM, runner: Recorder) -> None:
    make_paged(llm, system_prompt="Be kind.").complete("Once upon", formatted=True)
    assert runner.prompts == ["Once upon"]


def test_a_completion_is_asked_as_a_users_message_after_the_system_prompt(llm: LLM, runner: Recorder) -> None:
    make_paged(llm, system_prompt="Be kind.").complete("Hi.")
    assert runner.prompts == [rendered(("system", "Be kind."), ("user", "Hi."))]


def test_completion_to_prompt_and_messages_to_prompt_replace_the_template(llm: LLM, runner: Recorder) -> None:
    model = make_paged(
        llm,
        completion_to_prompt=lambda prompt: f"Q: {prompt} A:",
        messages_to_prompt=lambda messages: "|".join(message.content or "" for message in messages),
    )
    model.complete("Hi.")
    model.chat([ChatMessage("One."), ChatMessage("Two.")])
    list(model.stream_complete("Hi."))
    in_loop(model.achat([ChatMessage("One.")]))
    assert runner.prompts == ["Q: Hi. A:", "One.|Two.", "Q: Hi. A:", "One."]


def test_a_model_without_chats_completes_what_it_is_given(llm: LLM, runner: Recorder) -> None:
    model = make_paged(llm, is_chat_model=False, system_prompt="Be kind.")
    model.complete("Once upon")
    model.predict(PromptTemplate("Once {x}"), x="upon")
    assert runner.prompts == ["Be kind.\n\nOnce upon"] * 2


def test_the_query_wrapper_of_older_code_still_counts(llm: LLM, runner: Recorder) -> None:
    make_paged(llm, query_wrapper_prompt=PromptTemplate("Q: {query_str}")).complete("Hi.")
    assert runner.prompts == [rendered(("user", "Q: Hi."))]


def test_predict_adds_the_system_prompt_once_and_parses_the_output(llm: LLM, runner: Recorder) -> None:
    class Shouting:
        def parse(self, output: str) -> str:
            return output.upper()

        def format(self, query: str) -> str:
            return f"{query} Loud!"

        def format_messages(self, messages: list[ChatMessage]) -> list[ChatMessage]:
            return [ChatMessage(role=message.role, content=self.format(message.content or "")) for message in messages]

    model = make_paged(llm, "Red", system_prompt="Be kind.")
    assert model.predict(PromptTemplate("Name a {x}."), x="colour") == "Red"
    model.output_parser = Shouting()  # type: ignore[assignment]
    assert model.predict(PromptTemplate("Name a {x}."), x="colour") == "RED"
    assert in_loop(model.apredict(PromptTemplate("Name a {x}."), x="colour")) == "RED"
    plain = rendered(("system", "Be kind."), ("user", "Name a colour."))
    loud = rendered(("system", "Be kind."), ("user", "Name a colour. Loud!"))
    assert runner.prompts == [plain, loud, loud]


def test_a_final_message_of_the_assistant_is_continued(llm: LLM, runner: Recorder) -> None:
    messages = [ChatMessage("Who?"), ChatMessage(role="assistant", content="According to")]
    make_paged(llm).chat(messages)
    make_paged(llm).chat(messages, continue_final_message=False)
    continued = "<|im_start|>user\nWho?<|im_end|>\n<|im_start|>assistant\nAccording to"
    assert runner.prompts == [continued, f"{continued}<|im_end|>\n<|im_start|>assistant\n"]


def test_a_template_of_the_callers_and_its_variables_are_used(llm: LLM, runner: Recorder) -> None:
    model = make_paged(llm, chat_template="{{ mood }}: {{ messages[0].content }}", chat_template_kwargs={"mood": "sad"})
    model.chat([ChatMessage("Hi.")])
    model.chat([ChatMessage("Hi.")], chat_template_kwargs={"mood": "gay"})
    model.complete("Hi.", chat_template=CHAT_TEMPLATE)
    assert runner.prompts == ["sad: Hi.", "gay: Hi.", rendered(("user", "Hi."))]


@pytest.mark.parametrize(
    ("role", "expected"), [("chatbot", "assistant"), ("model", "assistant"), ("developer", "system")]
)
def test_roles_that_templates_do_not_know_are_translated(llm: LLM, runner: Recorder, role: str, expected: str) -> None:
    make_paged(llm).chat([ChatMessage(role=role, content="Hi."), ChatMessage("Why?")])
    assert runner.prompts == [rendered((expected, "Hi."), ("user", "Why?"))]


def test_blocks_of_text_are_joined_and_past_reasoning_is_left_out(llm: LLM, runner: Recorder) -> None:
    cache_point = CachePoint(cache_control=CacheControl(type="ephemeral"))
    answer = ChatMessage(role="assistant", blocks=[ThinkingBlock(content="Hm."), TextBlock(text="Yes."), cache_point])
    question = ChatMessage(blocks=[TextBlock(text="One."), TextBlock(text="Two.")])
    make_paged(llm).chat([question, answer, ChatMessage("Why?")])
    assert question.content == "One.\nTwo."
    assert runner.prompts == [rendered(("user", "One.\nTwo."), ("assistant", "Yes."), ("user", "Why?"))]


@pytest.mark.parametrize("messages", [[], [ChatMessage(blocks=[TextBlock(text="See"), ImageBlock(image=b"png")])]])
def test_what_no_text_model_can_read_is_refused(llm: LLM, messages: list[ChatMessage]) -> None:
    with pytest.raises(InvalidRequestError, match=r"reads text only|at least one message"):
        make_paged(llm).chat(messages)


TOOL_TEMPLATE = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }}{{ m.tool_call_id }}"
    "{% for call in m.tool_calls or [] %}{{ call.function.name }}("
    "{% for key, value in call.function.arguments.items() %}{{ key }}={{ value }};{% endfor %})"
    "{% endfor %}|{% endfor %}"
)


def legacy_call(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"id": "1", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}


@pytest.mark.parametrize(
    "call",
    [
        ChatMessage(
            role="assistant",
            blocks=[ToolCallBlock(tool_call_id="1", tool_name="add", tool_kwargs={"a": 1, "b": "zwei"})],
        ),
        ChatMessage(
            role="assistant",
            blocks=[ToolCallBlock(tool_call_id="1", tool_name="add", tool_kwargs='{"a": 1, "b": "zwei"}')],
        ),
        ChatMessage(role="assistant", additional_kwargs={"tool_calls": [legacy_call("add", {"a": 1, "b": "zwei"})]}),
    ],
)
def test_a_tool_history_reaches_the_template(llm: LLM, runner: Recorder, call: ChatMessage) -> None:
    result = ChatMessage(role="tool", content="3", additional_kwargs={"tool_call_id": "1"})
    make_paged(llm, chat_template=TOOL_TEMPLATE).chat([ChatMessage("Add."), call, result])
    assert runner.prompts == ["user:Add.|assistant:add(a=1;b=zwei;)|tool:31|"]


# What a Paged is made of.


def test_unknown_arguments_of_the_constructor_are_errors_that_name_the_nearest() -> None:
    with pytest.raises(ValueError, match="'max_new_tokens'; did you mean 'max_tokens'"):
        Paged(model="demo", max_new_tokens=5)
    with pytest.raises(ValueError, match="did you mean 'block_size'"):
        Paged(model="demo", engine_kwargs={"blocksize": 16})
    with pytest.raises(ValueError, match="did you mean 'min_tokens'"):
        Paged(model="demo", additional_kwargs={"min_token": 1})


@pytest.mark.parametrize(("name", "value"), [("temperature", -1), ("top_p", 0), ("seed", 2**64), ("min_tokens", -1)])
def test_an_impossible_setting_is_refused_when_the_model_is_made(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=name):
        Paged(model="demo", **{name: value})


@pytest.mark.parametrize("arguments", [{"model": object()}, {"model": None}, {"model": ""}, {}])
def test_without_a_model_the_error_says_what_to_give(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must be a name, a path, a loaded model"):
        Paged(**arguments)


def test_metadata_comes_from_the_engine_and_the_settings(llm: LLM) -> None:
    metadata = make_paged(llm, max_tokens=30).metadata
    assert (metadata.context_window, metadata.num_output, metadata.model_name) == (llm.max_model_len, 30, "fake")
    assert (metadata.is_chat_model, metadata.is_function_calling_model) == (True, True)
    assert make_paged(llm, context_window=512).metadata.context_window == 512
    assert metadata.model_dump()["context_window"] == llm.max_model_len


def test_only_the_context_window_waits_for_the_model() -> None:
    code = """
        import sys
        from llama_index.llms.paged import Paged
        model = Paged(model='demo', temperature=0)
        assert model.metadata.is_chat_model and model.metadata.num_output
        model.to_payload(), model.to_dict(), model.model_copy(), repr(model), repr(model.metadata)
        print('torch' in sys.modules)
    """
    lines = "\n".join(line.strip() for line in code.splitlines())
    environment = {"PYTHONPATH": ":".join(path for path in sys.path if path)}
    run = subprocess.run([sys.executable, "-c", lines], env=environment, capture_output=True, text=True, timeout=60)
    assert run.stdout.strip() == "False", run.stderr


def test_importing_without_llama_index_names_the_extra() -> None:
    code = "import sys; sys.modules['llama_index.core'] = None; import llama_index.llms.paged"
    environment = {"PYTHONPATH": ":".join(path for path in sys.path if path)}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert run.stderr.strip().splitlines()[-1].endswith("pip install 'paged-backend[llama-index]'")


def test_a_checkpoint_is_loaded_once_for_everybody_and_its_recommendations_count(folder: str) -> None:
    models = [Paged(model=folder, engine_kwargs={"num_gpu_blocks_override": 64}) for _ in range(2)]
    responses = [model.complete("Hi.", ignore_eos=True) for model in models]
    assert [response.raw["usage"]["completion_tokens"] for response in responses] == [7, 7]
    assert models[0].engine is models[1].engine is LLM.shared(folder, num_gpu_blocks_override=64)
    assert models[0].metadata.context_window == MAX_POSITIONS
    assert models[0].complete("Hi.", ignore_eos=True, max_tokens=3).raw["usage"]["completion_tokens"] == 3


def test_a_loaded_model_is_used_in_place() -> None:
    hf_model, tokenizer = make_model(), make_tokenizer()
    model = Paged(model=hf_model, tokenizer=tokenizer, max_tokens=5, ignore_eos=True, temperature=0)
    assert model.complete("Hi.").raw["usage"]["completion_tokens"] == 5
    assert model.engine is LLM.shared(hf_model, tokenizer)
    assert copy.deepcopy(model).engine is model.engine
    assert "loaded" not in model.to_dict()
    model.engine.close()


def test_an_engine_or_a_path_can_be_given_as_model(llm: LLM, tmp_path: Path) -> None:
    assert text_of(Paged(model=llm, **saying("Red")).complete("Hi.")) == "Red"
    assert Paged(model=tmp_path).model == str(tmp_path)


@pytest.mark.parametrize(
    "make_copy",
    [copy.copy, copy.deepcopy, lambda model: model.model_copy(), lambda model: model.model_copy(deep=True)],
)
def test_copies_share_the_engine(llm: LLM, make_copy: Callable[[Paged], Paged]) -> None:
    model = make_paged(llm, max_tokens=3, stop=["x"])
    copied = make_copy(model)
    assert copied.engine is model.engine
    assert copied.to_dict() == model.to_dict()
    assert text_of(copied.complete("Hi.")) == text_of(model.complete("Hi."))


@pytest.mark.parametrize(
    "revive",
    [
        lambda model: pickle.loads(pickle.dumps(model)),
        lambda model: Paged.from_dict(model.to_dict()),
        lambda model: Paged.from_json(model.to_json()),
    ],
)
def test_settings_survive_a_pickle_and_a_dict(revive: Callable[[Paged], Paged]) -> None:
    model = Paged(
        model="demo",
        temperature=0.0,
        stop=["x"],
        min_tokens=2,
        system_prompt="Be kind.",
        engine_kwargs={"block_size": 32},
        is_chat_model=False,
    )
    revived = revive(model)
    assert revived.to_dict() == model.to_dict()
    assert (revived.temperature, revived.additional_kwargs) == (0.0, {"min_tokens": 2})


def test_a_model_with_an_engine_of_its_own_says_why_it_cannot_be_pickled(llm: LLM) -> None:
    with pytest.raises(TypeError, match="an engine lives in one process"):
        pickle.dumps(make_paged(llm))


def test_nothing_shows_the_engine(llm: LLM) -> None:
    model = make_paged(llm)
    shown = [repr(model), str(model.to_dict()), model.to_json(), str(model.to_payload())]
    assert not any("LLM object" in text for text in shown)


def test_a_dropped_model_keeps_nothing_alive(llm: LLM) -> None:
    model = make_paged(llm)
    assert model.metadata.context_window
    model.complete("Hi.")
    reference = weakref.ref(model)
    del model
    gc.collect()
    assert reference() is None


# LlamaIndex on top of it.


@pytest.fixture
def settings() -> Iterator[Any]:
    """LlamaIndex's process-wide settings, put back afterwards."""
    import llama_index.core

    before = (Settings._llm, Settings._embed_model, llama_index.core.global_tokenizer)
    Settings.embed_model = MockEmbedding(embed_dim=8)
    yield Settings
    Settings._llm, Settings._embed_model, llama_index.core.global_tokenizer = before


DOCUMENTS = [Document(text="The sky is blue."), Document(text="Grass is green.")]


@pytest.mark.parametrize("index_class", [SummaryIndex, VectorStoreIndex])
def test_query_engines_answer_from_their_nodes(llm: LLM, runner: Recorder, settings: Any, index_class: Any) -> None:
    settings.llm = make_paged(llm, "Blue.")
    settings.tokenizer = settings.llm.tokenizer
    index = index_class.from_documents(DOCUMENTS)
    assert str(index.as_query_engine().query("What is the sky like?")) == "Blue."
    assert str(in_loop(index.as_query_engine().aquery("What is the sky like?"))) == "Blue."
    streamed = index.as_query_engine(streaming=True).query("What is the sky like?")
    assert "".join(streamed.response_gen) == "Blue."
    assert len(runner.prompts) == 3
    assert len(set(runner.prompts)) == 1
    assert "The sky is blue." in runner.prompts[0]
    assert runner.prompts[0].count("<|im_start|>assistant\n") == 1


def test_a_chat_engine_remembers_each_answer_once(llm: LLM, runner: Recorder) -> None:
    engine = SimpleChatEngine.from_defaults(
        llm=make_paged(llm), memory=ChatMemoryBuffer.from_defaults(token_limit=1000)
    )
    assert "".join(engine.stream_chat("Name a colour.").response_gen) == ANSWER
    assert str(engine.chat("Another.")) == ANSWER

    async def stream() -> str:
        response = await engine.astream_chat("A third.")
        return "".join([token async for token in response.async_response_gen()])

    assert in_loop(stream()) == ANSWER
    assert [message.content for message in engine.chat_history] == [
        "Name a colour.", ANSWER, "Another.", ANSWER, "A third.", ANSWER,
    ]  # fmt: skip
    turns = [("user", "Name a colour."), ("assistant", ANSWER), ("user", "Another.")]
    assert runner.prompts[1] == rendered(*turns)


def test_the_tokenizer_counts_as_the_model_does(llm: LLM, settings: Any) -> None:
    model = make_paged(llm)
    settings.tokenizer = model.tokenizer
    assert settings.tokenizer("Grün") == list("Grün".encode())
    splitter = SentenceSplitter(chunk_size=40, chunk_overlap=0, tokenizer=model.tokenizer)
    assert all(len(chunk.encode()) <= 40 for chunk in splitter.split_text("A sentence of some length. " * 5))


def test_eight_queries_at_once_share_batches(slow_llm: LLM, settings: Any) -> None:
    settings.llm = make_paged(slow_llm, LONG_ANSWER)
    engine = SummaryIndex.from_documents(DOCUMENTS).as_query_engine()

    async def ask_all() -> list[Any]:
        return await asyncio.gather(*(engine.aquery(f"Question {i}") for i in range(8)))

    assert [str(answer) for answer in in_loop(ask_all())] == [LONG_ANSWER] * 8
    assert slow_llm.stats().largest_batch == 8


@pytest.mark.slow
def test_the_demo_model_gives_one_text_from_every_endpoint() -> None:
    model = Paged(model="demo", temperature=0, max_tokens=12)
    texts = {endpoint: text_of(ask(model, endpoint)[-1]) for endpoint in ENDPOINTS}
    assert len(texts["chat"].split()) > 3
    assert texts == dict.fromkeys(ENDPOINTS, texts["chat"])
