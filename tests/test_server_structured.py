"""`response_format` and `structured_outputs`: whatever the model's logits, the answer is as asked for."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, Literal

import anthropic
import jsonschema
import openai
import pytest
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field

from helpers import FakeRunner
from helpers_server import (
    CHAT_TEMPLATE,
    ScriptedSampler,
    ServerUnderTest,
    events_of,
    make_models,
    make_server,
    refusal,
    user,
)
from helpers_structured import make_llm
from paged_backend.server.app import create_app

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
AS_PERSON = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}


@pytest.fixture(scope="module")
def server() -> Iterator[ServerUnderTest]:
    llm = make_llm()
    llm.get_tokenizer().chat_template = CHAT_TEMPLATE
    models = make_models(llm=llm)
    yield ServerUnderTest(llm, FakeRunner(), ScriptedSampler(), models, create_app(models))
    llm.close()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("extra", [{"response_format": AS_PERSON}, {"structured_outputs": {"json": PERSON}}])
async def test_an_answer_validates(server: ServerUnderTest, extra: dict[str, Any], stream: bool) -> None:
    body = {"messages": [user("hi")], "max_tokens": 200, "seed": 1, **extra}
    if stream:
        chunks = await server.chunks("/v1/chat/completions", **body)
        text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
    else:
        text = (await server.chat(**body))["choices"][0]["message"]["content"]
    jsonschema.validate(json.loads(text), PERSON)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_structure_that_becomes_too_much_is_its_clients_fault(server: ServerUnderTest, stream: bool) -> None:
    schema = {"type": "object", "properties": {f"p{index}": {"type": "integer"} for index in range(3000)}}
    body = {"max_tokens": 30, "seed": 1, "structured_outputs": {"json": schema}}
    response = await server.post("/v1/completions", prompt="hi", stream=stream, **body)
    if stream and response.status_code == 200:
        error = json.loads(events_of(response.text)[-1])["error"]
    else:
        error = refusal(response)
    assert error["code"] == "grammar_too_complex" and error["type"] == "invalid_request_error"
    assert (await server.complete("hi", max_tokens=2))["choices"]


async def test_every_kind_of_structure_is_followed(server: ServerUnderTest) -> None:
    async def text(**structure: Any) -> str:
        body = {"max_tokens": 200, "seed": 1, "structured_outputs": structure}
        return str((await server.complete("hi", **body))["choices"][0]["text"])

    assert await text(choice=["yes", "no"]) in ("yes", "no")
    assert re.fullmatch("[a-c]{3}x", await text(regex="[a-c]{3}x"))
    assert await text(grammar='root ::= "hello"') == "hello"
    assert await text(json={"const": 5}) == "5"


class Person(BaseModel):
    name: str = Field(max_length=10)
    age: int = Field(ge=0, le=99)


class Verdict(BaseModel):
    """Anthropic's SDK leaves lengths and ranges out of its schemas."""

    answer: Literal["yes", "no"]
    is_sure: bool


async def test_the_sdks_get_objects(server: ServerUnderTest) -> None:
    with server.live() as url:
        body: dict[str, Any] = {"model": "fake", "messages": [user("hi")], "response_format": Person, "seed": 1}
        with openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0, timeout=20) as client:
            assert isinstance(client.chat.completions.parse(**body).choices[0].message.parsed, Person)
            with client.chat.completions.stream(**body) as stream:
                assert isinstance(stream.get_final_completion().choices[0].message.parsed, Person)
        with anthropic.Anthropic(base_url=url, api_key="x", max_retries=0, timeout=20) as anthropics:
            wish: dict[str, Any] = {"model": "fake", "messages": [user("hi")], "max_tokens": 200}
            assert isinstance(anthropics.messages.parse(**wish, output_format=Verdict).parsed_output, Verdict)
            with anthropics.messages.stream(**wish, output_format=Verdict) as events:
                assert isinstance(events.get_final_message().parsed_output, Verdict)
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0, timeout=20) as asynchronous:
            reply = await asynchronous.chat.completions.parse(**body)
            assert isinstance(reply.choices[0].message.parsed, Person)
        model = ChatOpenAI(model="fake", base_url=f"{url}/v1", api_key="x", seed=1)  # type: ignore[arg-type]
        for method in ("json_schema", "function_calling"):
            structured = model.with_structured_output(Person, method=method)  # type: ignore[arg-type]
            assert isinstance(await structured.ainvoke("hi"), Person)


async def test_text_is_no_structure(server: ServerUnderTest) -> None:
    plain, text = [
        (await server.chat(max_tokens=8, seed=1, response_format=kind))["choices"] for kind in (None, {"type": "text"})
    ]
    assert plain == text


BAD: list[tuple[str, Any]] = [
    ("response_format", {"type": "json_schema"}),
    ("response_format", {"type": "json_object", "json_schema": {"name": "x", "schema": {}}}),
    ("response_format", {"type": "xml"}),
    ("response_format", {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nonsense"}}}),
    ("structured_outputs", {}),
    ("structured_outputs", {"regex": "a", "choice": ["b"]}),
    ("structured_outputs", {"regex": "("}),
    ("structured_outputs", {"grammar": "not a grammar"}),
    ("structured_outputs", {"choice": []}),
    ("structured_outputs", {"nope": 1}),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("field", "value"), BAD)
async def test_a_bad_structure_is_a_400(server: ServerUnderTest, field: str, value: Any, stream: bool) -> None:
    refusal(await server.post("/v1/chat/completions", messages=[user("hi")], stream=stream, **{field: value}))


async def test_one_structure_is_enough(server: ServerUnderTest) -> None:
    body = {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}
    assert refusal(await server.post("/v1/completions", prompt="a", **body))["param"] == "response_format"


async def test_masked_alternatives_are_finite_numbers() -> None:
    """As `chunks` and `complete` check of every number."""
    server = make_server()
    server.sampler.logprob = float("-inf")
    (choice,) = (await server.chat(max_tokens=2, logprobs=True, top_logprobs=3))["choices"]
    assert [entry["logprob"] for entry in choice["logprobs"]["content"]] == [-9999.0] * 2
    server.serving.close()
