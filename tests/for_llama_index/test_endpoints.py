"""What is true of each of the eight endpoints."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from llama_index.core.callbacks import CallbackManager, CBEventType, TokenCountingHandler
from llama_index.core.callbacks.base_handler import BaseCallbackHandler
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.instrumentation.events.llm import (
    LLMChatEndEvent,
    LLMChatStartEvent,
    LLMCompletionEndEvent,
    LLMCompletionStartEvent,
)

from helpers import is_idle
from helpers_llama_index import (
    ANSWER,
    ENDPOINTS,
    FOREVER,
    Recorder,
    ask,
    each_endpoint,
    each_stream,
    make_paged,
    num_finished,
    rendered,
    saying,
    text_of,
)
from llama_index.llms.paged import Paged
from paged_backend import LLM, EngineError, InvalidRequestError

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


@pytest.mark.slow
def test_the_demo_model_gives_one_text_from_every_endpoint() -> None:
    model = Paged(model="demo", temperature=0, max_tokens=12)
    texts = {endpoint: text_of(ask(model, endpoint)[-1]) for endpoint in ENDPOINTS}
    assert len(texts["chat"].split()) > 3
    assert texts == dict.fromkeys(ENDPOINTS, texts["chat"])
