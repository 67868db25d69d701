"""Anthropic's `/v1/messages`, read by Anthropic's SDK."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

from helpers import is_idle, wait_until
from helpers_server import ServerUnderTest, answered, make_server
from test_server_errors import failing_after
from test_server_tools import ARGUMENTS, CALLS, TAKEN_BACK, TEMPLATE, WEATHER, say

PATH = "/v1/messages"
TOOL = {
    "name": "weather",
    "description": WEATHER["function"]["description"],  # type: ignore[index]
    "input_schema": WEATHER["function"]["parameters"],  # type: ignore[index]
}
HI: Any = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def live() -> Iterator[tuple[ServerUnderTest, str]]:
    server = make_server(template=TEMPLATE, api_keys=("key",))
    with server.live() as url:
        yield server, url
    server.serving.close()


@pytest.fixture
def server(live: tuple[ServerUnderTest, str]) -> ServerUnderTest:
    say(live[0], "abcdefgh")
    return live[0]


@pytest.fixture
def client(server: ServerUnderTest, live: tuple[ServerUnderTest, str]) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=live[1], api_key="key", max_retries=0, timeout=20) as client:
        yield client


def test_an_answer_is_blocks(client: anthropic.Anthropic) -> None:
    reply = client.messages.create(model="fake", max_tokens=50, messages=HI, system="be brief")
    assert [(block.type, getattr(block, "text", None)) for block in reply.content] == [("text", "abcdefgh")]
    assert (reply.stop_reason, reply.stop_sequence, reply.role) == ("end_turn", None, "assistant")
    assert reply.usage.output_tokens == 9


@pytest.mark.parametrize(
    ("thinking", "kinds"),
    [
        ({"type": "adaptive"}, ["thinking", "text"]),
        ({"type": "adaptive", "display": "summarized"}, ["thinking", "text"]),
        ({"type": "adaptive", "display": "omitted"}, ["text"]),
        ({"type": "disabled"}, ["text"]),
    ],
)
def test_reasoning_is_shown_unless_it_is_not_wanted(
    server: ServerUnderTest, client: anthropic.Anthropic, thinking: Any, kinds: list[str]
) -> None:
    say(server, "<think>hm</think>so")
    body: dict[str, Any] = {"model": "fake", "max_tokens": 50, "messages": HI, "thinking": thinking}
    with client.messages.stream(**body) as stream:
        streamed = stream.get_final_message()
    for one in (client.messages.create(**body), streamed):
        assert [block.type for block in one.content] == kinds


def test_the_sdks_loop_over_tools_does_without_stored_conversations(client: anthropic.Anthropic) -> None:
    @anthropic.beta_tool
    def weather(city: str) -> str:
        """The weather.

        Args:
            city: Where.
        """
        return city

    runner = client.beta.messages.tool_runner(model="fake", max_tokens=50, messages=HI, tools=[weather])
    assert [block.text for block in runner.until_done().content] == ["abcdefgh"]  # type: ignore[union-attr]
    with pytest.raises(anthropic.BadRequestError, match="thread is not supported"):
        client.messages.create(model="fake", max_tokens=50, messages=HI, extra_body={"thread": {"type": "create"}})


def test_labels_change_nothing(client: anthropic.Anthropic) -> None:
    labels: dict[str, Any] = {"cache_control": {"type": "ephemeral"}, "metadata": {"user_id": "me"}}
    reply = client.messages.create(model="fake", max_tokens=50, messages=HI, **labels)
    assert reply.content[0].text == "abcdefgh"  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("options", "text", "reason", "sequence"),
    [({"max_tokens": 3}, "abc", "max_tokens", None), ({"stop_sequences": ["de"]}, "abc", "stop_sequence", "de")],
)
def test_the_reason_for_the_end_is_told(
    client: anthropic.Anthropic, options: dict[str, Any], text: str, reason: str, sequence: str | None
) -> None:
    body: dict[str, Any] = {"model": "fake", "max_tokens": 50, "messages": HI} | options
    reply = client.messages.create(**body)
    with client.messages.stream(**body) as stream:
        streamed = stream.get_final_message()
    for one in (reply, streamed):
        assert (one.content[0].text, one.stop_reason, one.stop_sequence) == (text, reason, sequence)
    assert streamed.usage.output_tokens == reply.usage.output_tokens


def test_calls_and_reasoning_are_blocks_of_their_own(server: ServerUnderTest, client: anthropic.Anthropic) -> None:
    say(server, f"<think>hm</think>so{CALLS}")
    body: dict[str, Any] = {"model": "fake", "max_tokens": 500, "messages": HI, "tools": [TOOL]}
    reply = client.messages.create(**body)
    with client.messages.stream(**body) as stream:
        streamed = stream.get_final_message()
    for one in (reply, streamed):
        assert [block.type for block in one.content] == ["thinking", "text", "tool_use", "tool_use"]
        assert (one.content[0].thinking, one.content[1].text) == ("hm", "so")  # type: ignore[union-attr]
        assert [block.input for block in one.content[2:]] == ARGUMENTS  # type: ignore[union-attr]
        assert one.stop_reason == "tool_use"


def test_a_stream_ends_like_a_whole_answer_if_a_call_is_taken_back(
    server: ServerUnderTest, client: anthropic.Anthropic
) -> None:
    say(server, TAKEN_BACK)
    body: dict[str, Any] = {"model": "fake", "max_tokens": 500, "messages": HI, "tools": [TOOL]}
    events = list(client.messages.create(**body, stream=True))
    assert "tool_use" in [event.content_block.type for event in events if event.type == "content_block_start"]
    (reason,) = [event.delta.stop_reason for event in events if event.type == "message_delta"]
    assert reason == client.messages.create(**body).stop_reason == "end_turn"


def test_thoughts_may_be_left_out(server: ServerUnderTest, client: anthropic.Anthropic) -> None:
    say(server, "<think>hm</think>so")
    body: dict[str, Any] = {"model": "fake", "max_tokens": 500, "messages": HI, "thinking": {"type": "disabled"}}
    with client.messages.stream(**body) as stream:
        streamed = stream.get_final_message()
    for one in (client.messages.create(**body), streamed):
        assert [block.type for block in one.content] == ["text"]


def test_tokens_are_counted_as_they_will_be_used(client: anthropic.Anthropic) -> None:
    body: dict[str, Any] = {"model": "fake", "messages": HI, "tools": [TOOL], "system": "be brief"}
    usage = client.messages.create(**body, max_tokens=5).usage
    counted = client.messages.count_tokens(**body).input_tokens
    assert counted == usage.input_tokens + (usage.cache_read_input_tokens or 0) > 100


def test_results_go_back_to_the_model(server: ServerUnderTest, client: anthropic.Anthropic) -> None:
    say(server, CALLS)
    first = client.messages.create(model="fake", max_tokens=500, messages=HI, tools=[TOOL])  # type: ignore[list-item]
    results = [{"type": "tool_result", "tool_use_id": block.id, "content": "rain"} for block in first.content]  # type: ignore[union-attr]
    history: Any = [*HI, {"role": "assistant", "content": first.content}, {"role": "user", "content": results}]
    say(server, "rain in both")
    second = client.messages.create(model="fake", max_tokens=500, messages=history, tools=[TOOL])  # type: ignore[list-item]
    assert second.content[0].text == "rain in both"  # type: ignore[union-attr]


async def test_the_asynchronous_sdk_streams_text(live: tuple[ServerUnderTest, str], server: ServerUnderTest) -> None:
    async with (
        anthropic.AsyncAnthropic(base_url=live[1], api_key="key", max_retries=0, timeout=20) as client,
        client.messages.stream(model="fake", max_tokens=50, messages=HI) as stream,
    ):
        assert "".join([text async for text in stream.text_stream]) == "abcdefgh"


async def test_the_asynchronous_sdk_calls_tools(live: tuple[ServerUnderTest, str], server: ServerUnderTest) -> None:
    say(server, CALLS)
    body: dict[str, Any] = {"model": "fake", "max_tokens": 500, "messages": HI, "tools": [TOOL]}
    async with anthropic.AsyncAnthropic(base_url=live[1], api_key="key", max_retries=0, timeout=20) as client:
        reply = await client.messages.create(**body)
        async with client.messages.stream(**body) as stream:
            streamed = await stream.get_final_message()
        assert (await client.messages.count_tokens(model="fake", messages=HI)).input_tokens > 0
        with pytest.raises(anthropic.NotFoundError):
            await client.messages.create(**body | {"model": "nope"})
    for one in (reply, streamed):
        assert [block.input for block in one.content] == ARGUMENTS  # type: ignore[union-attr]


async def test_breaking_out_of_its_stream_ends_the_request(
    live: tuple[ServerUnderTest, str], server: ServerUnderTest
) -> None:
    say(server, "a" * 2000)
    async with (
        anthropic.AsyncAnthropic(base_url=live[1], api_key="key", max_retries=0, timeout=20) as client,
        client.messages.stream(model="fake", max_tokens=1500, messages=HI) as stream,
    ):
        await anext(stream.text_stream)
    wait_until(lambda: is_idle(server.llm.stats()))


def test_the_sdk_raises_its_own_errors(server: ServerUnderTest, client: anthropic.Anthropic) -> None:
    body: dict[str, Any] = {"model": "fake", "max_tokens": 50, "messages": HI}
    with pytest.raises(anthropic.NotFoundError, match="nope"):
        client.messages.create(**body | {"model": "nope"})
    with pytest.raises(anthropic.BadRequestError, match="temperature"):
        client.messages.create(**body, extra_body={"temperature": 9})
    with pytest.raises(anthropic.BadRequestError, match="not supported"):
        client.messages.create(**body, extra_body={"container": "x"})
    with pytest.raises(anthropic.AuthenticationError):
        client.with_options(api_key="wrong").messages.create(**body)
    failing_after(server, 3)
    with pytest.raises(anthropic.APIStatusError, match="on purpose"), client.messages.stream(**body) as stream:
        stream.get_final_message()


BAD: list[dict[str, Any]] = [
    {"messages": []},
    {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
    {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": 5}]}]},
    {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": {}}]}]},
    {"messages": [{"role": "system", "content": "x"}]},
    {"max_tokens": None},
    {"tools": [{"name": "x"}]},
    {"tool_choice": {"type": "any"}},
    {"tools": [TOOL], "tool_choice": {"type": "tool"}},
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("body", BAD)
async def test_bad_bodies_are_a_400_of_the_same_shape(
    server: ServerUnderTest, body: dict[str, Any], stream: bool
) -> None:
    async with server.client(headers={"X-Api-Key": "key"}) as client:
        response = await client.post(PATH, json={"messages": HI, "max_tokens": 5, "stream": stream} | body)
    assert (response.status_code, response.json()["type"]) == (400, "error"), response.text
    assert set(response.json()["error"]) == {"type", "message"}


async def test_a_begun_answer_is_gone_on_with(server: ServerUnderTest) -> None:
    async with server.client(headers={"X-Api-Key": "key"}) as client:
        messages = [*HI, {"role": "assistant", "content": "ab"}]
        reply = answered(await client.post(PATH, json={"messages": messages, "max_tokens": 5}))
        same = answered(
            await client.post(
                "/v1/chat/completions",
                json={"messages": messages, "max_tokens": 5, "continue_final_message": True},
            )
        )
        counted = answered(await client.post(f"{PATH}/count_tokens", json={"messages": messages}))
    usage = reply["usage"]
    assert counted == {"input_tokens": same["usage"]["prompt_tokens"]}
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == same["usage"]["prompt_tokens"]
