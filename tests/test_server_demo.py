"""The official clients against a server of the demo model: nothing in between is a fake."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import openai
import pytest
import schemathesis
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from pydantic import BaseModel, Field, SecretStr
from transformers import AutoTokenizer

from helpers import wait_until
from helpers_served_demo import KEY, served_demo
from helpers_server import refusal, user
from paged_backend import demo_folder
from test_server_openapi import check

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

MODEL = "demo"
FRANCE: Any = [user("What is the capital of France? Answer in one sentence.")]
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 24}
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER: Any = {
    "type": "function",
    "function": {"name": "get_weather", "description": "The weather of a city.", "parameters": PARAMETERS},
}
ASKED: Any = [user("What is the weather in Bern?")]


class Country(BaseModel):
    name: str = Field(max_length=20)
    capital: str = Field(max_length=20)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with served_demo("--kv-cache-memory", "128MiB", "--max-model-len", "1024", "--dtype", "float32") as url:
        yield url


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def claude(url: str) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=url, api_key=KEY, max_retries=0, timeout=60) as client:
        yield client


def chat_model(url: str, **options: Any) -> ChatOpenAI:
    return ChatOpenAI(
        model=MODEL,
        base_url=f"{url}/v1",
        api_key=SecretStr(KEY),
        temperature=0,
        max_completion_tokens=120,
        stream_usage=True,
        max_retries=0,
        **options,
    )


def metric(url: str, name: str) -> float:
    text = httpx.get(f"{url}/metrics", headers={"Authorization": f"Bearer {KEY}"}).text
    return sum(float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(f"paged:{name}{{"))


def test_a_stream_joins_to_the_whole_answer_and_costs_the_same(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model=MODEL, messages=FRANCE, **GREEDY)
    text = whole.choices[0].message.content
    assert text is not None and "Paris" in text
    chunks = list(
        client.chat.completions.create(
            model=MODEL, messages=FRANCE, **GREEDY, stream=True, stream_options={"include_usage": True}
        )
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == text
    assert len(chunks) > 5 and chunks[-1].usage is not None and whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens
    tokenizer = AutoTokenizer.from_pretrained(demo_folder())
    prompt = tokenizer.apply_chat_template(FRANCE, add_generation_prompt=True, return_dict=True)["input_ids"]
    assert whole.usage is not None and whole.usage.prompt_tokens == len(prompt)
    assert 5 < whole.usage.completion_tokens <= GREEDY["max_tokens"]


def test_samples_of_a_seed_differ_and_come_again(client: openai.OpenAI) -> None:
    def texts() -> list[str | None]:
        reply = client.chat.completions.create(
            model=MODEL,
            messages=[user("Name an animal.")],
            n=3,
            seed=7,
            max_tokens=16,  # type: ignore[list-item]
        )
        return [choice.message.content for choice in reply.choices]

    first = texts()
    assert len(set(first)) > 1 and texts() == first


def test_completions_echo_and_tell_log_probabilities(client: openai.OpenAI) -> None:
    reply = client.completions.create(
        model=MODEL,
        prompt=["The capital of France is", "Once upon a"],
        max_tokens=3,
        temperature=0,
        echo=True,
        logprobs=2,
    )
    for choice, prompt in zip(reply.choices, ("The capital of France is", "Once upon a"), strict=True):
        logprobs = choice.logprobs
        assert choice.text.startswith(prompt) and logprobs is not None
        assert logprobs.tokens is not None and "".join(logprobs.tokens) == choice.text
        assert logprobs.token_logprobs is not None and logprobs.token_logprobs[0] is None
        assert all(-50 < value <= 0 for value in logprobs.token_logprobs[1:])


async def test_many_streams_at_once_are_each_what_they_are_alone(url: str) -> None:
    """Some of which are given up in the middle; nothing of them stays."""
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0, timeout=120) as client:

        async def one(number: int, hang_up: bool = False) -> str:
            messages: Any = [user(f"Count from {number} upwards.")]
            stream = await client.chat.completions.create(
                model=MODEL, messages=messages, temperature=0, max_tokens=40, stream=True
            )
            text = ""
            async with stream:
                async for chunk in stream:
                    text += chunk.choices[0].delta.content or ""
                    if hang_up and text:
                        break
            return text

        alone = [await one(number) for number in range(3)]
        together = await asyncio.gather(*(one(number % 3, hang_up=number % 4 == 3) for number in range(24)))
    for number, text in enumerate(together):
        expected = alone[number % 3]
        assert expected.startswith(text) if number % 4 == 3 else text == expected
    wait_until(lambda: metric(url, "num_requests_running") == 0 == metric(url, "kv_cache_usage_perc"))


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_a_forced_call_is_valid_whole_and_streamed(client: openai.OpenAI, choice: Any) -> None:
    body: dict[str, Any] = {"model": MODEL, "messages": ASKED, "tools": [WEATHER], "tool_choice": choice}
    body |= {"temperature": 0, "max_tokens": 80, "parallel_tool_calls": False}
    (call,) = client.chat.completions.create(**body).choices[0].message.tool_calls or ()
    assert call.type == "function" and call.function.name == "get_weather"
    assert set(json.loads(call.function.arguments)) == {"city"}
    with client.chat.completions.stream(**body) as stream:
        (streamed,) = stream.get_final_completion().choices[0].message.tool_calls or ()
    assert streamed.function.arguments == call.function.arguments


def test_a_tools_result_is_answered(client: openai.OpenAI) -> None:
    calls = client.chat.completions.create(
        model=MODEL,
        messages=ASKED,
        tools=[WEATHER],
        tool_choice="required",
        parallel_tool_calls=False,
        temperature=0,
        max_tokens=80,
    ).choices[0]
    assert calls.finish_reason == "tool_calls" and calls.message.tool_calls
    result = {"role": "tool", "tool_call_id": calls.message.tool_calls[0].id, "content": "It snows in Bern."}
    answer = client.chat.completions.create(
        model=MODEL, messages=[*ASKED, calls.message.model_dump(exclude_none=True), result], tools=[WEATHER], **GREEDY
    )
    assert answer.choices[0].message.content


async def test_structured_output_is_an_object_whole_and_streamed(client: openai.OpenAI, url: str) -> None:
    body: dict[str, Any] = {"model": MODEL, "messages": [user("Describe France.")], "max_tokens": 100, "seed": 1}
    whole = client.chat.completions.parse(**body, response_format=Country).choices[0].message.parsed
    assert isinstance(whole, Country)
    with client.chat.completions.stream(**body, response_format=Country) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == whole
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0, timeout=60) as asynchronous:
        reply = await asynchronous.chat.completions.parse(**body, response_format=Country)
    assert reply.choices[0].message.parsed == whole
    choices = client.completions.create(
        model=MODEL, prompt="A colour:", max_tokens=9, extra_body={"structured_outputs": {"choice": ["red", "blue"]}}
    )
    assert choices.choices[0].text in ("red", "blue")


def test_responses_are_made_and_streamed(client: openai.OpenAI) -> None:
    body: dict[str, Any] = {"model": MODEL, "input": FRANCE[0]["content"], "temperature": 0, "max_output_tokens": 24}
    whole = client.responses.create(**body, store=False)
    assert "Paris" in whole.output_text
    with client.responses.stream(**body) as stream:
        assert stream.get_final_response().output_text == whole.output_text
    parsed = client.responses.parse(
        model=MODEL, input="Describe France.", text_format=Country, max_output_tokens=100, temperature=0
    )
    assert isinstance(parsed.output_parsed, Country)


def test_vectors_are_the_same_in_both_encodings_and_follow_from_the_text(client: openai.OpenAI) -> None:
    texts = ["The cat sleeps.", "Interest rates rose.", "The cat sleeps."]
    numbers = client.embeddings.create(model=MODEL, input=texts, encoding_format="float").data
    encoded = client.embeddings.create(model=MODEL, input=texts).data  # which the client decodes
    for one, other in zip(numbers, encoded, strict=True):
        assert one.embedding == pytest.approx(other.embedding, abs=1e-4)
        assert math.hypot(*one.embedding) == pytest.approx(1, abs=1e-3)
    first, second, third = (one.embedding for one in numbers)
    assert first == pytest.approx(third, abs=1e-4) and first != pytest.approx(second, abs=1e-2)
    with pytest.raises(openai.BadRequestError):
        client.embeddings.create(model=MODEL, input=texts, dimensions=10**6)


def test_refusals_are_the_clients_own_errors(client: openai.OpenAI, url: str) -> None:
    body: dict[str, Any] = {"model": MODEL, "messages": FRANCE}
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(**{**body, "model": "nope"})
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").models.list()
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as too_long:
            client.chat.completions.create(model=MODEL, messages=[user("long " * 2000)], stream=stream)  # type: ignore[list-item, call-overload]
        assert too_long.value.code == "context_length_exceeded"
        with pytest.raises(openai.BadRequestError) as bad:
            client.chat.completions.create(**body, temperature=-1, stream=stream)
        assert bad.value.param == "temperature"
        with pytest.raises(openai.BadRequestError):
            client.chat.completions.create(**body, stream=stream, extra_body={"nope": 1})
    refusal(httpx.post(f"{url}/v1/chat/completions", content=b"{", headers={"Authorization": f"Bearer {KEY}"}))


def test_anthropics_client_gets_text_whole_and_streamed(claude: anthropic.Anthropic) -> None:
    body: dict[str, Any] = {"model": MODEL, "max_tokens": 24, "messages": FRANCE, "extra_body": {"temperature": 0}}
    whole = claude.messages.create(**body)
    (block,) = whole.content
    assert block.type == "text" and "Paris" in block.text
    with claude.messages.stream(**body) as stream:
        assert "".join(stream.text_stream) == block.text
        final = stream.get_final_message()
    assert final.usage.output_tokens == whole.usage.output_tokens and final.stop_reason == whole.stop_reason
    counted = claude.messages.count_tokens(model=MODEL, messages=FRANCE).input_tokens
    assert counted == whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0)


async def test_anthropics_client_calls_tools_and_raises_its_own_errors(url: str) -> None:
    tool: Any = {"name": "get_weather", "description": "The weather of a city.", "input_schema": PARAMETERS}
    body: dict[str, Any] = {"model": MODEL, "max_tokens": 80, "messages": ASKED, "tools": [tool]}
    body["tool_choice"] = {"type": "any", "disable_parallel_tool_use": True}
    async with anthropic.AsyncAnthropic(base_url=url, api_key=KEY, max_retries=0, timeout=60) as client:
        whole = await client.messages.create(**body)
        async with client.messages.stream(**body) as stream:
            streamed = await stream.get_final_message()
        for message in (whole, streamed):
            (block,) = message.content
            assert block.type == "tool_use" and set(block.input) == {"city"} and message.stop_reason == "tool_use"
        result = {"type": "tool_result", "tool_use_id": whole.content[0].id, "content": "It snows."}
        history = [*ASKED, {"role": "assistant", "content": whole.content}, {"role": "user", "content": [result]}]
        answer = await client.messages.create(**{**body, "messages": history, "tool_choice": {"type": "none"}})
        assert answer.content[0].type == "text"
        with pytest.raises(anthropic.NotFoundError):
            await client.messages.create(**{**body, "model": "nope"})
        with pytest.raises(anthropic.BadRequestError):
            await client.messages.create(**{**body, "max_tokens": 10**6, "messages": [user("long " * 2000)]})
        with pytest.raises(anthropic.AuthenticationError):
            await client.with_options(api_key="wrong").messages.create(**body)


async def test_langchains_model_and_vectors_come_from_it(url: str) -> None:
    model = chat_model(url)
    whole = model.invoke(FRANCE)
    assert "Paris" in str(whole.content) and whole.usage_metadata is not None
    assert "".join(str(chunk.content) for chunk in model.stream(FRANCE)) == whole.content
    chunks = [chunk async for chunk in model.astream(FRANCE)]
    assert "".join(str(chunk.content) for chunk in chunks) == whole.content
    counts = [chunk.usage_metadata["output_tokens"] for chunk in chunks if chunk.usage_metadata]
    assert sum(counts) == whole.usage_metadata["output_tokens"]
    for method in ("json_schema", "function_calling"):
        structured = model.with_structured_output(Country, method=method)  # type: ignore[arg-type]
        assert isinstance(await structured.ainvoke("Describe France."), Country)
    vectors = OpenAIEmbeddings(
        model=MODEL, base_url=f"{url}/v1", api_key=SecretStr(KEY), check_embedding_ctx_length=False
    ).embed_documents(["one", "two"])
    assert len(vectors) == 2 and len(vectors[0]) == len(vectors[1]) > 100


def test_langchains_model_calls_tools_and_answers_their_results(url: str) -> None:
    model = chat_model(url).bind_tools([WEATHER], tool_choice="any", parallel_tool_calls=False)
    asked = HumanMessage(ASKED[0]["content"])
    call = model.invoke([asked])
    assert isinstance(call, AIMessage) and [set(each["args"]) for each in call.tool_calls] == [{"city"}]
    result = ToolMessage("It snows in Bern.", tool_call_id=call.tool_calls[0]["id"])
    assert chat_model(url).invoke([asked, call, result]).content
    streamed: Any = None
    for chunk in model.stream([asked]):
        streamed = chunk if streamed is None else streamed + chunk
    assert streamed.tool_calls[0]["args"] == call.tool_calls[0]["args"]


@pytest.mark.timeout(600)
def test_what_its_document_allows_and_forbids_is_answered_as_documented() -> None:
    """With short sequences, since whatever is allowed is computed."""
    with served_demo("--kv-cache-memory", "32MiB", "--max-model-len", "64", "--max-num-seqs", "64") as url:
        schema = schemathesis.openapi.from_url(f"{url}/openapi.json", headers={"Authorization": f"Bearer {KEY}"})
        check(schema, max_examples=10, headers={"Authorization": f"Bearer {KEY}"})
        assert httpx.get(f"{url}/health").status_code == 200
