"""A request, and the sequences (one per sample) that grow from its prompt."""

from __future__ import annotations

import dataclasses
import enum
import time
from array import array
from collections.abc import Callable
from typing import Any

from paged_backend.beam_search_params import BeamSearchParams
from paged_backend.engine.beam_search import BeamSearch, Candidate, Hypothesis
from paged_backend.outputs import RequestMetrics, TokenLogprobs
from paged_backend.pooling_params import PoolingParams
from paged_backend.sampling_params import SamplingParams


class Status(enum.Enum):
    """Where a sequence is in its life."""

    WAITING = enum.auto()
    """Holds no blocks, but for those in host memory; preempted sequences are back here."""
    RUNNING = enum.auto()
    FINISHED = enum.auto()


class FinishReason(enum.StrEnum):
    """Why a sequence ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    REPETITION = "repetition"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningMarks:
    """The ids around the reasoning of a model, and its texts."""

    start: str
    end: str
    is_open: bool
    """Whether the prompt has opened it."""
    closing_ids: tuple[int, ...]
    """What must follow to end it."""
    decode: Callable[[list[int]], str]
    """Ids to text, with special tokens."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Markup:
    """What the outputs of a request have in them besides text."""

    output_format: Any = None
    """How the reader of the request tells content, reasoning and tool calls apart; None: it is all content."""
    kept_special_ids: frozenset[int] = frozenset()
    """Special tokens that stay in the text, for the reader."""
    knows_reasoning: bool = False
    """Whether there is a format of reasoning."""
    reasoning: ReasoningMarks | None = None
    """None: there is no such format, or the reasoning is over."""
    reasoning_grammar: str | None = None
    """What may come before that which `params.structured_outputs` is about: rules that define `reasoning`, in Lark."""


NO_MARKUP = Markup()


@dataclasses.dataclass(slots=True, eq=False, kw_only=True)
class Request:
    """What somebody asked for. Nothing here changes once it is queued, except the lists of results."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    max_tokens: int
    """`params.max_tokens`, or what the model's limit and the KV cache leave."""
    seed: int
    """`params.seed`, or one drawn at submission."""
    prompt: str | None = None
    eos_token_ids: frozenset[int] = frozenset()
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    markup: Markup = NO_MARKUP
    grammar: Any = None
    """What `params.structured_outputs` was compiled to; the sampler's."""
    priority: int = 0
    """Lower is served first."""
    cache_salt: str | None = None
    """Requests share cached prefixes only with requests of the same salt."""
    adapter: Any = None
    """The LoRA adapter that computes it, with an `adapter_id`; the runner's. None: the model as it is."""
    deadline: float | None = None
    """In seconds of `time.monotonic()`."""
    final_only: bool = False
    """Nobody looks at the output before its end, so there is no need to write it out step by step."""
    beam_params: BeamSearchParams | None = None
    """Search beams; `params` then says what it says about each of them."""
    beam_search: BeamSearch | None = None
    prompt_logprobs_start: int = 1
    """The first prompt position whose log-probabilities are wanted, if any are."""
    pooling: PoolingParams | None = None
    """Given for a request that wants a vector of its prompt, and no tokens."""
    embedding: list[float] | None = None
    token_type_ids: list[int] | None = None
    """Which text of a pair each token of the prompt is of, for models that are told."""
    metrics: RequestMetrics = dataclasses.field(default_factory=lambda: RequestMetrics(time.monotonic()))
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    sequences: list[Sequence] = dataclasses.field(default_factory=list)
    """Its samples; of a beam search, its live beams, best first, and in the end its best outputs."""
    stop_token_ids: tuple[int, ...] = dataclasses.field(init=False)
    """The ids that the user wants to end a sequence."""
    end_token_ids: frozenset[int] = dataclasses.field(init=False)
    """All ids that end a sequence: the model's own, unless ignored, and the user's."""

    def __post_init__(self) -> None:
        self.stop_token_ids = tuple(self.params.stop_token_ids or ())
        ignores_own = self.params.ignore_eos and self.grammar is None  # a complete output ends with its grammar
        self.end_token_ids = frozenset(() if ignores_own else self.eos_token_ids).union(self.stop_token_ids)
        num_sequences = self.params.n
        if self.beam_params is not None:
            num_sequences = 1
            self.beam_search = BeamSearch(
                self.beam_params, max_tokens=self.max_tokens, end_token_ids=self.end_token_ids
            )
        self.sequences = [Sequence(self, index) for index in range(num_sequences)]
        if self.params.prompt_logprobs is not None:
            self.prompt_logprobs = [None] * self.prompt_logprobs_start

    @property
    def prefix_salt(self) -> tuple[object, ...]:
        """Requests share cached prefixes only with requests that have the same."""
        return (self.cache_salt, None if self.adapter is None else self.adapter.adapter_id)

    @property
    def num_outputs(self) -> int:
        """How many outputs its reader gets: `n`, but for beam searches that end with fewer."""
        sequences = self.sequences
        return len(sequences) if sequences[0].hypothesis is not None else self.params.n

    @property
    def is_finished(self) -> bool:
        return all(sequence.status is Status.FINISHED for sequence in self.sequences)

    @property
    def first_logits(self) -> int | None:
        """The first position of the prompt whose logits are still needed, for the log-probabilities of the token after
        it; None if no prompt token lacks what was asked for."""
        if self.prompt_logprobs is None or len(self.prompt_logprobs) >= len(self.prompt_token_ids):
            return None
        return len(self.prompt_logprobs) - 1

    @property
    def first_needed(self) -> int | None:
        """The first position of the prompt of which something is needed that the prefix cache does not hold: logits, or
        hidden states to average over."""
        return 0 if self.pooling is not None and self.pooling.needs_every_token else self.first_logits


