"""Tools and reasoning through `ChatPaged`: what reaches the prompt, and what comes back."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any, TypedDict

import pytest
from langchain_core.caches import InMemoryCache
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_core.utils.function_calling import convert_to_openai_tool
from pydantic import BaseModel

from helpers_langchain import SAY, ignores_beta_warnings, joined, make_llm, num_finished, within_deadline
from helpers_models import make_model, make_tokenizer
from langchain_paged import ChatPaged
from langchain_paged.tools import to_structured_outputs, to_tool_choice
from paged_backend import LLM, StructuredOutputsParams

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "zwei"}}\n</tool_call>'
OTHER_CALL = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'


@tool
def add(a: int, b: str) -> str:
    """Put together."""
    return f"{a}{b}"


@tool
def now() -> str:
    """The time."""
    return "noon"


def as_function(a: int, b: str) -> str:
    """Put together."""
    return f"{a}{b}"


class AsClass(BaseModel):
    """Put together."""

    a: int
    b: str


class AsTypedDict(TypedDict):
    """Put together."""

    a: int
    b: str


async def ajoined(chunks: AsyncIterator[Any]) -> Any:
    return joined([chunk async for chunk in chunks])


async def v3_output(model: Any, question: str) -> AIMessage:
    message: AIMessage = await (await model.astream_events(question, version="v3")).output
    return message


WAYS: dict[str, Callable[[Any, str], AIMessage | Awaitable[AIMessage]]] = {
    "invoke": lambda model, question: model.invoke(question),
    "stream": lambda model, question: joined(model.stream(question)),
    "batch": lambda model, question: model.batch([question])[0],
    "v3": lambda model, question: model.stream_events(question, version="v3").output,
    "ainvoke": lambda model, question: model.ainvoke(question),
    "astream": lambda model, question: ajoined(model.astream(question)),
    "async v3": v3_output,
}


def ask(way: str, model: Any, question: str) -> AIMessage:
    async def ask_async(answer: Awaitable[AIMessage]) -> AIMessage:
        message: AIMessage = await within_deadline(answer)
        return message

    answer = WAYS[way](model, question)
    return answer if isinstance(answer, AIMessage) else asyncio.run(ask_async(answer))


def calls(message: AIMessage) -> list[tuple[str, Any]]:
    return [(call["name"], call["args"]) for call in message.tool_calls]


# What reaches the prompt.


TEMPLATE = (
    "{% for t in tools or [] %}[{{ t.function.name }} {{ t.function.parameters | tojson }}]{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize("one", [add, as_function, AsClass, AsTypedDict, convert_to_openai_tool(add)])
def test_bound_tools_of_any_kind_reach_the_prompt(llm: LLM, one: Any) -> None:
    model = ChatPaged(llm=llm, chat_template=TEMPLATE)
    plain, bound = model.invoke("Hi."), model.bind_tools([one]).invoke("Hi.")
    definition = convert_to_openai_tool(one)["function"]
    assert definition["parameters"]["properties"].keys() == {"a", "b"}
    assert plain.usage_metadata is not None and bound.usage_metadata is not None
    num_added = bound.usage_metadata["input_tokens"] - plain.usage_metadata["input_tokens"]
    assert num_added > len(definition["name"]) + len("properties") + 2
    assert model.get_num_tokens_from_messages([HumanMessage("Hi.")], [one]) == bound.usage_metadata["input_tokens"]


def test_tools_can_be_given_to_a_single_call(llm: LLM) -> None:
    assert calls(ChatPaged(llm=llm).invoke(SAY + CALL, tools=[add])) == [("add", {"a": 1, "b": "zwei"})]


def test_without_tools_what_looks_like_a_call_is_text(llm: LLM) -> None:
    answer = ChatPaged(llm=llm).invoke(SAY + CALL)
    assert (answer.content, answer.tool_calls) == (CALL, [])


def test_a_history_of_calls_and_results_can_be_sent(llm: LLM) -> None:
    model = ChatPaged(llm=llm, chat_template=TEMPLATE).bind_tools([add])
    history = [
        HumanMessage("Add."),
        AIMessage("", tool_calls=[{"name": "add", "args": {"a": 1, "b": "x"}, "id": "1", "type": "tool_call"}]),
        ToolMessage("1x", tool_call_id="1", status="error"),
        HumanMessage("Again."),
    ]
    content = str(model.invoke(history).content)
    assert content.endswith("Again.")
    assert "1x" in content  # this template knows no results of tools, so that they come with what the user says


@pytest.mark.parametrize(
    ("choice", "wanted"),
    [
        (None, None),
        (False, None),
        ("auto", "auto"),
        ("none", "none"),
        ("any", "required"),
        ("required", "required"),
        (True, "required"),
        ("add", {"type": "function", "function": {"name": "add"}}),
        ({"type": "function", "function": {"name": "add"}}, {"type": "function", "function": {"name": "add"}}),
        ({"type": "tool", "name": "add"}, {"type": "function", "function": {"name": "add"}}),
    ],
)
def test_every_way_to_choose_a_tool_is_understood(llm: LLM, choice: Any, wanted: Any) -> None:
    assert to_tool_choice(choice) == wanted
    bound: Any = ChatPaged(llm=llm).bind_tools([add, now], tool_choice=choice)
    assert bound.kwargs.get("tool_choice") == wanted
    answer = bound.invoke(SAY + CALL)
    assert bool(answer.tool_calls) == (choice != "none")


def test_a_choice_that_is_no_tool_is_refused_when_it_is_bound_or_sent(llm: LLM) -> None:
    with pytest.raises(ValueError, match="names the tool 'sub', which is not among"):
        ChatPaged(llm=llm).bind_tools([add], tool_choice="sub")
    with pytest.raises(ValueError, match="names the tool 'sub', which is not among"):
        ChatPaged(llm=llm).invoke("Hi.", tools=[add], tool_choice="sub")
    with pytest.raises(ValueError, match="tool_choice=5"):
        ChatPaged(llm=llm).bind_tools([add], tool_choice=5)  # type: ignore[arg-type]


# What comes back.


@ignores_beta_warnings
@pytest.mark.parametrize("way", WAYS)
def test_calls_come_back_the_same_every_way(llm: LLM, way: str) -> None:
    answer = ask(way, ChatPaged(llm=llm).bind_tools([add, now]), f"{SAY}I call.\n{CALL}\n{OTHER_CALL}")
    assert calls(answer) == [("add", {"a": 1, "b": "zwei"}), ("now", {})]
    assert answer.text.strip() == "I call."
    assert len({call["id"] for call in answer.tool_calls} - {None}) == 2
    assert answer.invalid_tool_calls == []


@ignores_beta_warnings
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("cut", [2, 8, 12])
def test_a_call_that_is_cut_off_is_invalid_every_way(llm: LLM, way: str, cut: int) -> None:
    # LangChain completes arguments that break off, so that a cut-off call could pass for a whole one.
    arguments = CALL.index('{"a"')
    model = ChatPaged(llm=llm, max_tokens=arguments + cut).bind_tools([add])
    answer = ask(way, model, SAY + CALL)
    assert answer.tool_calls == []
    if "v3" not in way:  # LangChain 1.8's v3 events leave them out
        assert [call["name"] for call in answer.invalid_tool_calls] == ["add"]
    assert answer.response_metadata["finish_reason"] == "length"


@ignores_beta_warnings
@pytest.mark.parametrize("way", ["invoke", "stream", "ainvoke", "astream"])
def test_output_version_v1_has_calls_and_text_as_blocks(llm: LLM, way: str) -> None:
    model = ChatPaged(llm=llm, output_version="v1").bind_tools([add])
    answer = ask(way, model, f"{SAY}I call.\n{CALL}")
    assert isinstance(answer.content, list)
    blocks = [block for block in answer.content if isinstance(block, dict)]
    assert [block["type"] for block in blocks] == ["text", "tool_call"]
    assert (blocks[1]["name"], blocks[1]["args"]) == ("add", {"a": 1, "b": "zwei"})


def test_arguments_stream_in_pieces_and_name_and_id_come_once(slow_llm: LLM) -> None:
    chunks = list(ChatPaged(llm=slow_llm).bind_tools([add]).stream(SAY + CALL))
    pieces = [piece for chunk in chunks if isinstance(chunk, AIMessageChunk) for piece in chunk.tool_call_chunks]
    assert [piece["name"] for piece in pieces if piece["name"]] == ["add"]
    assert len([piece["id"] for piece in pieces if piece["id"]]) == 1
    assert json.loads("".join(piece["args"] or "" for piece in pieces)) == {"a": 1, "b": "zwei"}
    assert len(pieces) > 2


def test_parallel_tool_calls_can_be_switched_off(llm: LLM) -> None:
    bound: Any = ChatPaged(llm=llm).bind_tools([add, now], parallel_tool_calls=False)
    assert bound.kwargs["parallel_tool_calls"] is False
    assert calls(bound.invoke(f"{SAY}{CALL}\n{OTHER_CALL}")) == [("add", {"a": 1, "b": "zwei"})]


def test_an_llm_cache_tells_tools_and_choices_apart(llm: LLM) -> None:
    model = ChatPaged(llm=llm, cache=InMemoryCache())
    ways = [model, model.bind_tools([add]), model.bind_tools([now]), model.bind_tools([add], tool_choice="none")]
    for _ in range(2):
        for way in ways:
            way.invoke("Hi.")
    assert num_finished(llm) == len(ways)


# Forced, on a model that knows nothing.


@pytest.fixture(scope="module")
def random_llm() -> Iterator[LLM]:
    """Random weights: only a grammar makes it call anything."""
    with LLM(make_model(max_position_embeddings=2048), make_tokenizer(), num_gpu_blocks_override=256) as llm:
        yield llm


class Pick(BaseModel):
    """Choose."""

    sure: bool


class Count(BaseModel):
    """Count."""

    up: bool


@pytest.mark.parametrize(
    ("choice", "names"),
    [("any", {"Pick", "Count"}), (True, {"Pick", "Count"}), ("Pick", {"Pick"}), ("Count", {"Count"})],
)
def test_a_forced_call_is_made_by_any_model_and_follows_the_schema(
    random_llm: LLM, choice: Any, names: set[str]
) -> None:
    model = ChatPaged(llm=random_llm, temperature=0, max_tokens=150)
    answer = model.bind_tools([Pick, Count], tool_choice=choice, parallel_tool_calls=False).invoke("Hi.")
    (call,) = answer.tool_calls
    assert call["name"] in names
    assert list(map(type, call["args"].values())) == [bool]


# Reasoning.


REASONED = f"{SAY}<think>\nA colour, then.\n</think>\n\nBlue."


@ignores_beta_warnings
@pytest.mark.parametrize("way", WAYS)
def test_reasoning_is_kept_apart_from_the_answer(way: str) -> None:
    with make_llm(reasoning_parser="qwen3") as llm:
        answer = ask(way, ChatPaged(llm=llm), REASONED)
    assert answer.text.strip() == "Blue."
    blocks = [block for block in answer.content_blocks if block["type"] == "reasoning"]
    assert "".join(block["reasoning"] for block in blocks).strip() == "A colour, then."
    assert {block["type"] for block in answer.content_blocks} == {"reasoning", "text"}


def test_reasoning_is_additional_to_the_content() -> None:
    with make_llm(reasoning_parser="qwen3") as llm:
        answer = ChatPaged(llm=llm).invoke(REASONED)
        v1 = ChatPaged(llm=llm, output_version="v1").invoke(REASONED)
    assert answer.additional_kwargs["reasoning_content"].strip() == "A colour, then."
    assert "think" not in str(answer.content)
    assert [block["type"] for block in v1.content if isinstance(block, dict)] == ["reasoning", "text"]


# Formats, as OpenAI names them.


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


@pytest.mark.parametrize(
    ("response_format", "wanted"),
    [
        (None, None),
        ({"type": "text"}, None),
        ({"type": "json_object"}, StructuredOutputsParams(json_object=True)),
        (
            {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}},
            StructuredOutputsParams(json=SCHEMA, disable_additional_properties=True),
        ),
        (Pick, StructuredOutputsParams(json=Pick.model_json_schema(), disable_additional_properties=True)),
    ],
)
def test_openais_response_formats_are_understood(response_format: Any, wanted: Any) -> None:
    assert to_structured_outputs(response_format) == wanted


@pytest.mark.parametrize("response_format", [{"type": "xml"}, {"type": "json_schema"}])
def test_an_unknown_response_format_is_refused(llm: LLM, response_format: Any) -> None:
    with pytest.raises(ValueError, match="response_format="):
        ChatPaged(llm=llm).invoke("Hi.", response_format=response_format)


def test_a_field_a_binding_or_a_call_may_ask_for_a_format(random_llm: LLM) -> None:
    of_field = ChatPaged(llm=random_llm, max_tokens=20, structured_outputs={"choice": ["yes", "no"]})
    assert of_field.invoke("Hi.").content in ("yes", "no")
    of_call = ChatPaged(llm=random_llm, max_tokens=20).invoke("Hi.", structured_outputs={"regex": "[0-9]{3}"})
    assert str(of_call.content).isdigit()
    bound = of_field.bind(response_format=Pick).invoke("Hi.", max_tokens=100)
    assert Pick.model_validate_json(str(bound.content))
