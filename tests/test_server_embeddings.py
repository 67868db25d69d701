"""`/v1/embeddings`, `/v1/score` and `/v1/rerank`."""

from __future__ import annotations

import base64
import json
import math
import struct
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from helpers import FakeRunner
from helpers_server import JSON, ServerUnderTest, answered, make_chat_tokenizer, make_models, make_server, refusal
from paged_backend import LLM, EmbeddingSupport, EncoderBackend
from paged_backend.chat.tokenizer import Tokenizer
from paged_backend.server.app import create_app
from paged_backend.server.batch import answer_line, has_failed, parse_line
from paged_backend.server.settings import ServerSettings


class FirstTwoBytes:
    """The vector of a text is its first two bytes."""

    vocab_size = 261

    def embed(self, requests: list[Any]) -> list[list[float]]:
        return [[float(token_id) for token_id in request.prompt_token_ids[:2]] for request in requests]


@pytest.fixture(scope="module")
def server() -> Iterator[ServerUnderTest]:
    backend = EncoderBackend(
        name="fake",
        runner=FirstTwoBytes(),
        tokenizer=Tokenizer(make_chat_tokenizer()),
        max_model_len=100,
        embedding=EmbeddingSupport(size=2, poolings=("mean",), default_pooling="mean"),
    )
    llm = LLM.from_backend(backend)
    models = make_models(ServerSettings(api_keys=("key",)), llm=llm)
    yield ServerUnderTest(llm, FakeRunner(), make_server().sampler, models, create_app(models))
    llm.close()


async def post(server: ServerUnderTest, path: str, **body: Any) -> Any:
    async with server.client(headers={"X-Api-Key": "key", **JSON}) as client:
        return await client.post(path, content=json.dumps(body))


@pytest.mark.parametrize(
    ("given", "vectors"),
    [
        ("ab", [[97, 98]]),
        ([97, 98], [[97, 98]]),
        (["ab", "cde"], [[97, 98], [99, 100]]),
        ([[97, 98, 1], [1, 2]], [[97, 98], [1, 2]]),
    ],
)
async def test_an_input_is_text_or_ids_or_a_list_of_them(server: ServerUnderTest, given: Any, vectors: Any) -> None:
    reply = answered(await post(server, "/v1/embeddings", input=given))
    assert [item["embedding"] for item in reply["data"]] == vectors
    assert [item["index"] for item in reply["data"]] == list(range(len(vectors)))
    packed = answered(await post(server, "/v1/embeddings", input=given, encoding_format="base64"))
    assert [list(struct.unpack("<2f", base64.b64decode(item["embedding"]))) for item in packed["data"]] == vectors


async def test_usage_counts_the_inputs(server: ServerUnderTest) -> None:
    reply = answered(await post(server, "/v1/embeddings", input=["ab", "cde"], user="me", dimensions=None))
    assert reply["usage"] == {"prompt_tokens": 5, "total_tokens": 5}


BAD_TEXTS = ("", "a\ud83d", "x" * 200)
OWN_FIELDS: dict[str, dict[str, Any]] = {
    "/v1/embeddings": {"input": "ab"},
    "/v1/score": {"text_1": "ab", "text_2": ["ab", "cd"]},
    "/v1/rerank": {"query": "ab", "documents": ["ab", "cd"]},
}
BAD: list[tuple[str, str, Any]] = [
    *(("/v1/embeddings", "input", value) for value in (*BAD_TEXTS, [], [9999], ["ab", ""], [[1], [9999]])),
    *(("/v1/embeddings", field, value) for field, value in (("dimensions", 3), ("encoding_format", "hex"))),
    *(("/v1/embeddings", field, value) for field, value in (("cache_salt", ""), ("nope", 1))),
    *(("/v1/score", "text_1", text) for text in BAD_TEXTS),
    *(("/v1/score", "text_2", ["ab", text]) for text in BAD_TEXTS),
    ("/v1/score", "text_2", []),
    ("/v1/score", "truncate_prompt_tokens", 0),
    *(("/v1/rerank", "query", text) for text in BAD_TEXTS),
    *(("/v1/rerank", "documents", ["ab", text]) for text in BAD_TEXTS),
]


