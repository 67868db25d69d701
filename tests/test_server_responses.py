"""`/v1/responses`, read by OpenAI's SDK."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

from helpers import WAIT_SECONDS, FakeRunner, is_idle, wait_until
from helpers_server import ScriptedSampler, ServerUnderTest, answered, make_models, make_server, refusal, user
from helpers_structured import make_llm as make_random_llm
from paged_backend.server.app import create_app
from test_server_errors import failing_after
from test_server_tools import ARGUMENTS, CALLS, TAKEN_BACK, TEMPLATE, WEATHER, say

PATH = "/v1/responses"
TOOL: Any = {"type": "function", "strict": False, **WEATHER["function"]}  # type: ignore[dict-item]


@pytest.fixture(scope="module")
def live() -> Iterator[tuple[ServerUnderTest, str]]:
    server = make_server(template=TEMPLATE)
    with server.live() as url:
        yield server, url
    server.serving.close()


@pytest.fixture
def server(live: tuple[ServerUnderTest, str]) -> ServerUnderTest:
    say(live[0], "abcdefgh")
    return live[0]


@pytest.fixture
def client(server: ServerUnderTest, live: tuple[ServerUnderTest, str]) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{live[1]}/v1", api_key="any", max_retries=0, timeout=WAIT_SECONDS) as client:
        yield client


def both(client: openai.OpenAI, **body: Any) -> tuple[Any, Any]:
    """The response as a whole, and as its stream ends."""
    whole = client.responses.create(model="fake", **body)
    last = list(client.responses.create(model="fake", stream=True, **body))[-1]
    assert last.type == f"response.{whole.status}"
    return whole, last.response


def comparable(response: Any) -> dict[str, Any]:
    """Without what differs from one response to the next, or with what the prefix cache happens to hold."""
    content = response.model_dump()
    content["usage"]["input_tokens_details"] = None
    for item in content["output"]:
        item["id"] = item["call_id"] = None
    return content | {"id": None, "created_at": None, "completed_at": None}


def test_an_answer_is_a_message(client: openai.OpenAI) -> None:
    whole, streamed = both(client, input="hi", instructions="be brief", metadata={"a": "b"})
    assert comparable(whole) == comparable(streamed)
    assert (whole.output_text, whole.status, whole.error, whole.incomplete_details) == (
        *("abcdefgh", "completed", None),
        None,
    )
    assert [item.type for item in whole.output] == ["message"]
    assert (whole.usage.output_tokens, whole.usage.total_tokens) == (9, whole.usage.input_tokens + 9)
    assert (whole.instructions, whole.metadata, whole.store) == ("be brief", {"a": "b"}, False)


def test_the_limit_of_tokens_makes_it_incomplete(client: openai.OpenAI) -> None:
    for response in both(client, input="hi", max_output_tokens=3):
        assert (response.output_text, response.status) == ("abc", "incomplete")
        assert response.incomplete_details.reason == "max_output_tokens"
        assert [item.status for item in response.output] == ["incomplete"]


def test_a_streams_events_tell_how_each_item_grows(server: ServerUnderTest, client: openai.OpenAI) -> None:
    say(server, f"<think>hm</think>so{CALLS}")
    events = list(client.responses.create(model="fake", input="hi", tools=[TOOL], stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    text = ["output_item.added", "content_part.added", "{}.delta", "{}.done", "content_part.done", "output_item.done"]
    call = ["output_item.added", "{}.delta", "{}.done", "output_item.done"]
    expected = [
        *("created", "in_progress"),
        *(kind.format("reasoning_text") for kind in text),
        *(kind.format("output_text") for kind in text),
        *(kind.format("function_call_arguments") for kind in call * 2),
        "completed",
    ]
    assert [kind for i, kind in enumerate(kinds) if kind != kinds[i - 1]] == expected
    with client.responses.stream(model="fake", input="hi", tools=[TOOL]) as stream:
        final = stream.get_final_response()
    assert [item.type for item in final.output] == ["reasoning", "message", "function_call", "function_call"]
    assert [json.loads(item.arguments) for item in final.output[2:]] == ARGUMENTS  # type: ignore[union-attr]


def test_reasoning_is_an_item_of_its_own(server: ServerUnderTest, client: openai.OpenAI) -> None:
    say(server, "<think>hm</think>so")
    whole, streamed = both(client, input="hi")
    assert comparable(whole) == comparable(streamed)
    assert (whole.output[0].content[0].text, whole.output_text) == ("hm", "so")
    assert whole.usage.output_tokens_details.reasoning_tokens == 2
    for response in both(client, input="hi", extra_body={"include_reasoning": False}):
        assert [item.type for item in response.output] == ["message"]


def test_calls_and_their_results_go_back_to_the_model(server: ServerUnderTest, client: openai.OpenAI) -> None:
    say(server, f"<think>hm</think>so{CALLS}")
    whole, streamed = both(client, input="hi", tools=[TOOL])
    assert comparable(whole) == comparable(streamed)
    results = [
        {"type": "function_call_output", "call_id": item.call_id, "output": "rain"}
        for item in whole.output
        if item.type == "function_call"
    ]
    assert len(results) == 2
    say(server, "rain in both")
    items: Any = [user("hi"), *(item.model_dump() for item in whole.output), *results]
    second = client.responses.create(model="fake", input=items, tools=[TOOL])
    assert second.output_text == "rain in both"
    calls = [{"type": "function", "function": {"name": "weather", "arguments": arguments}} for arguments in ARGUMENTS]
    history = [user("hi"), {"role": "assistant", "content": "so", "tool_calls": calls}]
    history += [{"role": "tool", "content": "rain"}] * 2
    same = client.chat.completions.create(model="fake", messages=history, tools=[WEATHER])  # type: ignore[arg-type,list-item]
    assert same.usage is not None and second.usage is not None
    assert second.usage.input_tokens == same.usage.prompt_tokens


def test_a_call_that_is_taken_back_is_text_in_the_end(server: ServerUnderTest, client: openai.OpenAI) -> None:
    say(server, TAKEN_BACK)
    events = list(client.responses.create(model="fake", input="hi", tools=[TOOL], stream=True))
    done = {event.item.type: event.item.status for event in events if event.type == "response.output_item.done"}
    assert done == {"function_call": "incomplete", "message": "completed"}
    for response in (events[-1].response, client.responses.create(model="fake", input="hi", tools=[TOOL])):  # type: ignore[union-attr]
        assert [item.type for item in response.output] == ["message"]
        assert response.output_text == TAKEN_BACK


def test_logprobs_have_an_entry_for_each_token(client: openai.OpenAI) -> None:
    whole, streamed = both(client, input="hi", top_logprobs=2)
    assert comparable(whole) == comparable(streamed)
    entries = whole.output[0].content[0].logprobs
    assert "".join(entry.token for entry in entries).startswith("abcdefgh") and len(entries) == 9
    assert all(len(entry.top_logprobs) == 2 for entry in entries)


class Point(BaseModel):
    x: int
    y: int


def test_a_format_is_followed() -> None:
    llm = make_random_llm()
    llm.get_tokenizer().chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    models = make_models(llm=llm)
    server = ServerUnderTest(llm, FakeRunner(), ScriptedSampler(), models, create_app(models))
    with server.live() as url, openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0, timeout=20) as client:
        parsed = client.responses.parse(model="fake", input="hi", text_format=Point)
        assert isinstance(parsed.output_parsed, Point)
        with client.responses.stream(model="fake", input="hi", text_format=Point) as stream:
            assert isinstance(stream.get_final_response().output_parsed, Point)
        plain = client.responses.create(model="fake", input="hi", text={"format": {"type": "json_object"}})
        assert isinstance(json.loads(plain.output_text), dict)
    llm.close()


async def test_the_asynchronous_sdk_streams_and_breaking_out_ends_the_request(
    live: tuple[ServerUnderTest, str], server: ServerUnderTest
) -> None:
    async with openai.AsyncOpenAI(base_url=f"{live[1]}/v1", api_key="any", max_retries=0, timeout=20) as client:
        reply = await client.responses.create(model="fake", input="hi")
        assert reply.output_text == "abcdefgh"
        async with client.responses.stream(model="fake", input="hi") as stream:
            assert (await stream.get_final_response()).output_text == "abcdefgh"
        async with await client.responses.create(
            model="fake", input="hi", stream=True, extra_body={"ignore_eos": True}
        ) as events:
            assert (await anext(events)).type == "response.created"
    wait_until(lambda: is_idle(server.llm.stats()))


async def test_langchains_model_uses_it(live: tuple[ServerUnderTest, str], server: ServerUnderTest) -> None:
    model = ChatOpenAI(model="fake", base_url=f"{live[1]}/v1", api_key="any", use_responses_api=True)  # type: ignore[arg-type]
    reply = await model.ainvoke("hi")
    assert reply.text == "abcdefgh" and reply.usage_metadata and reply.usage_metadata["output_tokens"] == 9
    say(server, CALLS)
    called = await model.bind_tools([WEATHER]).ainvoke("hi")
    assert [call["args"] for call in called.tool_calls] == ARGUMENTS
    chunks = [chunk async for chunk in model.bind_tools([WEATHER]).astream("hi")]
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk  # type: ignore[assignment]
    assert [call["args"] for call in whole.tool_calls] == ARGUMENTS


def test_the_sdk_raises_its_own_errors(server: ServerUnderTest, client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="nope"):
        client.responses.create(model="nope", input="hi")
    with pytest.raises(openai.NotFoundError, match="stores no responses"):
        client.responses.retrieve("resp_1")
    failing_after(server, 3)
    with pytest.raises(openai.APIError, match="on purpose"):
        list(client.responses.create(model="fake", input="hi", stream=True))


BAD: list[tuple[dict[str, Any], str]] = [
    ({"store": True}, "store"),
    ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ({"background": True}, "background"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"prompt": {"id": "x"}}, "prompt"),
    ({"truncation": "auto"}, "truncation"),
    ({"reasoning": {"effort": "high"}}, "reasoning"),
    ({"tools": [{"type": "web_search"}]}, "tools"),
    ({"tools": [TOOL], "tool_choice": {"type": "web_search"}}, "tool_choice"),
    ({"text": {"format": {"type": "json_schema"}}}, "text"),
    ({"input": []}, "input"),
    ({"input": [1]}, "input"),
    ({"input": [{"role": "robot", "content": "x"}]}, "input"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input"),
    ({"input": [{"type": "computer_call"}]}, "input"),
    ({"input": [{"type": "reasoning", "content": 5}]}, "input"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input"),
    ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input"),
    ({"temperature": 9}, "temperature"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("body", "param"), BAD, ids=[f"{param}{index}" for index, (_, param) in enumerate(BAD)])
async def test_what_cannot_be_honoured_is_refused(
    server: ServerUnderTest, body: dict[str, Any], param: str, stream: bool
) -> None:
    assert refusal(await server.post(PATH, **{"input": "hi", "stream": stream} | body))["param"] == param


async def test_what_clients_send_without_tools_is_no_wish_for_tools(server: ServerUnderTest) -> None:
    """As the responses themselves say it."""
    asked = {"tools": [], "tool_choice": "auto", "parallel_tool_calls": True}
    reply = answered(await server.post(PATH, input="hi", **asked))
    assert {name: reply[name] for name in asked} == asked


async def test_null_is_the_same_as_nothing(server: ServerUnderTest) -> None:
    fields = (await server.get("/openapi.json")).json()["components"]["schemas"]["ResponsesRequest"]["properties"]
    nothing = {name: None for name in fields if name != "input"}
    assert answered(await server.post(PATH, input="hi", **nothing))["status"] == "completed"
