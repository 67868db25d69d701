"""What an engine runs on: a runner, and what must be known of its model."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from paged_backend.chat.tokenizer import Tokenizer
from paged_backend.config import EngineConfig
from paged_backend.engine import encoder_engine, engine
from paged_backend.engine.kv_layout import EVERYTHING, Reach
from paged_backend.garbage import no_garbage_collection
from paged_backend.lora import Adapters
from paged_backend.pooling_params import ClassificationSupport, EmbeddingSupport

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from paged_backend.model.loader import LoadedModel
    from paged_backend.model.ranks import Ranks
    from paged_backend.model.runner import ModelRunner


class Runner(engine.Runner, Protocol):
    """A runner that knows its sizes."""

    vocab_size: int
    num_blocks: int
    """Blocks of the KV cache it holds."""
    block_size: int
    """Tokens per block."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """What a model's way of computing rules out."""

    max_num_seqs: int | None = None
    """Most sequences that its memory has room for; None: as many as wanted."""
    reaches: tuple[Reach, ...] = (EVERYTHING,)
    """How far the tokens of each group of layers look back; `engine.kv_layout` says what a group is."""
    keeps_state: bool = False
    """A sequence has more than its keys and values in pages, so that it can neither go on from another one's pages nor
    go back."""


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
    embedding: EmbeddingSupport | None = None
    """None: the runner gives no embeddings."""
    adapters: Adapters | None = None
    """Where LoRA adapters come from; None: there are none."""
    num_swap_blocks: int = 0
    """Blocks of host memory that the runner swaps to; 0: it does not."""
    traits: Traits = Traits()
    takes_pending_tokens: bool = False
    """The runner computes tokens that only the device knows yet, and the sampler has `start`."""
    is_asynchronous: bool = False
    """Steps are launched on a device, which computes them while the host goes on."""
    close: Callable[[], None] = lambda: None
    """Called once, when the engine has ended."""


class EncoderRunner(encoder_engine.EncoderRunner, Protocol):
    """A runner that knows its sizes."""

    vocab_size: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EncoderBackend:
    """A loaded encoder or classifier: it gives embeddings or scores, and cannot generate."""

    name: str
    runner: EncoderRunner
    tokenizer: Tokenizer | None
    max_model_len: int
    embedding: EmbeddingSupport | None = None
    classification: ClassificationSupport | None = None
    """Given for a classifier: its runner's vectors are the numbers of its labels."""


@no_garbage_collection()
def load_backend(
    model: str | os.PathLike[str] | PreTrainedModel,
    tokenizer: str | PreTrainedTokenizerBase | None,
    config: EngineConfig,
) -> Backend | EncoderBackend:
    """Load a transformers model and run it on a paged KV cache; an encoder, which needs none, on padded batches."""
    # Imported here, since torch and transformers take seconds.
    from paged_backend.model.ranks import ranks_for

    with ranks_for(config) as ranks:
        return _load_backend(model, tokenizer, config, ranks)


def _load_backend(
    model: str | os.PathLike[str] | PreTrainedModel,
    tokenizer: str | PreTrainedTokenizerBase | None,
    config: EngineConfig,
    ranks: Ranks | None,
) -> Backend | EncoderBackend:
    from paged_backend.model.classifier import ClassifierRunner
    from paged_backend.model.encoder import EncoderRunner
    from paged_backend.model.loader import load
    from paged_backend.model.runner import ModelRunner

    loaded = load(model, tokenizer, config, ranks)
    is_callers = not (tokenizer is None or isinstance(tokenizer, str))
    chat_tokenizer = (
        None if loaded.tokenizer is None else Tokenizer(loaded.tokenizer, loaded.chat_template, is_callers=is_callers)
    )
    if not loaded.generates:
        runs = EncoderRunner if loaded.classification is None else ClassifierRunner
        return EncoderBackend(
            name=loaded.name,
            runner=runs(loaded.model, loaded.tokenizer),
            tokenizer=chat_tokenizer,
            max_model_len=loaded.max_model_len,
            embedding=loaded.embedding,
            classification=loaded.classification,
        )
    return backend_of(loaded, ModelRunner(loaded, config), chat_tokenizer)


def backend_of(loaded: LoadedModel, runner: ModelRunner, tokenizer: Tokenizer | None = None) -> Backend:
    """What the engine takes to run this model by this runner, which closing it closes."""
    from paged_backend.sampling.sampler import Sampler  # here, since torch takes seconds

    return Backend(
        name=loaded.name,
        runner=runner,
        sampler=Sampler(runner.vocab_size),
        tokenizer=tokenizer,
        max_model_len=loaded.max_model_len,
        eos_token_ids=loaded.eos_token_ids,
        default_sampling=loaded.default_sampling,
        embedding=loaded.embedding,
        adapters=runner.adapters,
        close=runner.close,
        num_swap_blocks=runner.num_swap_blocks,
        takes_pending_tokens=runner.takes_pending_tokens,
        is_asynchronous=runner.device.type == "cuda",
        traits=Traits(
            max_num_seqs=runner.verdict.max_num_seqs,
            keeps_state=runner.verdict.keeps_state,
            reaches=runner.verdict.layout.reaches,
        ),
    )
