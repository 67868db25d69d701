"""LlamaIndex on top of it: query engines, chat engines, token counting."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from llama_index.core import Document, MockEmbedding, Settings, SummaryIndex, VectorStoreIndex
from llama_index.core.chat_engine import SimpleChatEngine
from llama_index.core.memory import ChatMemoryBuffer
from llama_index.core.node_parser import SentenceSplitter

from helpers_llama_index import (
    ANSWER,
    LONG_ANSWER,
    Recorder,
    in_loop,
    make_paged,
    rendered,
)
from paged_backend import LLM

# LlamaIndex on top of it.


@pytest.fixture
def settings() -> Iterator[Any]:
    """LlamaIndex's process-wide settings, put back afterwards."""
    import llama_index.core

    before = (Settings._llm, Settings._embed_model, llama_index.core.global_tokenizer)
    Settings.embed_model = MockEmbedding(embed_dim=8)
    yield Settings
    Settings._llm, Settings._embed_model, llama_index.core.global_tokenizer = before


DOCUMENTS = [Document(text="The sky is blue."), Document(text="Grass is green.")]


@pytest.mark.parametrize("index_class", [SummaryIndex, VectorStoreIndex])
def test_query_engines_answer_from_their_nodes(llm: LLM, runner: Recorder, settings: Any, index_class: Any) -> None:
    settings.llm = make_paged(llm, "Blue.")
    settings.tokenizer = settings.llm.tokenizer
    index = index_class.from_documents(DOCUMENTS)
    assert str(index.as_query_engine().query("What is the sky like?")) == "Blue."
    assert str(in_loop(index.as_query_engine().aquery("What is the sky like?"))) == "Blue."
    streamed = index.as_query_engine(streaming=True).query("What is the sky like?")
    assert "".join(streamed.response_gen) == "Blue."
    assert len(runner.prompts) == 3
    assert len(set(runner.prompts)) == 1
    assert "The sky is blue." in runner.prompts[0]
    assert runner.prompts[0].count("<|im_start|>assistant\n") == 1


def test_a_chat_engine_remembers_each_answer_once(llm: LLM, runner: Recorder) -> None:
    engine = SimpleChatEngine.from_defaults(
        llm=make_paged(llm), memory=ChatMemoryBuffer.from_defaults(token_limit=1000)
    )
    assert "".join(engine.stream_chat("Name a colour.").response_gen) == ANSWER
    assert str(engine.chat("Another.")) == ANSWER

    async def stream() -> str:
        response = await engine.astream_chat("A third.")
        return "".join([token async for token in response.async_response_gen()])

    assert in_loop(stream()) == ANSWER
    assert [message.content for message in engine.chat_history] == [
        "Name a colour.", ANSWER, "Another.", ANSWER, "A third.", ANSWER,
    ]  # fmt: skip
    turns = [("user", "Name a colour."), ("assistant", ANSWER), ("user", "Another.")]
    assert runner.prompts[1] == rendered(*turns)


def test_the_tokenizer_counts_as_the_model_does(llm: LLM, settings: Any) -> None:
    model = make_paged(llm)
    settings.tokenizer = model.tokenizer
    assert settings.tokenizer("Grün") == list("Grün".encode())
    splitter = SentenceSplitter(chunk_size=40, chunk_overlap=0, tokenizer=model.tokenizer)
    assert all(len(chunk.encode()) <= 40 for chunk in splitter.split_text("A sentence of some length. " * 5))


def test_eight_queries_at_once_share_batches(slow_llm: LLM, settings: Any) -> None:
    settings.llm = make_paged(slow_llm, LONG_ANSWER)
    engine = SummaryIndex.from_documents(DOCUMENTS).as_query_engine()

    async def ask_all() -> list[Any]:
        return await asyncio.gather(*(engine.aquery(f"Question {i}") for i in range(8)))

    assert [str(answer) for answer in in_loop(ask_all())] == [LONG_ANSWER] * 8
    assert slow_llm.stats().largest_batch == 8