@pytest.mark.parametrize(("path", "field", "value"), BAD)
async def test_what_cannot_be_done_is_refused_by_name(
    server: ServerUnderTest, path: str, field: str, value: Any
) -> None:
    error = refusal(await post(server, path, **OWN_FIELDS[path] | {field: value}))
    assert error["param"] == field and field in error["message"]


async def test_a_longer_input_may_be_cut(server: ServerUnderTest) -> None:
    reply = answered(await post(server, "/v1/embeddings", input="ab" * 200, truncate_prompt_tokens=-1))
    assert reply["usage"]["prompt_tokens"] == 100


async def test_a_model_without_vectors_says_so() -> None:
    other = make_server()
    assert "gives no embeddings" in refusal(await other.post("/v1/embeddings", input="ab"))["message"]
    other.serving.close()


async def test_a_model_without_text_says_so(server: ServerUnderTest) -> None:
    refusal(await post(server, "/v1/completions", prompt="ab"))


async def test_scores_are_cosines(server: ServerUnderTest) -> None:
    one_to_many = answered(await post(server, "/v1/score", text_1="ab", text_2=["ab", "a\x00"]))
    assert [item["score"] for item in one_to_many["data"]] == pytest.approx([1.0, 97 / math.hypot(97, 98)])
    pairs = answered(await post(server, "/score", text_1=["ab", "a\x00"], text_2=["cc", "\x00a"]))
    assert [item["score"] for item in pairs["data"]] == pytest.approx([1.0, 0.0], abs=1e-4)
    assert refusal(await post(server, "/v1/score", text_1=["ab", "c"], text_2="ab"))["param"] == "text_2"


async def test_no_cosine_is_greater_than_one(server: ServerUnderTest) -> None:
    texts = [chr(first) + chr(second) for first in range(97, 117) for second in range(97, 117)]
    scores = [item["score"] for item in answered(await post(server, "/v1/score", text_1=texts, text_2=texts))["data"]]
    assert max(scores) == 1.0 and min(scores) == pytest.approx(1.0)


async def test_documents_come_best_first(server: ServerUnderTest) -> None:
    body = {"query": "ab", "documents": ["a\x00", "\x00a", "ba"], "top_n": 2}
    results = answered(await post(server, "/v1/rerank", **body))["results"]
    assert [(item["index"], item["document"]["text"]) for item in results] == [(2, "ba"), (1, "\x00a")]
    assert results[0]["relevance_score"] > results[1]["relevance_score"]
    without = answered(await post(server, "/rerank", **body, return_documents=False))["results"]
    assert [item["document"] for item in without] == [None, None]


async def test_a_line_of_a_batch_may_ask_for_vectors(server: ServerUnderTest) -> None:
    text = json.dumps({"custom_id": "1", "url": "/v1/embeddings", "body": {"input": ["ab"]}})
    record = await answer_line(server.models, parse_line(1, text, ()))
    assert record["response"]["body"]["data"][0]["embedding"] == [97, 98]
    text = json.dumps({"custom_id": "2", "url": "/v1/completions", "body": {"prompt": "ab"}})
    assert has_failed(await answer_line(server.models, parse_line(2, text, ())))


def test_openais_sdk_reads_the_vectors(server: ServerUnderTest) -> None:
    with server.live() as url, openai.OpenAI(base_url=f"{url}/v1", api_key="key", max_retries=0, timeout=20) as client:
        reply = client.embeddings.create(model="fake", input=["ab", "cd"])
        floats = client.embeddings.create(model="fake", input="ab", encoding_format="float")
    assert [item.embedding for item in reply.data] == [[97, 98], [99, 100]]
    assert floats.data[0].embedding == [97, 98]
