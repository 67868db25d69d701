"""`/v1/completions`: what goes in, and what comes out, whole and streamed."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator
from typing import Any

import pytest

from helpers_server import FIRST_HALF, PARIS, SECOND_HALF, ServerUnderTest, make_server, refusal
from paged_backend.engine.outbox import Outbox

PATH = "/v1/completions"


@pytest.fixture(scope="module")
def one_server() -> Iterator[ServerUnderTest]:
    server = make_server()
    yield server
    server.serving.close()


@pytest.fixture
def server(one_server: ServerUnderTest) -> ServerUnderTest:
    one_server.sampler.script = [*b"abcdefgh"]
    one_server.sampler.logprob = None
    return one_server


@pytest.mark.parametrize(
    ("prompt", "num_choices"), [("hi", 1), ([104, 105], 1), (["hi", "ho", "ha"], 3), ([[104, 105], [104, 111]], 2)]
)
async def test_a_prompt_is_text_or_ids_or_a_list_of_them(
    server: ServerUnderTest, prompt: Any, num_choices: int
) -> None:
    reply = await server.complete(prompt, max_tokens=3)
    assert [(choice["index"], choice["text"]) for choice in reply["choices"]] == [
        (index, "abc") for index in range(num_choices)
    ]
    assert (reply["object"], reply["model"]) == ("text_completion", "fake")
    assert reply["usage"]["prompt_tokens"] == 2 * num_choices
    assert reply["usage"]["completion_tokens"] == 3 * num_choices


async def test_sample_i_of_prompt_p_is_choice_p_times_n_plus_i(server: ServerUnderTest) -> None:
    reply = await server.complete(["x", "y"], max_tokens=1, n=3, echo=True)
    assert [choice["text"] for choice in reply["choices"]] == ["xa"] * 3 + ["ya"] * 3
    assert [choice["index"] for choice in reply["choices"]] == list(range(6))
    assert reply["usage"]["prompt_tokens"] == 2


async def test_without_max_tokens_there_are_16(server: ServerUnderTest) -> None:
    assert (await server.complete())["usage"]["completion_tokens"] == 16


@pytest.mark.parametrize("prompt", ["hey", [*b"hey"]])
@pytest.mark.parametrize(("max_tokens", "logprobs", "n"), [*itertools.product([0, 1, None], [None, 0, 1, 3], [1, 2])])
async def test_echo_goes_with_any_max_tokens_and_logprobs(
    server: ServerUnderTest, prompt: Any, max_tokens: int | None, logprobs: int | None, n: int
) -> None:
    body = {"prompt": prompt, "echo": True, "max_tokens": max_tokens, "logprobs": logprobs, "n": n}
    reply = await server.complete(**body)
    num_tokens = 16 if max_tokens is None else max_tokens
    assert reply["usage"]["completion_tokens"] == num_tokens * n
    for choice in reply["choices"]:
        assert choice["text"] == "hey" + "abcdefgh"[:num_tokens] * (2 if max_tokens is None else 1)
        assert choice["finish_reason"] == "length"
        if logprobs is None:
            assert choice["logprobs"] is None
            continue
        lists = choice["logprobs"]
        assert {len(values) for values in lists.values()} == {3 + num_tokens}
        assert lists["token_logprobs"][0] is None and lists["top_logprobs"][0] is None
        assert all(isinstance(value, float) for value in lists["token_logprobs"][1:])
        assert lists["text_offset"] == sorted(lists["text_offset"]) == list(range(3 + num_tokens))
        assert "".join(lists["tokens"]) == choice["text"]
        assert all(token in top for token, top in zip(lists["tokens"][1:], lists["top_logprobs"][1:], strict=True))
    assert joined(await server.chunks(PATH, **body)) == joined([reply])


async def test_every_sample_of_a_stream_echoes_the_prompts_logprobs(
    server: ServerUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if their first tokens are read one after another."""
    put = Outbox.put
    monkeypatch.setattr(Outbox, "put", lambda *args, **kwargs: (put(*args, **kwargs), time.sleep(0.02)))
    body = {"prompt": "hey", "echo": True, "max_tokens": 2, "logprobs": 1, "n": 2}
    chunks = await server.chunks(PATH, **body)
    assert len(chunks) > 2
    assert joined(chunks) == joined([await server.complete(**body)])


