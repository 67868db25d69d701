"""What went wrong in other servers, with what is right, as far as no other test says so."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import paged_backend
from helpers_server import END, ServerUnderTest, answered, make_scripted_llm, make_server, user
from paged_backend.cli.app import app

CHAT = {"messages": [user("hi")]}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hi"},
    "/v1/chat/completions": CHAT,
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {**CHAT, "max_tokens": 20},
}
SAMPLED = {"temperature": 0.7, "top_p": 0.5}


def note_sampling(server: ServerUnderTest) -> list[tuple[float, float]]:
    """Filled with the temperature and top_p of each row that is sampled from now on."""
    sample, seen = server.sampler.sample, list[tuple[float, float]]()

    def noting(logits: Any, sequences: Any) -> Any:
        seen.extend((each.request.params.temperature, each.request.params.top_p) for each in sequences)
        return sample(logits, sequences)

    server.sampler.sample = noting  # type: ignore[method-assign]
    return seen


@pytest.mark.parametrize("path", BODIES)
async def test_what_a_model_asks_for_counts_on_every_route_unless_the_request_says_otherwise(path: str) -> None:
    server = make_server(engine={"default_sampling": SAMPLED})
    server.sampler.script, seen = [*b"abcd", END], note_sampling(server)
    answered(await server.post(path, **BODIES[path]))
    assert set(seen) == {(0.7, 0.5)}
    seen.clear()
    answered(await server.post(path, **BODIES[path], temperature=0, top_p=1))
    assert set(seen) == {(0.0, 1.0)}
    server.serving.close()


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages", "/tokenize"])
async def test_without_a_chat_template_chats_are_a_400_and_texts_go_on(path: str) -> None:
    server = make_server(template=None)
    answer = await server.post(path, **BODIES.get(path, CHAT))
    assert answer.status_code == 400 and "chat template" in answer.text
    assert (await server.complete(max_tokens=1))["choices"]
    server.serving.close()


@pytest.mark.parametrize("is_stream", [True, False])
async def test_a_chat_of_no_tokens_is_empty_and_at_its_limit(is_stream: bool) -> None:
    server = make_server()
    if is_stream:
        chunks = await server.chunks("/v1/chat/completions", **CHAT, max_tokens=0)
        assert not any(choice["delta"].get("content") for chunk in chunks for choice in chunk["choices"])
        assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    else:
        reply = await server.chat(max_tokens=0)
        (choice,) = reply["choices"]
        assert (choice["message"]["content"] or "", choice["finish_reason"]) == ("", "length")
        assert reply["usage"]["completion_tokens"] == 0
    server.serving.close()


def test_log_probabilities_of_minus_infinity_are_numbers_in_the_file_of_a_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make(model: str, tokenizer: str | None, **config: Any) -> Any:
        llm, _, sampler = make_scripted_llm(**config)
        sampler.script, sampler.logprob = [*b"abcd"], -math.inf
        return llm

    monkeypatch.setattr(paged_backend, "LLM", make)
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    body = {"prompt": "hi", "max_tokens": 2, "logprobs": 2}
    source.write_text(json.dumps({"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": body}))
    assert CliRunner().invoke(app, ["run-batch", "-i", str(source), "-o", str(target), "--model", "m"]).exit_code == 0
    (line,) = target.read_text().splitlines()
    (choice,) = json.loads(line, parse_constant=no_such_number)["response"]["body"]["choices"]
    assert choice["logprobs"]["token_logprobs"] == [-9999.0, -9999.0]


def no_such_number(name: str) -> None:
    raise AssertionError(f"{name} is no JSON")
