"""`Paged` with tools, reasoning and pydantic classes, and the agents of LlamaIndex on top of that."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any, Literal

import pytest
from llama_index.core import PromptTemplate
from llama_index.core.agent.workflow import AgentStream, FunctionAgent, ToolCallResult
from llama_index.core.base.llms.types import ChatMessage, ChatResponse, TextBlock, ThinkingBlock, ToolCallBlock
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.memory import ChatMemoryBuffer
from llama_index.core.program.utils import FlexibleModel
from llama_index.core.tools import FunctionTool
from llama_index.core.types import PydanticProgramMode
from pydantic import BaseModel, Field, field_validator

from helpers import is_given_up, wait_until
from helpers_llama_index import (
    FOREVER,
    Recorder,
    Script,
    acollected,
    as_messages,
    in_loop,
    make_paged,
    make_paged_llm,
    rendered,
)
from helpers_models import CHAT_TEMPLATE, make_model, save_model
from llama_index.llms.paged import Paged
from paged_backend import LLM, InvalidRequestError

THINKING_TEMPLATE = CHAT_TEMPLATE + "{# <think> </think> #}"
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'
OTHER_CALL = '<tool_call>\n{"name": "colour_of", "arguments": {"thing": "der Himmel, größer"}}\n</tool_call>'
ARGUMENTS = {"a": 2, "b": 3}


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


class Thing(BaseModel):
    thing: Literal["sky", "grass"]


def colour_of(thing: str) -> str:
    """The colour of a thing."""
    return {"sky": "blue", "grass": "green"}[thing]


TOOLS = [FunctionTool.from_defaults(fn=add), FunctionTool.from_defaults(fn=colour_of, fn_schema=Thing)]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Paged:
    """A real model of random weights: what is right about its answers, the grammar made right."""
    folder = save_model(tmp_path_factory.mktemp("model"), model=make_model(max_position_embeddings=4096))
    return Paged(model=folder, temperature=1.0, seed=1, engine_kwargs={"num_gpu_blocks_override": 256})


def calls_of(response: ChatResponse) -> list[tuple[str, Any]]:
    return [(b.tool_name, b.tool_kwargs) for b in response.message.blocks if isinstance(b, ToolCallBlock)]


# Tools.

WAYS: dict[str, Callable[..., list[ChatResponse]]] = {
    "chat_with_tools": lambda model, *args, **kwargs: [model.chat_with_tools(*args, **kwargs)],
    "achat_with_tools": lambda model, *args, **kwargs: [in_loop(model.achat_with_tools(*args, **kwargs))],
    "stream_chat_with_tools": lambda model, *args, **kwargs: list(model.stream_chat_with_tools(*args, **kwargs)),
    "astream_chat_with_tools": lambda model, *args, **kwargs: in_loop(
        acollected(model.astream_chat_with_tools(*args, **kwargs))
    ),
}

each_way = pytest.mark.parametrize("way", WAYS)


@each_way
def test_a_call_comes_as_a_block_and_not_as_text(llm: LLM, way: str) -> None:
    model = make_paged(llm, f"Let me see. {CALL}")
    response = WAYS[way](model, TOOLS, "What is 2 + 3?")[-1]
    assert calls_of(response) == [("add", ARGUMENTS)]
    assert (response.message.content or "").strip() == "Let me see."
    assert response.raw["usage"]["completion_tokens"] > 20
    (selection,) = model.get_tool_calls_from_response(response)
    assert (selection.tool_name, selection.tool_kwargs) == ("add", ARGUMENTS)
    assert selection.tool_id


@each_way
def test_the_prompt_lists_the_tools(llm: LLM, runner: Recorder, way: str) -> None:
    WAYS[way](make_paged(llm, CALL), TOOLS, "What is 2 + 3?", chat_history=[ChatMessage(role="system", content="Hm.")])
    (prompt,) = runner.prompts
    assert '"add"' in prompt
    assert "Add two numbers." in prompt
    assert prompt.count("What is 2 + 3?") == 1


@each_way
def test_an_answer_without_a_call_has_none(llm: LLM, way: str) -> None:
    model = make_paged(llm, "Five.")
    response = WAYS[way](model, TOOLS, "What is 2 + 3?")[-1]
    assert response.message.blocks == [TextBlock(text="Five.")]
    assert model.get_tool_calls_from_response(response, error_on_no_tool_call=False) == []
    with pytest.raises(ValueError, match=r"'Five\.'.*tool_required=True"):
        model.get_tool_calls_from_response(response)


@each_way
def test_several_calls_come_only_if_they_may(llm: LLM, way: str) -> None:
    model = make_paged(llm, f"{CALL}\n{OTHER_CALL}")
    both = WAYS[way](model, TOOLS, "Go.", allow_parallel_tool_calls=True)[-1]
    assert calls_of(both) == [("add", ARGUMENTS), ("colour_of", {"thing": "der Himmel, größer"})]
    assert calls_of(WAYS[way](model, TOOLS, "Go.", allow_parallel_tool_calls=False)[-1]) == [("add", ARGUMENTS)]


@pytest.mark.parametrize("way", ["stream_chat_with_tools", "astream_chat_with_tools"])
def test_a_streamed_call_grows_and_ends_as_the_whole_one(way: str) -> None:
    with make_paged_llm(step_seconds=0.002)[0] as llm:
        responses = WAYS[way](make_paged(llm, OTHER_CALL), TOOLS, "Go.")
    kwargs = [call[1].get("thing", "") for response in responses for call in calls_of(response)]
    assert kwargs[-1] == "der Himmel, größer"
    assert all(kwargs[-1].startswith(text) for text in kwargs)
    assert len(set(kwargs)) > 3
    assert "".join(response.delta for response in responses).strip() == ""


def test_what_is_no_call_stays_text_and_is_named(llm: LLM) -> None:
    text = '<tool_call>\n{"name": "add", "arguments": [}\n</tool_call>'
    response = make_paged(llm, text).chat_with_tools(TOOLS, "Go.")
    assert calls_of(response) == []
    assert response.message.content == text
    assert response.raw["invalid_tool_calls"][0]["name"] == "add"


def test_calls_and_results_go_back_to_the_model(llm: LLM, runner: Recorder) -> None:
    model = make_paged(llm, CALL)
    call = model.chat_with_tools(TOOLS, "What is 2 + 3?").message
    result = ChatMessage(role="tool", content="5", additional_kwargs={"tool_call_id": call.blocks[-1].tool_call_id})
    model.chat_with_tools(TOOLS, chat_history=[*as_messages("What is 2 + 3?"), call, result])
    assert '"a": 2' in runner.prompts[1]
    assert "5" in runner.prompts[1].rpartition('"a": 2')[2]


@each_way
@pytest.mark.parametrize(
    ("choice", "allowed"),
    [
        ({"tool_required": True}, {"add", "colour_of"}),
        ({"tool_choice": "any"}, {"add", "colour_of"}),
        ({"tool_choice": "colour_of"}, {"colour_of"}),
        (
            {"tool_choice": {"type": "function", "function": {"name": "colour_of"}}, "tool_required": True},
            {"colour_of"},
        ),
    ],
)
def test_a_required_call_is_made_whatever_the_model_thinks(
    tiny: Paged, way: str, choice: dict[str, Any], allowed: set[str]
) -> None:
    response = WAYS[way](tiny, TOOLS[1:] if allowed == {"colour_of"} else TOOLS, "Go.", max_tokens=400, **choice)[-1]
    ((name, kwargs),) = calls_of(response)
    assert name in allowed
    assert set(kwargs) == ({"thing"} if name == "colour_of" else {"a", "b"})
    assert kwargs["thing"] in ("sky", "grass") if name == "colour_of" else isinstance(kwargs["a"], int)


def test_a_tool_that_does_not_exist_cannot_be_chosen(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match=r"'subtract'.*'add', 'colour_of'"):
        make_paged(llm).chat_with_tools(TOOLS, "Go.", tool_choice="subtract")


def test_without_tools_it_is_a_chat(llm: LLM, runner: Recorder) -> None:
    assert make_paged(llm, "Hi.").chat_with_tools([], "Hello.", tool_required=True).message.content == "Hi."
    assert runner.prompts == [rendered(("user", "Hello."))]


def test_predict_and_call_runs_the_tool(llm: LLM) -> None:
    model = make_paged(llm, CALL)
    assert str(model.predict_and_call(TOOLS, "What is 2 + 3?")) == "5"
    assert str(in_loop(model.apredict_and_call(TOOLS, "What is 2 + 3?"))) == "5"


# Reasoning.


@each_way
def test_reasoning_is_a_block_of_its_own(llm: LLM, way: str) -> None:
    model = make_paged(llm, f"<think>Two and three.</think>{CALL}", chat_template=THINKING_TEMPLATE)
    responses = WAYS[way](model, TOOLS, "What is 2 + 3?")
    thought, call = responses[-1].message.blocks
    assert isinstance(thought, ThinkingBlock)
    assert thought.content == "Two and three."
    assert isinstance(call, ToolCallBlock)
    if "stream" in way:
        deltas = [response.additional_kwargs.get("thinking_delta", "") for response in responses]
        assert "".join(deltas) == "Two and three."


def test_reasoning_is_not_part_of_a_completion(llm: LLM) -> None:
    model = make_paged(llm, "<think>Hm.</think>Five.", chat_template=THINKING_TEMPLATE)
    assert model.complete("What is 2 + 3?").text == "Five."
    *_, last = model.stream_complete("What is 2 + 3?")
    assert last.text == "Five."


# Agents.


ignores_pydantic_deprecations = pytest.mark.filterwarnings("ignore::pydantic.warnings.PydanticDeprecationWarning")


async def run_agent(model: Paged, *, streaming: bool, **options: Any) -> tuple[str, list[Any]]:
    agent = FunctionAgent(tools=TOOLS, llm=model, streaming=streaming, system_prompt="Be exact.", **options)
    handler = agent.run("What is 2 + 3?", memory=ChatMemoryBuffer.from_defaults(token_limit=4000))
    events = [event async for event in handler.stream_events()]
    return str(await handler), events


@ignores_pydantic_deprecations
@pytest.mark.parametrize("streaming", [True, False])
def test_an_agent_calls_its_tools_and_answers(llm: LLM, runner: Recorder, streaming: bool) -> None:
    model = Paged(llm=llm, extra_args={"forced": Script(f"{CALL}\n{OTHER_CALL}", CALL, "It is 5.")})
    answer, events = in_loop(run_agent(model, streaming=streaming))
    assert answer == "It is 5."
    results = [event.tool_output.raw_output for event in events if isinstance(event, ToolCallResult)]
    assert results.count(5) == 2
    assert len(runner.prompts) == 3
    assert runner.prompts[0].count("Be exact.") == 1
    if streaming:
        deltas = [event.delta for event in events if isinstance(event, AgentStream)]
        assert "".join(deltas).strip().endswith("It is 5.")


@ignores_pydantic_deprecations
def test_an_agents_first_tool_can_be_named(llm: LLM) -> None:
    model = Paged(llm=llm, extra_args={"forced": Script(CALL, "It is 5.")})
    assert in_loop(run_agent(model, streaming=True, initial_tool_choice="add"))[0] == "It is 5."


@ignores_pydantic_deprecations
def test_eight_agents_share_batches() -> None:
    async def run_all(llm: LLM) -> list[tuple[str, list[Any]]]:
        models = [Paged(llm=llm, extra_args={"forced": Script(CALL, "It is 5. " * 20)}) for _ in range(8)]
        return await asyncio.gather(*(run_agent(model, streaming=True) for model in models))

    with make_paged_llm(step_seconds=0.003)[0] as llm:
        assert [answer for answer, _ in in_loop(run_all(llm))] == [("It is 5. " * 20)] * 8
        assert llm.stats().largest_batch >= 4


# Objects of a class.


class Song(BaseModel):
    """A song."""

    title: str
    seconds: int = Field(description="How long it is.")
    tags: list[str] = []


SONG = {"title": "Grün 🙂", "seconds": 120, "tags": ["slow", "old"]}
PROMPT = PromptTemplate("Make up a song about {topic}.")

PREDICTIONS: dict[str, Callable[..., list[Any]]] = {
    "structured_predict": lambda model, *args, **kwargs: [model.structured_predict(*args, **kwargs)],
    "astructured_predict": lambda model, *args, **kwargs: [in_loop(model.astructured_predict(*args, **kwargs))],
    "stream_structured_predict": lambda model, *args, **kwargs: list(model.stream_structured_predict(*args, **kwargs)),
    "astream_structured_predict": lambda model, *args, **kwargs: in_loop(
        acollected(model.astream_structured_predict(*args, **kwargs))
    ),
}

each_prediction = pytest.mark.parametrize("way", PREDICTIONS)


def singing(llm: LLM, **settings: Any) -> Paged:
    return make_paged(llm, json.dumps(SONG, ensure_ascii=False), **settings)


@each_prediction
def test_every_prediction_ends_with_the_same_object(llm: LLM, way: str) -> None:
    assert PREDICTIONS[way](singing(llm), Song, PROMPT, topic="grass")[-1] == Song(**SONG)


@each_prediction
def test_the_model_is_told_the_schema_and_the_system_prompt_once(llm: LLM, runner: Recorder, way: str) -> None:
    PREDICTIONS[way](singing(llm, system_prompt="Be brief."), Song, PROMPT, topic="grass")
    (prompt,) = runner.prompts
    assert prompt.count("Be brief.") == 1
    assert prompt.count("Make up a song about grass.") == 1
    assert json.dumps(Song.model_json_schema()) in prompt


@pytest.mark.parametrize("way", ["stream_structured_predict", "astream_structured_predict"])
def test_streams_give_what_there_is_of_the_object(way: str) -> None:
    with make_paged_llm(step_seconds=0.002)[0] as llm:
        objects = PREDICTIONS[way](singing(llm), Song, PROMPT, topic="grass")
    titles = [one.title for one in objects if one.title is not None]
    assert all("Grün 🙂".startswith(title) for title in titles)
    assert len(set(titles)) > 3
    assert isinstance(objects[0], FlexibleModel)
    assert {len(one.tags or []) for one in objects} == {0, 1, 2}
    assert type(objects[-1]) is Song


@each_prediction
def test_a_cut_answer_is_an_error_that_says_so(llm: LLM, way: str) -> None:
    with pytest.raises(ValueError, match="before its Song was complete; raise max_tokens"):
        PREDICTIONS[way](singing(llm), Song, PROMPT, llm_kwargs={"max_tokens": 10}, topic="grass")


@each_prediction
def test_a_validator_of_the_class_has_the_last_word(llm: LLM, way: str) -> None:
    class ShortSong(Song):
        @field_validator("seconds")
        @classmethod
        def _is_short(cls, seconds: int) -> int:
            if seconds > 60:
                raise ValueError("too long")
            return seconds

    with pytest.raises(ValueError, match="too long"):
        PREDICTIONS[way](singing(llm), ShortSong, PROMPT, topic="grass")


class Choice(BaseModel):
    colour: Literal["red", "green"]
    is_dark: bool


@each_prediction
def test_a_model_cannot_but_follow_the_schema(tiny: Paged, way: str) -> None:
    for seed in range(3):
        found = PREDICTIONS[way](tiny, Choice, PROMPT, llm_kwargs={"seed": seed, "max_tokens": 200}, topic="grass")[-1]
        assert found.colour in ("red", "green")


@pytest.mark.parametrize("way", ["structured_predict", "astructured_predict"])  # text programs do not stream
def test_another_program_mode_asks_its_own_way(llm: LLM, way: str) -> None:
    model = singing(llm, pydantic_program_mode=PydanticProgramMode.LLM)
    assert PREDICTIONS[way](model, Song, PROMPT, topic="grass")[-1] == Song(**SONG)


def test_function_calls_can_be_the_way_to_objects(llm: LLM) -> None:
    call = json.dumps({"name": "Song", "arguments": SONG})
    model = make_paged(llm, f"<tool_call>\n{call}\n</tool_call>", pydantic_program_mode=PydanticProgramMode.FUNCTION)
    assert model.structured_predict(Song, PROMPT, topic="grass") == Song(**SONG)


@ignores_pydantic_deprecations
def test_a_structured_llm_answers_with_objects(llm: LLM) -> None:
    model = singing(llm).as_structured_llm(Song)
    messages = as_messages("Make up a song.")
    assert model.complete("Make up a song.").raw == Song(**SONG)
    assert model.chat(messages).raw == Song(**SONG)
    assert in_loop(model.achat(messages)).raw == Song(**SONG)
    assert list(model.stream_chat(messages))[-1].raw == Song(**SONG)
    assert in_loop(acollected(model.astream_chat(messages)))[-1].raw == Song(**SONG)


class EventLog(BaseEventHandler):
    names: list[str]

    def handle(self, event: Any, **kwargs: Any) -> None:
        self.names.append(type(event).__name__)


@each_prediction
def test_instrumentation_sees_one_prediction(llm: LLM, way: str) -> None:
    log, root = EventLog(names=[]), get_dispatcher()
    root.add_event_handler(log)
    try:
        PREDICTIONS[way](singing(llm), Song, PROMPT, topic="grass")
    finally:
        root.event_handlers.remove(log)
    predictions = [name for name in log.names if name.startswith("LLMStructured") and "InProgress" not in name]
    assert predictions == ["LLMStructuredPredictStartEvent", "LLMStructuredPredictEndEvent"]


async def begun(objects: AsyncIterator[Any]) -> None:
    async for _ in objects:
        break


def test_leaving_a_stream_of_objects_frees_its_blocks() -> None:
    with make_paged_llm(step_seconds=0.003)[0] as llm:
        endless = {"extra_args": {"forced": [*b'{"title": "', *FOREVER["extra_args"]["forced"]]}}
        model = Paged(llm=llm, **endless)
        for _ in model.stream_structured_predict(Song, PROMPT, topic="grass"):
            break
        wait_until(lambda: is_given_up(llm.stats()))

        async def leave() -> None:
            await begun(await model.astream_structured_predict(Song, PROMPT, topic="grass"))
            for _ in range(20):
                await asyncio.sleep(0)
            wait_until(lambda: is_given_up(llm.stats()))

        in_loop(leave())
