"""What an engine runs on: a runner, and what must be known of its model."""

from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING, Any, Protocol

from paged_backend.chat.tokenizer import Tokenizer
from paged_backend.config import EngineConfig
from paged_backend.engine import engine

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


class Runner(engine.Runner, Protocol):
    """A runner that knows its sizes."""

    vocab_size: int
    num_blocks: int
    """Blocks of the KV cache it holds."""
    block_size: int
    """Tokens per block."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """A loaded model, ready to run; tests and other model code make their own."""

    name: str
    runner: Runner
    sampler: engine.Sampler
    tokenizer: Tokenizer | None
    max_model_len: int
    eos_token_ids: frozenset[int] = frozenset()
    default_sampling: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Sampling parameters that the model's authors recommend."""


def load_backend(
    model: str | os.PathLike[str] | PreTrainedModel,
    tokenizer: str | PreTrainedTokenizerBase | None,
    config: EngineConfig,
) -> Backend:
    """Load a transformers model and run it on a paged KV cache."""
    # Imported here, since torch and transformers take seconds.
    from paged_backend.model.loader import load
    from paged_backend.model.runner import ModelRunner
    from paged_backend.sampling.sampler import Sampler

    loaded = load(model, tokenizer, config)
    runner = ModelRunner(loaded, config)
    return Backend(
        name=loaded.name,
        runner=runner,
        sampler=Sampler(runner.vocab_size),
        tokenizer=None if loaded.tokenizer is None else Tokenizer(loaded.tokenizer, loaded.chat_template),
        max_model_len=loaded.max_model_len,
        eos_token_ids=loaded.eos_token_ids,
        default_sampling=loaded.default_sampling,
    )
