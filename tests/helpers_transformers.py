"""A tiny model with and without the engine: what a call gives on both."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessor, PreTrainedModel

import transformers_paged
from helpers import WAIT_SECONDS
from helpers_models import EOS, make_tokenizer
from paged_backend import LLM

ENGINE: dict[str, Any] = {"kv_cache_memory": "16MiB", "block_size": 4}
TEXTS = ("Once upon a time", "a", "How do you do, my friend?")


@contextlib.contextmanager
def on_engine(model: PreTrainedModel, **options: Any) -> Iterator[PreTrainedModel]:
    """What the engine cannot do is an error in here, unless asked otherwise."""
    with transformers_paged.enable(model, **{"on_unsupported": "error"} | ENGINE | options):
        yield model


def engine_of(model: PreTrainedModel) -> LLM:
    paged = transformers_paged.model.enabled(model)
    assert paged is not None
    return paged.llm


def own_generate(model: PreTrainedModel, **arguments: Any) -> Any:
    """Transformers' `generate`, whether the model is enabled or not."""
    return type(model).generate(model, **arguments)


def encoded(texts: Sequence[str] = TEXTS, side: str = "left") -> dict[str, Tensor]:
    """Ids and mask, padded with the end token."""
    tokenizer = make_tokenizer()
    tokenizer.padding_side = side
    return dict(tokenizer(list(texts), return_tensors="pt", padding=True))


class Held(LogitsProcessor):  # type: ignore[misc]
    """Holds the engine up once a row has some tokens: however late its reader is, the row is not at its end by then.

    In a `with` statement, whose end lets go.
    """

    def __init__(self, num_tokens: int = 40) -> None:
        self._num_tokens, self._go_on = num_tokens, threading.Event()

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if input_ids.shape[1] >= self._num_tokens:
            self._go_on.wait(WAIT_SECONDS)
        return scores

    def __enter__(self) -> dict[str, Any]:
        """Arguments of a `generate` call that ends by its length alone, and late."""
        return {"max_new_tokens": 400, "eos_token_id": None, "pad_token_id": 3, "logits_processor": [self]}

    def __exit__(self, *error: object) -> None:
        self._go_on.set()


def new_ids(output: Tensor, num_prompt_tokens: int) -> list[list[int]]:
    """What was generated in each row, without the padding after its end token."""
    rows = output[:, num_prompt_tokens:].tolist()
    return [row[: row.index(EOS) + 1] if EOS in row else row for row in rows]


def same(left: Tensor, right: Tensor) -> bool:
    return left.dtype == right.dtype and torch.equal(left, right)


def cases(names: Iterable[str], *, everyday: str) -> list[Any]:
    """Parameters for `parametrize`, of which the everyday run takes those named, and CI all."""
    return [pytest.param(name, marks=[] if name in everyday.split(", ") else pytest.mark.slow) for name in names]