async def test_without_echo_no_tokens_are_an_empty_text(server: ServerUnderTest) -> None:
    (choice,) = (await server.complete(max_tokens=0))["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("", "length")


async def test_logprobs_that_json_cannot_say_become_finite(server: ServerUnderTest) -> None:
    server.sampler.logprob = -math.inf
    (choice,) = (await server.complete(max_tokens=2, logprobs=2))["choices"]
    assert choice["logprobs"]["token_logprobs"] == [-9999.0, -9999.0]


async def test_parts_of_characters_are_told_apart(server: ServerUnderTest) -> None:
    server.sampler.script = [FIRST_HALF, SECOND_HALF, PARIS]
    (choice,) = (await server.complete(max_tokens=3, logprobs=0))["choices"]
    assert choice["text"] == "\N{SLIGHTLY SMILING FACE} Paris"
    assert choice["logprobs"]["tokens"] == ["bytes:\\xf0\\x9f", "bytes:\\x99\\x82", " Paris"]
    assert choice["logprobs"]["text_offset"] == [0, 0, 1]


async def test_tokens_may_be_asked_for_as_ids(server: ServerUnderTest) -> None:
    (choice,) = (
        await server.complete(max_tokens=2, logprobs=0, return_tokens_as_token_ids=True, return_token_ids=True)
    )["choices"]
    assert choice["logprobs"]["tokens"] == ["token_id:97", "token_id:98"]
    assert (choice["token_ids"], choice["prompt_token_ids"]) == ([97, 98], [*b"hello"])


async def test_prompt_logprobs_have_ids(server: ServerUnderTest) -> None:
    (choice,) = (await server.complete("hey", max_tokens=1, prompt_logprobs=0))["choices"]
    first, *others = choice["prompt_logprobs"]
    assert first is None
    assert [(list(position), position[key]["decoded_token"]) for position in others for key in position] == [
        (["101"], "e"),
        (["121"], "y"),
    ]


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("prompt", ["one", ["one", "two"]])
async def test_a_stream_brings_what_the_whole_answer_has(server: ServerUnderTest, prompt: Any, n: int) -> None:
    body = {"prompt": prompt, "n": n, "max_tokens": 12, "logprobs": 2, "stop": "gha", "return_token_ids": True}
    assert joined(await server.chunks(PATH, **body)) == joined([await server.complete(**body)])


@pytest.mark.parametrize("options", [{}, {"stream_options": None}, {"stream_options": {}}])
async def test_usage_in_a_stream_is_asked_for(server: ServerUnderTest, options: dict[str, Any]) -> None:
    chunks = await server.chunks(PATH, prompt="hello", **options)
    assert all(chunk.get("usage") is None and chunk["choices"] for chunk in chunks)


async def test_usage_in_a_stream_comes_last_and_counts_ids(server: ServerUnderTest) -> None:
    body = {"prompt": ["hello", "you"], "n": 2, "max_tokens": 8, "stop": "e"}
    *others, last = await server.chunks(PATH, **body, stream_options={"include_usage": True})
    assert last["choices"] == []
    assert (last["usage"]["prompt_tokens"], last["usage"]["completion_tokens"]) == (8, 20)
    assert (await server.complete(**body))["usage"]["completion_tokens"] == 20
    assert all(chunk["usage"] is None for chunk in others)


@pytest.mark.parametrize(
    ("field", "value"),
    [("suffix", "x"), ("best_of", 3), ("n", 129), ("no_such_field", 1), ("stream_options", {"include_usage": True})],
)
async def test_what_is_not_done_is_refused(server: ServerUnderTest, field: str, value: Any) -> None:
    error = refusal(await server.post(PATH, prompt="hi", **{field: value}))
    assert error["param"] == field
    assert field in error["message"]


async def test_a_list_of_prompts_is_refused_as_a_whole(server: ServerUnderTest) -> None:
    num_steps = server.runner.num_steps
    error = refusal(await server.post(PATH, prompt=["good", "x" * 3000]))
    assert "prompt 1" in error["message"] and "2048" in error["message"]
    assert error["code"] == "context_length_exceeded"
    assert server.runner.num_steps == num_steps


async def test_the_same_seed_gives_the_same_text(server: ServerUnderTest) -> None:
    server.sampler.script = []
    bodies = [{"seed": seed, "max_tokens": 8, "return_token_ids": True} for seed in (1, 1, 2)]
    first, same, other = [(await server.complete(**body))["choices"][0]["token_ids"] for body in bodies]
    assert first == same != other


def joined(chunks: list[Any]) -> list[dict[str, Any]]:
    """Each choice of a stream, put together."""
    choices: dict[int, dict[str, Any]] = {}
    for part in [part for chunk in chunks for part in chunk["choices"]]:
        choice = choices.setdefault(part["index"], {"index": part["index"], "text": "", "token_ids": []})
        choice["text"] += part["text"]
        choice["token_ids"] += part.get("token_ids") or []
        choice["end"] = (part["finish_reason"], part["stop_reason"])
        for name, values in (part["logprobs"] or {}).items():
            choice.setdefault(name, []).extend(values)
    return [choices[index] for index in sorted(choices)]
