"""Engines of fakes, and a tiny checkpoint."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from helpers_llama_index import (
    Recorder,
    make_paged_llm,
)
from helpers_models import save_model
from paged_backend import LLM


@pytest.fixture
def llm_and_runner() -> Iterator[tuple[LLM, Recorder]]:
    llm, runner = make_paged_llm()
    with llm:
        yield llm, runner


@pytest.fixture
def llm(llm_and_runner: tuple[LLM, Recorder]) -> LLM:
    return llm_and_runner[0]


@pytest.fixture
def runner(llm_and_runner: tuple[LLM, Recorder]) -> Recorder:
    return llm_and_runner[1]


@pytest.fixture
def slow_llm() -> Iterator[LLM]:
    """Each step takes 3 ms, as with a small model, so that requests meet."""
    with make_paged_llm(step_seconds=0.003)[0] as llm:
        yield llm


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A real, tiny checkpoint whose authors recommend greedy answers of 7 tokens."""
    recommended = {"do_sample": False, "max_new_tokens": 7}
    return str(save_model(tmp_path_factory.mktemp("model"), generation_config=recommended))
