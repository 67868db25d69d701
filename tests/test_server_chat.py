"""`/v1/chat/completions`: messages, streams, and the fields of both."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from helpers_server import (
    END,
    END_WORD,
    FIRST_HALF,
    JSON,
    PARIS,
    SECOND_HALF,
    ServerUnderTest,
    answered,
    make_server,
    refusal,
    user,
)

PATH = "/v1/chat/completions"


@pytest.fixture(scope="module")
def one_server() -> Iterator[ServerUnderTest]:
    server = make_server()
    yield server
    server.serving.close()


@pytest.fixture
def server(one_server: ServerUnderTest) -> ServerUnderTest:
    one_server.sampler.script = [*b"abcdefgh", END]
    return one_server


async def test_an_answer_ends_where_the_model_ends_it(server: ServerUnderTest) -> None:
    reply = await server.chat()
    (choice,) = reply["choices"]
    assert choice["message"] == {"role": "assistant", "content": "abcdefgh", "refusal": None}
    assert (choice["finish_reason"], reply["object"]) == ("stop", "chat.completion")
    assert reply["usage"]["completion_tokens"] == 9


async def test_a_stream_begins_with_the_role_and_ends_with_the_reason(server: ServerUnderTest) -> None:
    first, *middle, last = await server.chunks(PATH, messages=[user("hi")])
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in [*middle, last]) == "abcdefgh"
    assert [chunk["choices"][0]["finish_reason"] for chunk in [first, *middle, last]] == [None] * (len(middle) + 1) + [
        "stop"
    ]
    assert {chunk["id"] for chunk in [first, *middle, last]} == {first["id"]}


@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}, {"include_usage": None}])
async def test_usage_in_a_stream_is_asked_for(server: ServerUnderTest, options: Any) -> None:
    chunks = await server.chunks(PATH, messages=[user("hi")], stream_options=options)
    assert all(chunk.get("usage") is None and chunk["choices"] for chunk in chunks)


async def test_usage_in_a_stream_equals_that_of_the_whole(server: ServerUnderTest) -> None:
    body = {"n": 2, "stop": "fg"}
    *others, last = await server.chunks(PATH, messages=[user("hello")], stream_options={"include_usage": True}, **body)
    whole = (await server.chat(**body))["usage"]
    counts = ("prompt_tokens", "completion_tokens", "total_tokens")
    assert [last["usage"][name] for name in counts] == [whole[name] for name in counts]
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 14
    assert all("usage" in chunk and chunk["usage"] is None for chunk in others)


async def test_stream_options_need_a_stream(server: ServerUnderTest) -> None:
    error = refusal(await server.post(PATH, messages=[user("hi")], stream_options={"include_usage": True}))
    assert error["param"] == "stream_options"


async def test_logprobs_have_the_tokens_own_bytes(server: ServerUnderTest) -> None:
    server.sampler.script = [FIRST_HALF, SECOND_HALF, 44, PARIS]
    (choice,) = (await server.chat(max_tokens=4, logprobs=True, top_logprobs=3))["choices"]
    content = choice["logprobs"]["content"]
    assert [entry["bytes"] for entry in content] == [[240, 159], [153, 130], [44], [*b" Paris"]]
    assert bytes(byte for entry in content for byte in entry["bytes"]).decode() == choice["message"]["content"]
    assert [len(entry["top_logprobs"]) for entry in content] == [3] * 4
    assert [entry["top_logprobs"][0]["bytes"] for entry in content] == [entry["bytes"] for entry in content]


async def test_logprobs_alone_have_no_alternatives(server: ServerUnderTest) -> None:
    (choice,) = (await server.chat(max_tokens=2, logprobs=True))["choices"]
    assert [(entry["token"], entry["top_logprobs"]) for entry in choice["logprobs"]["content"]] == [
        ("a", []),
        ("b", []),
    ]


async def test_no_logprob_is_lost_when_text_is_held_back(server: ServerUnderTest) -> None:
    server.sampler.script = [*b"en", FIRST_HALF, SECOND_HALF, *b"en", 120, END_WORD]
    body = {"max_tokens": 20, "logprobs": True, "top_logprobs": 2, "stop": "end"}
    chunks = await server.chunks(PATH, messages=[user("hi")], **body)
    entries = [
        entry
        for chunk in chunks
        if chunk["choices"][0]["logprobs"]
        for entry in chunk["choices"][0]["logprobs"]["content"]
    ]
    (choice,) = (await server.chat("hi", **body))["choices"]
    assert entries == choice["logprobs"]["content"] and len(entries) == 8
    text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
    assert text == choice["message"]["content"] == "en\N{SLIGHTLY SMILING FACE}enx"


NULLABLE = (
    *("temperature", "top_p", "top_k", "min_p", "max_tokens", "max_completion_tokens", "stop", "seed", "n", "logprobs"),
    *("top_logprobs", "logit_bias", "tools", "tool_choice", "response_format", "stream", "stream_options", "user"),
    *("suffix", "best_of", "min_tokens", "ignore_eos", "cache_salt", "priority", "chat_template_kwargs", "model"),
)


@pytest.mark.parametrize("field", NULLABLE)
async def test_null_means_absent(server: ServerUnderTest, field: str) -> None:
    assert (await server.chat(**{field: None}))["choices"] == (await server.chat())["choices"]
    assert (await server.complete(**{field: None}))["choices"] == (await server.complete())["choices"]


@pytest.mark.parametrize(
    "extra",
    [
        {"metadata": {"user": "me"}},
        {"verbosity": "medium"},
        {"safety_identifier": "me", "prompt_cache_key": "me", "user": "me", "service_tier": "auto", "store": False},
        {"modalities": ["text"], "stream": True, "stream_options": {"include_obfuscation": False}},
    ],
)
async def test_labels_and_what_holds_anyhow_change_nothing(server: ServerUnderTest, extra: dict[str, Any]) -> None:
    plain = answered(await server.post(PATH, messages=[user("hi")], temperature=0))["choices"][0]["message"]["content"]
    response = await server.post(PATH, messages=[user("hi")], temperature=0, **extra)
    assert response.status_code == 200, response.text
    if "stream" not in extra:
        assert answered(response)["choices"][0]["message"]["content"] == plain


async def test_two_names_for_one_limit_must_agree(server: ServerUnderTest) -> None:
    assert (await server.chat(max_tokens=3, max_completion_tokens=3))["usage"]["completion_tokens"] == 3
    assert (await server.chat(max_completion_tokens=2))["usage"]["completion_tokens"] == 2
    body = {"messages": [user("hi")], "max_tokens": 3, "max_completion_tokens": 4}
    assert refusal(await server.post(PATH, **body))["param"] == "max_tokens"


async def test_a_prefilled_answer_goes_on(server: ServerUnderTest) -> None:
    messages = [user("hi"), {"role": "assistant", "content": "According to"}]
    open_end = {"messages": messages, "continue_final_message": True, "add_generation_prompt": False}
    tokens = answered(await server.post("/tokenize", **open_end))["tokens"]
    assert answered(await server.post("/detokenize", tokens=tokens))["prompt"].endswith("<assistant>According to")
    assert (await server.chat(**open_end, return_token_ids=True))["prompt_token_ids"] == tokens
    both = {"messages": messages, "continue_final_message": True, "add_generation_prompt": True}
    assert "exclude" in refusal(await server.post(PATH, **both))["message"]


@pytest.mark.parametrize(
    ("arguments", "rendered"), [('{"a": 1}', "[a=1]"), ("{}", ""), ("", ""), ("null", ""), ('{"a": "b"}', "[a=b]")]
)
async def test_templates_get_arguments_as_a_mapping(server: ServerUnderTest, arguments: str, rendered: str) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [user("hi"), {"role": "assistant", "content": None, "tool_calls": [call]}]
    messages.append({"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "sunny"}]})
    tokens = answered(await server.post("/tokenize", messages=messages))["tokens"]
    text = answered(await server.post("/detokenize", tokens=tokens))["prompt"]
    assert text == f"<user>hi<end><assistant>{rendered}<end><tool>sunny<end><assistant>"
    assert (await server.chat(messages=messages))["usage"]["prompt_tokens"] == len(tokens)


BAD_MESSAGES: list[Any] = [
    [],
    None,
    "hi",
    [{"content": "no role"}],
    [{"role": "wizard", "content": "hi"}],
    [{"role": ["user"], "content": "hi"}],
    [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x/y.png"}}]}],
    [{"role": "user", "content": 5}],
    [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "no json"}}]}],
    [{"role": "assistant", "tool_calls": [5]}],
    [{"role": "user", "content": "\ud83d"}],
    [{"role": "user", "content": "a\udc00b"}],
]


@pytest.mark.parametrize("messages", BAD_MESSAGES)
@pytest.mark.parametrize("stream", [False, True])
async def test_bad_messages_are_refused_before_anything_is_sent(
    server: ServerUnderTest, messages: Any, stream: bool
) -> None:
    refusal(await server.post(PATH, messages=messages, stream=stream))


async def test_a_templates_own_refusal_is_told(server: ServerUnderTest) -> None:
    messages = [user("hi"), {"role": "tool", "content": "x"}]
    body = {"messages": messages, "chat_template_kwargs": {"forbids_tools": True}}
    assert "no tools here" in refusal(await server.post(PATH, **body))["message"]
    assert (await server.chat(messages=messages))["choices"]


@pytest.mark.parametrize("name", ["tokenize", "chat_template", "return_dict", "conversation"])
async def test_a_template_gets_variables_and_nothing_else(server: ServerUnderTest, name: str) -> None:
    error = refusal(await server.post(PATH, messages=[user("hi")], chat_template_kwargs={name: True}))
    assert error["param"] == "chat_template_kwargs"


async def test_developers_and_parts_of_text_are_understood(server: ServerUnderTest) -> None:
    parts = [{"type": "text", "text": "he"}, {"type": "text", "text": "llo"}]
    messages = [{"role": "developer", "content": "be brief"}, {"role": "user", "content": parts}]
    tokens = answered(await server.post("/tokenize", messages=messages))["tokens"]
    text = answered(await server.post("/detokenize", tokens=tokens))["prompt"]
    assert text == "<system>be brief<end><user>hello<end><assistant>"


async def test_a_pair_of_surrogates_is_a_character(server: ServerUnderTest) -> None:
    body = b'{"messages": [{"role": "user", "content": "\\ud83d\\ude42"}], "max_tokens": 1}'
    async with server.client(headers=JSON) as client:
        assert (await client.post(PATH, content=body)).status_code == 200
