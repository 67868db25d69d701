"""`with_structured_output`: every kind of schema by every method, whatever the model."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Iterator
from typing import Any, Literal, TypedDict

import pytest
from langchain_core.exceptions import OutputParserException
from pydantic import BaseModel

from helpers_langchain import SAY, within_deadline
from helpers_models import make_model, make_tokenizer
from langchain_paged import ChatPaged
from paged_backend import LLM

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # pydantic.v1 warns of Python 3.14
    from pydantic import v1


class Pick(BaseModel):
    """A choice."""

    colour: Literal["red", "blue"]
    sure: bool


class PickV1(v1.BaseModel):
    """A choice."""

    colour: Literal["red", "blue"]
    sure: bool


class PickDict(TypedDict):
    """A choice."""

    colour: Literal["red", "blue"]
    sure: bool


PICK_FUNCTION = {
    "name": "Pick",
    "description": "A choice.",
    "parameters": {
        "type": "object",
        "properties": {"colour": {"enum": ["red", "blue"], "type": "string"}, "sure": {"type": "boolean"}},
        "required": ["colour", "sure"],
    },
}
SCHEMAS: dict[str, Any] = {
    "pydantic": Pick,
    "pydantic.v1": PickV1,
    "TypedDict": PickDict,
    "JSON schema": Pick.model_json_schema(),
    "OpenAI function": PICK_FUNCTION,
    "OpenAI tool": {"type": "function", "function": PICK_FUNCTION},
}


@pytest.fixture(scope="module")
def random_llm() -> Iterator[LLM]:
    """Random weights: only a grammar makes it write JSON."""
    with LLM(make_model(max_position_embeddings=2048), make_tokenizer(), num_gpu_blocks_override=512) as llm:
        yield llm


@pytest.fixture
def model(random_llm: LLM) -> ChatPaged:
    return ChatPaged(llm=random_llm, temperature=0, max_tokens=200)


def check(found: Any, kind: str) -> None:
    """Of the right type, and valid."""
    if kind.startswith("pydantic"):
        assert type(found) is SCHEMAS[kind]
        found = {"colour": found.colour, "sure": found.sure}
    assert type(found) is dict
    assert found["colour"] in ("red", "blue")
    assert type(found["sure"]) is bool


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
@pytest.mark.parametrize("kind", SCHEMAS)
def test_any_model_gives_an_object_of_the_schema(model: ChatPaged, kind: str, method: Any) -> None:
    check(model.with_structured_output(SCHEMAS[kind], method=method).invoke("Hi."), kind)


@pytest.mark.parametrize("strict", [None, True, False])
@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_strict_may_be_anything(model: ChatPaged, strict: bool | None, method: Any) -> None:
    check(model.with_structured_output(Pick, method=method, strict=strict).invoke("Hi."), "pydantic")


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_async_and_streams_end_with_the_same_object(model: ChatPaged, method: Any) -> None:
    structured = model.with_structured_output(PickDict, method=method)
    invoked = structured.invoke("Hi.")
    assert asyncio.run(within_deadline(structured.ainvoke("Hi."))) == invoked
    assert list(structured.stream("Hi."))[-1] == invoked


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
@pytest.mark.parametrize("kind", SCHEMAS)
def test_an_answer_cut_by_a_stop_string_is_no_object(model: ChatPaged, kind: str, method: Any) -> None:
    structured = model.with_structured_output(SCHEMAS[kind], method=method)
    with pytest.raises(OutputParserException, match="cut off before its end"):
        structured.invoke("Hi.", stop=['"colour'])


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_include_raw_gives_the_answer_too(model: ChatPaged, method: Any) -> None:
    found = model.with_structured_output(Pick, method=method, include_raw=True).invoke("Hi.")
    assert found.keys() == {"raw", "parsed", "parsing_error"}
    check(found["parsed"], "pydantic")
    assert found["parsing_error"] is None
    assert found["raw"].usage_metadata["output_tokens"] > 0


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
@pytest.mark.parametrize("kind", SCHEMAS)
def test_an_answer_that_is_cut_off_is_an_error_and_never_half_an_object(
    model: ChatPaged, kind: str, method: Any
) -> None:
    short = model.model_copy(update={"max_tokens": 20})
    with pytest.raises(OutputParserException, match="cut off before its end"):
        short.with_structured_output(SCHEMAS[kind], method=method).invoke("Hi.")
    found = short.with_structured_output(SCHEMAS[kind], method=method, include_raw=True).invoke("Hi.")
    assert found["parsed"] is None
    assert isinstance(found["parsing_error"], OutputParserException)
    with pytest.raises(OutputParserException, match="cut off before its end"):
        list(short.with_structured_output(SCHEMAS[kind], method=method).stream("Hi."))


@pytest.mark.parametrize("kind", ["pydantic", "pydantic.v1", "TypedDict", "JSON schema"])
def test_json_mode_reads_what_the_prompt_asked_for(llm: LLM, kind: str) -> None:
    model = ChatPaged(llm=llm).with_structured_output(SCHEMAS[kind], method="json_mode")
    check(model.invoke(SAY + '{"colour": "red", "sure": true}'), kind)


def test_json_mode_needs_no_schema_and_the_other_methods_do(llm: LLM) -> None:
    model = ChatPaged(llm=llm)
    assert model.with_structured_output(method="json_mode").invoke(SAY + '{"x": [1]}') == {"x": [1]}
    with pytest.raises(ValueError, match="method='json_schema' needs a schema"):
        model.with_structured_output()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"method": "xml"}, "method='xml' must be one of"), ({"tools": []}, "takes no argument 'tools'")],
)
def test_what_is_not_understood_is_refused(llm: LLM, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ChatPaged(llm=llm).with_structured_output(Pick, **arguments)
