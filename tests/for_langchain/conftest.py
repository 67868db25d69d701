"""Engines that tests of the LangChain adapter share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from helpers_langchain import (
    make_llm,
)
from helpers_models import save_model
from paged_backend import LLM


@pytest.fixture
def llm() -> Iterator[LLM]:
    with make_llm(enable_prefix_caching=False) as llm:
        yield llm


@pytest.fixture
def reasoning_llm() -> Iterator[LLM]:
    """One whose model is taken to think before it answers."""
    with make_llm(enable_prefix_caching=False, reasoning_parser="qwen3") as llm:
        yield llm


@pytest.fixture
def slow_llm() -> Iterator[LLM]:
    """Each step takes 3 ms, as with a small model, so that requests meet."""
    with make_llm(step_seconds=0.003) as llm:
        yield llm


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A real, tiny checkpoint whose authors recommend greedy answers of 7 tokens."""
    recommended = {"do_sample": False, "max_new_tokens": 7, "repetition_penalty": 1.1}
    return str(save_model(tmp_path_factory.mktemp("model"), generation_config=recommended))