@dataclasses.dataclass(slots=True)
class BlockTable:
    """A sequence's blocks in one group of layers, in the order of its tokens.

    The first `num_dropped` ones it does not hold any more, since nothing will look at them again: they may be any.
    """

    blocks: array[int]
    num_dropped: int = 0

    @property
    def held(self) -> array[int]:
        return self.blocks[self.num_dropped :] if self.num_dropped else self.blocks

    def copy(self) -> BlockTable:
        return BlockTable(self.blocks[:], self.num_dropped)

    def drop(self, num_blocks: int) -> None:
        """The first ones are of no use, whether it has got to them or not."""
        self.blocks.extend([0] * (num_blocks - len(self.blocks)))
        self.num_dropped = max(self.num_dropped, num_blocks)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SwappedBlocks:
    """What a preempted sequence had computed, in blocks of host memory, and what was known of it."""

    tables: list[BlockTable]
    """Of the host's blocks, as far as its tokens were computed."""
    num_computed_tokens: int
    num_published_blocks: int
    prefix_id: int | None

    @property
    def blocks(self) -> list[int]:
        """All that it holds in host memory."""
        return [block for table in self.tables for block in table.held]


class Sequence:
    """One sample or beam of a request: its tokens, and how far their keys and values are computed.

    `tables`, one per group of layers, have a slot for each of the first `num_computed_tokens` tokens that is still
    looked at; the rest is still to be computed.
    Only the first sequence of a request computes the prompt; the others fork from it and hold nothing until then.
    """

    __slots__ = (
        "block_end",
        "candidates",
        "draft_token_ids",
        "drafter",
        "finish_reason",
        "hypothesis",
        "index",
        "model_state",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_pending_tokens",
        "num_prompt_tokens",
        "num_published_blocks",
        "order",
        "output",
        "pending_id",
        "pooling_state",
        "prefix_id",
        "request",
        "sampling_state",
        "seed",
        "status",
        "stop_reason",
        "swapped",
        "tables",
        "token_ids",
    )

    def __init__(self, request: Request, index: int) -> None:
        self.request = request
        self.index = index
        self.seed = request.seed + index
        self.token_ids: list[int] = list(request.prompt_token_ids) if index == 0 else []
        """Prompt and output."""
        self.num_prompt_tokens = len(request.prompt_token_ids)
        self.num_computed_tokens = 0
        self.num_cached_tokens = 0
        """Prompt tokens found in the prefix cache when the request was first admitted."""
        self.tables: list[BlockTable] = []
        """None while it waits."""
        self.block_end = 0
        """While its tokens end before this position, they go into a block of its own, and do not fill it: they need
        nothing of the KV-cache manager, who says so. 0: ask."""
        self.num_published_blocks = 0
        self.swapped: SwappedBlocks | None = None
        """While it waits: what it has in host memory, so that it need not be computed again."""
        self.prefix_id: int | None = None
        """What the KV-cache manager knows the published blocks of this sequence by."""
        self.draft_token_ids: list[int] = []
        """Guesses at its next tokens that the step in flight computes along with it."""
        self.num_pending_tokens = 0
        """Tokens after `token_ids` that were drawn and have not come back from the device."""
        self.pending_id = 0
        """What stands for the last of them in the next step's inputs: -1 - its row among those that were drawn."""
        self.order: tuple[int, int, int] = (request.priority, 0, index)
        """Smaller is served first: priority, arrival, index. Given by the scheduler."""
        self.status = Status.WAITING
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.candidates: list[Candidate] | None = None
        """A beam's best next tokens. While it has them it is parked: it waits for its siblings to get theirs, with
        nothing to compute."""
        self.hypothesis: Hypothesis | None = None
        """What beam search found this finished output to be."""
        self.output: Any = None
        """The output processor's: the text so far."""
        self.model_state: Any = None
        """The runner's: what the model keeps of the computed tokens besides keys and values in pages, if anything; a
        fork gets what its `copy()` returns."""
        self.pooling_state: Any = None
        """The runner's: what it has of the embedding so far."""
        self.sampling_state: Any = None
        """The sampler's; derived from the tokens, so preemption does not touch it."""
        self.drafter: Any = None
        """The speculator's; derived from the tokens."""

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """0 for a sample that has not forked yet, which has no tokens at all."""
        return max(0, len(self.token_ids) - self.num_prompt_tokens)

    @property
    def num_drawn_tokens(self) -> int:
        """Its tokens, with those that are not known yet."""
        return len(self.token_ids) + self.num_pending_tokens

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def held_blocks(self) -> list[int]:
        """Its blocks in all groups, without those that it has given back already."""
        return [block for table in self.tables for block in table.held]

    @property
    def is_parked(self) -> bool:
        return self.candidates is not None

    @property
    def is_unforked(self) -> bool:
        """True for the first sequence of a request whose other samples have not left it yet."""
        return self.index == 0 and len(self.request.sequences) > 1 and not self.request.sequences[1].token_ids

    def __repr__(self) -> str:
        return f"<Sequence {self.request.request_id}/{self.index} {self.status.name} {self.num_tokens} tokens>"
