"""Tool calls and reasoning in chats over HTTP."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from langchain_openai import ChatOpenAI

from helpers_server import END, ServerUnderTest, make_server, refusal, user

PATH = "/v1/chat/completions"
TEMPLATE = (
    "{% if tools %}{% for tool in tools %}{{ tool | tojson }}{% endfor %}<tool_call>{% endif %}"
    "{% for message in messages %}<{{ message.role }}>{{ message.content or '' }}"
    "{% for call in message.tool_calls %}{{ call.function.name }}({{ call.function.arguments.city }}){% endfor %}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    "{# <think> </think> #}"
)
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CALLS = "".join(
    f'<tool_call>\n{{"name": "weather", "arguments": {{"city": "{city}"}}}}\n</tool_call>'
    for city in ("Bern", "Zürich")
)
TAKEN_BACK = '<tool_call>{"name": "weather", "arguments": {"city": 1,,}</tool_call>'
"""Looks like a call until the second comma."""
ARGUMENTS = [{"city": "Bern"}, {"city": "Zürich"}]


@pytest.fixture(scope="module")
def one_server() -> Iterator[ServerUnderTest]:
    server = make_server(template=TEMPLATE)
    yield server
    server.serving.close()


@pytest.fixture
def server(one_server: ServerUnderTest) -> ServerUnderTest:
    say(one_server, CALLS)
    return one_server


def say(server: ServerUnderTest, text: str) -> None:
    server.sampler.script = [*text.encode(), END]
    server.runner.on_step = lambda output: time.sleep(0.001)  # so that a stream has pieces


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "kind", "body"),
    [
        (PATH, "chat_completions", {"messages": [user("hi")], "tools": [WEATHER]}),
        ("/v1/responses", "responses", {"input": "hi", "tools": [{"type": "function", **WEATHER["function"]}]}),
        (
            "/v1/messages",
            "other",
            {
                "messages": [user("hi")],
                "max_tokens": 500,
                "tools": [{"name": "weather", "input_schema": WEATHER["function"]["parameters"]}],
            },
        ),
    ],
)
async def test_outputs_of_requests_with_tools_are_counted(stream: bool, path: str, kind: str, body: Any) -> None:
    """By whether there was a call, in the end."""
    server = make_server(template=TEMPLATE)
    for text in (CALLS, TAKEN_BACK, "hello"):
        say(server, text)
        assert (await server.post(path, stream=stream, **body)).status_code == 200
        without = {key: value for key, value in body.items() if key != "tools"}
        assert (await server.post(path, stream=stream, **without)).status_code == 200
    lines = (await server.get("/metrics")).text.splitlines()
    counted = {
        line for line in lines if line.startswith("paged:tool_call_parser_invocations_total{") and " 0.0" not in line
    }
    mode = "streaming" if stream else "non_streaming"
    labels = f'model_name="fake",engine="0",mode="{mode}",outcome="%s",request_type="{kind}"'
    expected = {"tool_call": "1.0", "no_tool_call": "2.0"}
    head = "paged:tool_call_parser_invocations_total"
    names = {f"{head}{{{labels % outcome}}} {value}" for outcome, value in expected.items()}
    assert {_sorted_labels(line) for line in counted} == {_sorted_labels(name) for name in names}
    server.serving.close()


def _sorted_labels(line: str) -> tuple[str, ...]:
    head, _, rest = line.partition("{")
    labels, _, value = rest.partition("} ")
    return (head, *sorted(labels.split(",")), value)


async def test_calls_are_no_text(server: ServerUnderTest) -> None:
    (choice,) = (await server.chat(tools=[WEATHER]))["choices"]
    message = choice["message"]
    assert (choice["finish_reason"], message["content"]) == ("tool_calls", None)
    assert [(call["type"], call["function"]["name"]) for call in message["tool_calls"]] == [("function", "weather")] * 2
    assert [json.loads(call["function"]["arguments"]) for call in message["tool_calls"]] == ARGUMENTS
    assert len({call["id"] for call in message["tool_calls"]}) == 2


async def test_tools_count_in_the_prompt(server: ServerUnderTest) -> None:
    tokens = (await server.post("/tokenize", messages=[user("hi")], tools=[WEATHER])).json()["tokens"]
    assert (await server.chat("hi", tools=[WEATHER], return_token_ids=True))["prompt_token_ids"] == tokens


@pytest.mark.parametrize("n", [1, 2])
async def test_a_streams_pieces_join_to_the_calls(server: ServerUnderTest, n: int) -> None:
    chunks = await server.chunks(PATH, messages=[user("hi")], tools=[WEATHER], n=n)
    for index in range(n):
        choices = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        pieces = [piece for choice in choices for piece in choice["delta"].get("tool_calls", ())]
        for number, arguments in enumerate(ARGUMENTS):
            first, *others = [piece for piece in pieces if piece["index"] == number]
            assert (first["type"], first["function"]["name"]) == ("function", "weather") and first["id"]
            assert all("id" not in piece and "name" not in piece["function"] for piece in others)
            text = "".join(piece["function"]["arguments"] for piece in [first, *others])
            assert json.loads(text) == arguments
        assert [choice["finish_reason"] for choice in choices[-2:]] == [None, "tool_calls"]
        assert not any(choice["delta"].get("content") for choice in choices)


@pytest.mark.parametrize("extra", [{}, {"tools": [WEATHER], "tool_choice": "none"}, {"tools": []}])
async def test_without_tools_there_are_no_calls(server: ServerUnderTest, extra: dict[str, Any]) -> None:
    (choice,) = (await server.chat(**extra))["choices"]
    assert (choice["finish_reason"], "tool_calls" in choice["message"]) == ("stop", False)
    assert choice["message"]["content"] == CALLS


async def test_one_call_at_a_time_may_be_asked_for(server: ServerUnderTest) -> None:
    (choice,) = (await server.chat(tools=[WEATHER], parallel_tool_calls=False))["choices"]
    assert len(choice["message"]["tool_calls"]) == 1


async def test_what_is_no_call_is_text(server: ServerUnderTest) -> None:
    say(server, "<tool_call>{broken</tool_call>")
    (choice,) = (await server.chat(tools=[WEATHER]))["choices"]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("stop", "<tool_call>{broken</tool_call>")


@pytest.mark.parametrize("text", [TAKEN_BACK, CALLS + TAKEN_BACK], ids=["alone", "after_others"])
async def test_a_stream_ends_like_a_whole_answer_if_a_call_is_taken_back(server: ServerUnderTest, text: str) -> None:
    say(server, text)
    (whole,) = (await server.chat(tools=[WEATHER]))["choices"]
    choices = [chunk["choices"][0] for chunk in await server.chunks(PATH, messages=[user("hi")], tools=[WEATHER])]
    assert any("tool_calls" in choice["delta"] for choice in choices)
    assert choices[-1]["finish_reason"] == whole["finish_reason"] == ("stop" if text == TAKEN_BACK else "tool_calls")


async def test_reasoning_is_no_text_and_may_be_left_out(server: ServerUnderTest) -> None:
    say(server, "<think>hm, well</think>answer")
    (choice,) = (await server.chat())["choices"]
    assert (choice["message"]["reasoning"], choice["message"]["content"]) == ("hm, well", "answer")
    (choice,) = (await server.chat(include_reasoning=False))["choices"]
    assert choice["message"] == {"role": "assistant", "content": "answer", "refusal": None}
    deltas = [chunk["choices"][0]["delta"] for chunk in await server.chunks(PATH, messages=[user("hi")])]
    assert "".join(delta.get("reasoning", "") for delta in deltas) == "hm, well"
    assert "".join(delta.get("content", "") for delta in deltas) == "answer"


BAD: list[dict[str, Any]] = [
    {"tools": "weather"},
    {"tools": [1]},
    {"tools": [{"type": "retrieval"}]},
    {"tools": [{"type": "function", "function": {"name": "two words"}}]},
    {"tools": [WEATHER, WEATHER]},
    {"tools": [WEATHER], "tool_choice": "sometimes"},
    {"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "other"}}},
    {"tools": [WEATHER], "parallel_tool_calls": "no"},
    {"tool_choice": "required"},
    {"tools": [WEATHER], "tool_choice": "required", "response_format": {"type": "json_object"}},
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("body", BAD)
async def test_bad_tools_are_a_400(server: ServerUnderTest, body: dict[str, Any], stream: bool) -> None:
    refusal(await server.post(PATH, messages=[user("hi")], stream=stream, **body))


async def test_an_agents_round_trip_through_the_sdks(server: ServerUnderTest) -> None:
    with server.live() as url:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0, timeout=20) as client:
            first = await client.chat.completions.create(model="fake", messages=[user("hi")], tools=[WEATHER])  # type: ignore[list-item]
            message = first.choices[0].message
            assert message.tool_calls is not None
            results = [{"role": "tool", "tool_call_id": call.id, "content": "rain"} for call in message.tool_calls]
            say(server, "rain in both")
            history = [user("hi"), message.model_dump(exclude_none=True), *results]
            second = await client.chat.completions.create(model="fake", messages=history, tools=[WEATHER])  # type: ignore[arg-type,list-item]
        assert second.choices[0].message.content == "rain in both"
        say(server, CALLS)
        model = ChatOpenAI(model="fake", base_url=f"{url}/v1", api_key="x").bind_tools([WEATHER])  # type: ignore[arg-type]
        whole = await model.ainvoke("hi")
        streamed = None
        async for chunk in model.astream("hi"):
            streamed = chunk if streamed is None else streamed + chunk
    for reply in (whole, streamed):
        assert [call["args"] for call in reply.tool_calls] == ARGUMENTS  # type: ignore[union-attr]
