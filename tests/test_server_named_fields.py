"""Whatever the engine calls it, a refusal names the field that the client sent."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from helpers_server import ServerUnderTest, make_server, user
from paged_backend import LLM, InvalidRequestError, SamplingParams
from paged_backend.server.batch import answer_line, parse_line

SURROGATE, TOO_LONG = "a\ud83d", "x" * 5000
BAD_TEXTS = (SURROGATE, TOO_LONG)
BAD_SCHEMA = {"type": "nonsense"}
TOOL = {"name": "f", "parameters": {"type": "object", "properties": {"a": BAD_SCHEMA}}, "strict": True}
CALL = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "[1]"}
PATTERN = {"max_pattern_size": 0}
OWN_FIELDS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hi"},
    "/v1/chat/completions": {"messages": [user("hi")]},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": [user("hi")], "max_tokens": 5},
    "/v1/messages/count_tokens": {"messages": [user("hi")]},
}
IN_BATCHES = ("/v1/completions", "/v1/chat/completions", "/v1/responses")
CASES: list[tuple[str, str, dict[str, Any]]] = [
    *(("/v1/completions", "prompt", {"prompt": text}) for text in (*BAD_TEXTS, "", [], [9999], [-1])),
    *(("/v1/completions", "prompt", {"prompt": ["fine", bad]}) for bad in (*BAD_TEXTS, "")),
    ("/v1/completions", "prompt", {"prompt": [[1], [9999]]}),
    ("/v1/completions", "response_format", {"response_format": {"type": "json_schema", "json_schema": {
        "name": "s", "schema": BAD_SCHEMA}}}),
    ("/v1/completions", "structured_outputs", {"structured_outputs": {"json": "no JSON"}}),
    ("/v1/completions", "structured_outputs", {"structured_outputs": {"regex": "a", "whitespace_pattern": " "}}),
    ("/v1/completions", "repetition_detection", {"repetition_detection": PATTERN}),
    ("/v1/completions", "bad_words", {"bad_words": [SURROGATE]}),
    ("/v1/completions", "logprobs", {"logprobs": 10**6, "echo": True}),
    ("/v1/completions", "thinking_token_budget", {"thinking_token_budget": 1}),
    *(("/v1/chat/completions", "messages", {"messages": [user(text)]}) for text in BAD_TEXTS),
    ("/v1/chat/completions", "messages", {"messages": [{"role": "robot", "content": ""}]}),
    ("/v1/chat/completions", "max_tokens", {"max_tokens": -1}),
    ("/v1/chat/completions", "max_completion_tokens", {"max_completion_tokens": -1}),
    ("/v1/chat/completions", "top_logprobs", {"logprobs": True, "top_logprobs": 10**6}),
    ("/v1/chat/completions", "response_format", {"response_format": {"type": "json_schema", "json_schema": {
        "name": "s", "schema": BAD_SCHEMA}}}),
    ("/v1/chat/completions", "tools", {"tools": [{"type": "function", "function": TOOL}]}),
    ("/v1/chat/completions", "tool_choice", {"tool_choice": "required"}),
    ("/v1/chat/completions", "continue_final_message", {
        "continue_final_message": True, "add_generation_prompt": True}),
    *(("/v1/responses", "input", {"input": text}) for text in BAD_TEXTS),
    ("/v1/responses", "input", {"input": [user("hi"), CALL]}),
    ("/v1/responses", "input", {"input": [user("hi"), CALL | {"name": None}]}),
    ("/v1/responses", "max_output_tokens", {"max_output_tokens": -1}),
    ("/v1/responses", "min_tokens", {"max_output_tokens": 1, "min_tokens": 2}),
    ("/v1/responses", "top_logprobs", {"top_logprobs": 10**6}),
    ("/v1/responses", "text", {"text": {"format": {"type": "json_schema", "name": "s", "schema": BAD_SCHEMA}}}),
    ("/v1/responses", "tools", {"tools": [{"type": "function", **TOOL}]}),
    ("/v1/responses", "stop", {"stop": [""]}),
    *(("/v1/messages", "messages", {"messages": [user(text)]}) for text in BAD_TEXTS),
    ("/v1/messages", "system", {"system": [{"type": "image"}]}),
    ("/v1/messages", "output_config", {"output_config": {"format": {"type": "json_schema", "schema": BAD_SCHEMA}}}),
    ("/v1/messages", "output_config", {"output_config": {"effort": "high"}}),
    ("/v1/messages", "tools", {"tools": [{"name": "f", "input_schema": TOOL["parameters"], "strict": True}]}),
    ("/v1/messages", "stop_sequences", {"stop_sequences": [""]}),
    ("/v1/messages", "thinking", {"thinking": {"type": "enabled", "budget_tokens": 1024}}),
    ("/v1/messages", "max_tokens", {"max_tokens": -1}),
    ("/v1/messages/count_tokens", "messages", {"messages": [user(SURROGATE)]}),
    ("/tokenize", "prompt", {"prompt": SURROGATE}),
    ("/tokenize", "messages", {"messages": [user(SURROGATE)]}),
    ("/detokenize", "tokens", {"tokens": [9999]}),
]  # fmt: skip


@pytest.fixture(scope="module")
def server() -> Iterator[ServerUnderTest]:
    server = make_server(engine={"max_logprobs": 5})
    yield server
    server.serving.close()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "param", "body"), CASES)
async def test_a_refusal_names_what_the_client_sent(
    server: ServerUnderTest, path: str, param: str, body: dict[str, Any], stream: bool
) -> None:
    how = {"stream": True} if stream and path in OWN_FIELDS and "count" not in path else {}
    response = await server.post(path, **OWN_FIELDS.get(path, {}) | body | how)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert param in error["message"]
    assert error.get("param", param) == param


@pytest.mark.parametrize(("path", "param", "body"), [case for case in CASES if case[0] in IN_BATCHES])
async def test_so_does_that_of_a_line_of_a_batch(
    server: ServerUnderTest, path: str, param: str, body: dict[str, Any]
) -> None:
    text = json.dumps({"custom_id": "1", "url": path, "body": OWN_FIELDS[path] | body})
    record = await answer_line(server.models, parse_line(1, text, ()))
    assert record["response"]["body"]["error"]["param"] == param


async def test_what_is_true_of_no_field_names_none() -> None:
    server = make_server(template=None)
    error = (await server.post("/v1/chat/completions", messages=[user("hi")])).json()["error"]
    assert error["param"] is None and "no chat template" in error["message"]
    server.serving.close()


@pytest.mark.parametrize(
    ("prompts", "field"),
    [("", "prompt"), (SURROGATE, "prompt"), (TOO_LONG, "prompt"), ([9999], "prompt"), (["a", ""], "prompt")],
)
def test_programs_are_told_the_argument(server: ServerUnderTest, prompts: Any, field: str) -> None:
    assert refused_field(server.llm, "generate", prompts) == field
    if isinstance(prompts, str) and prompts:
        assert refused_field(server.llm, "chat", [user(prompts)]) == "messages"


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("priority", "high"),
        ("cache_salt", ""),
        ("timeout", 0),
        ("request_id", 5),
        ("lora_request", "adapter"),
        ("sampling_params", 5),
        ("sampling_params", [SamplingParams()] * 2),
        ("unknown", 1),
    ],
)
def test_programs_are_told_the_option(server: ServerUnderTest, argument: str, value: Any) -> None:
    assert refused_field(server.llm, "generate", "hi", **{argument: value}) == argument


def refused_field(llm: LLM, method: str, what: Any, **options: Any) -> str | None:
    with pytest.raises(InvalidRequestError) as refusal:
        getattr(llm, method)(what, use_tqdm=False, **options)
    return refusal.value.field
