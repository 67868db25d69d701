"""`PagedEmbedding`: vectors for LlamaIndex from the engine that others may be generating on."""

from __future__ import annotations

import asyncio
import copy
import math
import pickle
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from llama_index.core import Document, Settings, VectorStoreIndex
from llama_index.core.callbacks import CallbackManager, TokenCountingHandler

from helpers_llama_index import in_loop
from helpers_models import save_model
from llama_index.embeddings.paged import PagedEmbedding
from llama_index.llms.paged import Paged
from paged_backend import LLM, InvalidRequestError

TEXTS = ["a red apple", "a green pear", "the sea at night, and nobody on the beach", ""]
OPTIONS: dict[str, Any] = {"num_gpu_blocks_override": 96}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_model(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def llm(folder: str) -> LLM:
    return LLM.shared(folder, **OPTIONS)


@pytest.fixture
def embedding(folder: str) -> PagedEmbedding:
    return PagedEmbedding(model=folder, engine_kwargs=OPTIONS)


def vectors(llm: LLM, texts: list[str], **options: Any) -> list[list[float]]:
    return [output.outputs.embedding for output in llm.embed(texts, use_tqdm=False, **options)]


def is_close(one: list[float], other: list[float]) -> bool:
    return len(one) == len(other) and math.dist(one, other) < 1e-4


def test_every_way_to_ask_gives_the_engines_vectors(llm: LLM, embedding: PagedEmbedding) -> None:
    texts = TEXTS[:3]
    wanted = vectors(llm, texts)
    batches = {
        "sync": embedding.get_text_embedding_batch(texts),
        "async": in_loop(embedding.aget_text_embedding_batch(texts)),
        "one by one": [embedding.get_text_embedding(text) for text in texts],
        "queries": [embedding.get_query_embedding(text) for text in texts],
        "async queries": [in_loop(embedding.aget_query_embedding(text)) for text in texts],
        "async one by one": [in_loop(embedding.aget_text_embedding(text)) for text in texts],
    }
    for way, found in batches.items():
        assert all(map(is_close, found, wanted)), way
    assert all(type(component) is float for component in batches["sync"][0])


def test_instructions_go_before_queries_and_texts(llm: LLM, folder: str) -> None:
    embedding = PagedEmbedding(
        model=folder, engine_kwargs=OPTIONS, query_instruction="query: ", text_instruction="passage: "
    )
    query, passage = vectors(llm, ["query: a red apple", "passage: a red apple"])
    assert not is_close(query, passage)
    assert is_close(embedding.get_query_embedding("a red apple"), query)
    assert is_close(embedding.get_text_embedding("a red apple"), passage)
    assert is_close(in_loop(embedding.aget_query_embedding("a red apple")), query)
    assert is_close(in_loop(embedding.aget_text_embedding_batch(["a red apple"]))[0], passage)


def test_options_reach_the_engine(llm: LLM, folder: str) -> None:
    options: dict[str, Any] = {"pooling": "mean", "normalize": False, "dimensions": 8}
    embedding = PagedEmbedding(model=folder, engine_kwargs=OPTIONS, **options)
    found = embedding.get_text_embedding("a red apple")
    assert len(found) == 8
    assert is_close(found, vectors(llm, ["a red apple"], **options)[0])


def test_long_texts_are_cut_unless_they_are_to_be_refused(llm: LLM, folder: str) -> None:
    text = "a long text " * 100
    assert len(text) > llm.max_model_len
    cut = PagedEmbedding(model=folder, engine_kwargs=OPTIONS).get_text_embedding(text)
    assert is_close(cut, vectors(llm, [text], truncate_prompt_tokens=-1)[0])
    with pytest.raises(InvalidRequestError, match="512"):
        PagedEmbedding(model=folder, engine_kwargs=OPTIONS, truncate_prompt_tokens=None).get_text_embedding(text)


async def test_a_batch_is_in_the_engine_at_once(folder: str) -> None:
    with LLM(folder, **OPTIONS) as llm:
        embedding = PagedEmbedding(model=llm)
        await embedding.aget_text_embedding_batch([f"text {i}" for i in range(40)])
        assert llm.stats().largest_batch >= 20


def test_a_model_embeds_and_answers_at_the_same_time(folder: str) -> None:
    with LLM(folder, **OPTIONS) as llm:
        model = Paged(llm=llm, temperature=0, max_tokens=30, ignore_eos=True)
        alone = model.complete("Hi.").text

        async def both() -> tuple[Any, Any]:
            return await asyncio.gather(
                model.acomplete("Hi."), PagedEmbedding(llm=llm).aget_text_embedding_batch(TEXTS[:3])
            )

        answer, found = in_loop(both())
        assert answer.text == alone
        assert all(map(is_close, found, vectors(llm, TEXTS[:3])))


@pytest.fixture
def settings() -> Iterator[Any]:
    """LlamaIndex's process-wide settings, put back afterwards."""
    import llama_index.core

    before = (Settings._llm, Settings._embed_model, llama_index.core.global_tokenizer)
    yield Settings
    Settings._llm, Settings._embed_model, llama_index.core.global_tokenizer = before


def test_an_index_finds_the_text_that_was_asked_for(embedding: PagedEmbedding, settings: Any) -> None:
    settings.embed_model = embedding
    settings.tokenizer = embedding.tokenizer
    index = VectorStoreIndex.from_documents([Document(text=text) for text in TEXTS[:3]])
    for text in TEXTS[:3]:
        assert index.as_retriever(similarity_top_k=1).retrieve(text)[0].text == text
        assert in_loop(index.as_retriever(similarity_top_k=1).aretrieve(text))[0].text == text


def test_token_counting_sees_the_texts(embedding: PagedEmbedding) -> None:
    counter = TokenCountingHandler(tokenizer=embedding.tokenizer)
    embedding.callback_manager = CallbackManager([counter])
    embedding.get_text_embedding_batch(TEXTS[:2])
    assert counter.total_embedding_token_count == sum(len(text) for text in TEXTS[:2])


def test_the_names_of_other_integrations_are_understood(folder: str) -> None:
    embedding = PagedEmbedding(model_name=folder)
    assert (embedding.model, embedding.model_name) == (folder, folder)
    with pytest.raises(ValueError, match="'max_lenght'; known names"):
        PagedEmbedding(model=folder, max_lenght=5)
    with pytest.raises(ValueError, match="'text_instructions'; did you mean 'text_instruction'"):
        PagedEmbedding(model=folder, text_instructions="x")


def test_copies_and_pickles_find_the_same_engine(embedding: PagedEmbedding) -> None:
    engine = embedding.engine
    revived = [
        copy.deepcopy(embedding),
        pickle.loads(pickle.dumps(embedding)),
        PagedEmbedding.from_dict(embedding.to_dict()),
    ]
    assert all(one.engine is engine and one.to_dict() == embedding.to_dict() for one in revived)


def test_importing_without_llama_index_names_the_extra() -> None:
    code = "import sys; sys.modules['llama_index.core'] = None; import llama_index.embeddings.paged"
    environment = {"PYTHONPATH": ":".join(path for path in sys.path if path)}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert run.stderr.strip().splitlines()[-1].endswith("pip install 'paged-backend[llama-index]'")
