"""What comes back: one `RequestOutput` per request, with one `CompletionOutput` per sample. vLLM's field names."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import NamedTuple


class Logprob(NamedTuple):
    """Log-probability of one token, before penalties and temperature."""

    logprob: float
    rank: int
    """1 is the most likely token of the vocabulary."""
    decoded_token: str | None = None
    """The token decoded on its own; half a character shows as U+FFFD."""


@dataclasses.dataclass(slots=True)
class ToolCall:
    """A call of one of the request's tools. In a stream of deltas, `id` and `name` come once, with its first piece."""

    index: int
    """Its position among all calls of the output; pieces with the same index are of one call."""
    id: str | None
    name: str | None
    arguments: str = ""
    """A JSON object as text; in a stream, pieces that join to it."""


@dataclasses.dataclass(slots=True)
class InvalidToolCall:
    """What looks like a call but is none; its text is in the output's `text`.

    If pieces of a `ToolCall` with this index were streamed before, this takes them back.
    """

    index: int
    id: str
    name: str | None
    """None if there is none to be read."""
    arguments: str
    """What there is of them."""
    error: str
    """Why it is no call."""


TokenLogprobs = Mapping[int, Logprob]
"""Token id to log-probability, of one position: the chosen token first, then the best ones."""


@dataclasses.dataclass(slots=True)
class CompletionOutput:
    """One of the `n` outputs of a request; in a stream of deltas, only what is new in it."""

    index: int
    text: str = ""
    """The answer without reasoning and tool calls, where these are parsed."""
    token_ids: list[int] = dataclasses.field(default_factory=list)
    cumulative_logprob: float | None = None
    """The sum over its tokens, if `logprobs` were asked for; of beam search, after penalties."""
    logprobs: list[TokenLogprobs] | None = None
    """One entry per token of `token_ids`, if asked for."""
    finish_reason: str | None = None
    """`stop`, `length`, `abort` or `repetition`; None while it runs."""
    stop_reason: int | str | None = None
    """The stop string or stop token id that ended it; None for the model's own end token."""
    score: float | None = None
    """Of beam search, by which its outputs are sorted: `cumulative_logprob` / number of tokens ** length_penalty."""
    reasoning: str | None = None
    """What the model thought before its answer; None if there is nothing of it."""
    tool_calls: list[ToolCall] = dataclasses.field(default_factory=list)
    invalid_tool_calls: list[InvalidToolCall] = dataclasses.field(default_factory=list)

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclasses.dataclass(slots=True)
class RequestMetrics:
    """Times of one request, in seconds of `time.monotonic()`."""

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None
    num_preemptions: int = 0


@dataclasses.dataclass(slots=True)
class RequestOutput:
    """The answer to one prompt, or the part of it that one step of a stream brought."""

    request_id: str
    prompt: str | None
    """The prompt as text, if it was given as text or rendered from a chat."""
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    """One entry per prompt token, the first None; in a stream, on the first output only."""
    num_cached_tokens: int = 0
    """How many prompt tokens were found in the prefix cache."""
    metrics: RequestMetrics | None = None

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated over all outputs, including those hidden from the text."""
        return sum(len(output.token_ids) for output in self.outputs)


@dataclasses.dataclass(frozen=True, slots=True)
class ScoreOutput:
    """How likely a given continuation of a prompt is."""

    token_ids: tuple[int, ...]
    """Of the continuation."""
    logprobs: tuple[float, ...]
    """The log-probability of each of them after all before it."""
    is_greedy: bool
    """Whether each of them is the most likely token in its place, so that greedy decoding would generate it."""
    num_prompt_tokens: int = 0
    """Tokens before the continuation."""
    num_cached_tokens: int = 0
    """How many of these were found in the prefix cache, or were being computed for another continuation."""

    @property
    def logprob(self) -> float:
        """Of the whole continuation: the sum of `logprobs`."""
        return math.fsum(self.logprobs)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


@dataclasses.dataclass(slots=True)
class EmbeddingOutput:
    """The vector of one prompt."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        return len(self.embedding)


@dataclasses.dataclass(slots=True)
class EmbeddingRequestOutput:
    """The answer to one prompt of `LLM.embed`."""

    request_id: str
    prompt: str | None
    """The prompt as text, if it was given as text."""
    prompt_token_ids: list[int]
    """Cut, if that was asked for."""
    outputs: EmbeddingOutput
    finished: bool = True
    num_cached_tokens: int = 0
    """How many prompt tokens were found in the prefix cache."""
    metrics: RequestMetrics | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class PairScoreOutput:
    """How well two texts fit."""

    score: float
    num_prompt_tokens: int = 0
    """Tokens computed for it. A text that several pairs of a call have, and that is computed once, counts with the
    first."""


@dataclasses.dataclass(frozen=True, slots=True)
class RerankOutput:
    """A document of `LLM.rerank`."""

    index: int
    """Where it was in the list."""
    document: str
    relevance_score: float


@dataclasses.dataclass(frozen=True, slots=True)
class ClassificationOutput:
    """How well a text fits each label of a model."""

    label: str
    """The one that fits best."""
    probs: list[float]
    """Of all labels."""
    num_prompt_tokens: int = 0
