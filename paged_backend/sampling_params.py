"""How tokens are chosen and when generation stops."""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Mapping, Sequence
from typing import Any

from paged_backend.errors import InvalidRequestError, blamed_on
from paged_backend.fields import Checker, rejects_unknown_arguments
from paged_backend.logits_processors import LogitsProcessor, convention_of
from paged_backend.structured_outputs import StructuredOutputsParams

MAX_N = 16384
MAX_LOGPROB_TOKEN_IDS = 128
MAX_STOP_STRINGS = 64
MAX_STOP_CHARACTERS = 1024
MAX_BAD_WORDS = 4096
MAX_BAD_WORDS_CHARACTERS = 65536
GREEDY_BELOW = 1e-5
LOWEST_TEMPERATURE = 0.01


class RequestOutputKind(enum.Enum):
    """What each output of a stream holds."""

    CUMULATIVE = 0
    """All of the text so far."""
    DELTA = 1
    """Only what is new."""
    FINAL_ONLY = 2
    """One output, at the end."""


@rejects_unknown_arguments(InvalidRequestError)
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RepetitionDetection:
    """Stop with finish reason `repetition` once the output ends in the same pattern `min_count` times in a row."""

    max_pattern_size: int
    """Longest pattern looked for, in tokens."""
    min_pattern_size: int = 1
    """Shortest pattern looked for, in tokens."""
    min_count: int = 2
    """How many times in a row, at least 2."""

    def __post_init__(self) -> None:
        check = Checker(InvalidRequestError, self)
        check.integer("min_pattern_size", 1)
        check.integer("max_pattern_size", self.min_pattern_size, 1024)
        check.integer("min_count", 2)


@rejects_unknown_arguments(InvalidRequestError)
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen and when generation stops; frozen, and checked once, here.

    Names, defaults and ranges follow vLLM. The order of operations on the logits is: `structured_outputs`, allowed
    ids, bad words, `min_tokens` and `logit_bias`, penalties (repetition, frequency, presence), `logits_processors`,
    temperature, `min_p`, `top_k`, `top_p`, draw. Raises `InvalidRequestError` that names the field, its value and its
    limit.
    """

    n: int = 1
    """How many outputs per prompt, 1 to 16384. Output *i* draws with `seed + i`; the prompt is computed once."""
    temperature: float = 1.0
    """[0, 2]. 0 is greedy and switches `top_p`, `top_k` and `min_p` off."""
    top_p: float = 1.0
    """(0, 1]: sample among the fewest tokens whose probabilities add up to this."""
    top_k: int = 0
    """Sample among the k most likely tokens; 0, -1 and None mean all. 1 is greedy."""
    min_p: float = 0.0
    """[0, 1]: drop tokens less likely than this share of the most likely one's probability."""
    presence_penalty: float = 0.0
    """[-2, 2], subtracted once from each token generated so far."""
    frequency_penalty: float = 0.0
    """[-2, 2], subtracted from each generated token as often as it was generated."""
    repetition_penalty: float = 1.0
    """> 0: divides positive and multiplies negative logits of tokens in the prompt or the output."""
    seed: int | None = None
    """A seeded result does not depend on what else is in the batch. -1 means None."""
    stop: str | Sequence[str] | None = None
    """Strings that end the output; searched in the text, cut from it unless `include_stop_str_in_output`. At most 64,
    of 1024 characters in all: each is searched for after every token."""
    stop_token_ids: Sequence[int] | None = None
    """Token ids that end the output, besides the model's own end tokens."""
    include_stop_str_in_output: bool = False
    """Leave the stop string (or the stop token's text) at the end of the output."""
    ignore_eos: bool = False
    """Generate past the model's end tokens."""
    max_tokens: int | None = 16
    """Most tokens to generate; None means up to the model's limit. 0 only scores the prompt."""
    min_tokens: int = 0
    """Until this many, end tokens are masked, and a stop string must end past them to count."""
    logprobs: int | None = None
    """Log-probabilities of the chosen token and this many best ones, before penalties and temperature; -1: all."""
    prompt_logprobs: int | None = None
    """The same for the prompt's tokens. Reading the prefix cache is skipped, since cached tokens have no logits; see
    `LLM.score` for the end of a prompt alone."""
    logprob_token_ids: Sequence[int] | None = None
    """Up to 128 ids whose log-probabilities are added to `logprobs`."""
    bad_words: Sequence[str] | None = None
    """Words that must not be generated, at the start of a text or after a space, in the ids the tokenizer gives them.
    Other ids that spell the same word are not looked for. At most 4096, of 65,536 characters in all."""
    allowed_token_ids: Sequence[int] | None = None
    """If given, nothing but these ids is generated (and the model's end tokens, only if they are among them)."""
    logit_bias: Mapping[int, float] | None = None
    """Added to the logits of these ids; values in [-100, 100], where -100 bans and 100 forces."""
    logits_processors: Sequence[LogitsProcessor] | None = None
    """Called in this order, once per generated token, as `(output_ids, logits) -> logits` or, if they need three
    arguments, `(prompt_ids, output_ids, logits) -> logits`; logits are a float32 tensor [V]. LogitsProcessors of
    transformers, and what takes `(input_ids, scores)` by these names, get tensors [1, T] and [1, V], where T counts
    prompt and output. They run where `generate` runs them: after penalties, before temperature. Each sequence has
    its own copy of a transformers processor, or of one with a method `clone`; others are shared. An exception in one
    ends its request alone, with EngineError."""
    repetition_detection: RepetitionDetection | None = None
    """End outputs that repeat themselves. A mapping of its fields is taken too, as for `structured_outputs`."""
    detokenize: bool = True
    """False: return ids only, with an empty text."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    spaces_between_special_tokens: bool = True
    """Put spaces between special tokens that are in the text (slow tokenizers only)."""
    output_kind: RequestOutputKind | None = None
    """None: the whole at the end from `generate`, deltas from `stream`."""
    stream_interval: int = 1
    """Tokens per streamed output, at least 1."""
    structured_outputs: StructuredOutputsParams | None = None
    """What the output must match: a JSON schema, a regular expression, choices or a grammar. It wins over all else:
    where the other fields leave nothing that it allows, the most likely token that it allows is taken. A chat's
    reasoning comes before it and may be anything."""
    thinking_token_budget: int | None = None
    """Most tokens of reasoning: after that many, its end is forced and the answer begins. None: no limit."""
    extra_args: Mapping[str, Any] | None = None
    """Carried along for extensions; the engine does not look at it."""

    def __post_init__(self) -> None:
        self._normalise()
        self._check_numbers()
        self._check_lists()

    def replace(self, **changes: Any) -> SamplingParams:
        """A copy with `changes`; raises like the constructor."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return SamplingParams(**values | changes)

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _normalise(self) -> None:
        """Other spellings of the same wish become one; lists become tuples, so that nobody changes them later."""
        if isinstance(self.stop, str):
            self._set("stop", (self.stop,))
        for name in ("stop", "stop_token_ids", "bad_words", "logits_processors"):
            value = getattr(self, name)
            self._set(name, () if value is None else _as_tuple(name, value))
        for name in ("allowed_token_ids", "logprob_token_ids"):
            if getattr(self, name) is not None:
                self._set(name, _as_tuple(name, getattr(self, name)))
        if self.logit_bias is not None:
            self._set("logit_bias", _normalised_bias(self.logit_bias))
        for name, kind in (
            ("structured_outputs", StructuredOutputsParams),
            ("repetition_detection", RepetitionDetection),
        ):
            if isinstance(value := getattr(self, name), Mapping):
                with blamed_on(name):
                    self._set(name, kind(**value))
        if self.seed == -1:
            self._set("seed", None)
        if self.top_k is None or (self.top_k == -1 and isinstance(self.top_k, int)):
            self._set("top_k", 0)

    def _check_numbers(self) -> None:
        check = Checker(InvalidRequestError, self)
        check.integer("n", 1, MAX_N)
        check.number("temperature", 0.0, 2.0)
        check.number("top_p", 0.0, 1.0, open_low=True)
        check.integer("top_k", 0)
        check.number("min_p", 0.0, 1.0)
        check.number("presence_penalty", -2.0, 2.0)
        check.number("frequency_penalty", -2.0, 2.0)
        check.number("repetition_penalty", 0.0, math.inf, open_low=True)
        check.integer("seed", -(2**63), 2**64 - 1, optional=True)
        check.integer("max_tokens", 0, optional=True)
        check.integer("min_tokens", 0, self.max_tokens)
        check.integer("logprobs", -1, optional=True)
        check.integer("prompt_logprobs", -1, optional=True)
        check.integer("stream_interval", 1)
        check.integer("thinking_token_budget", 0, optional=True)
        check.flag("include_stop_str_in_output", "ignore_eos", "detokenize", "skip_special_tokens")
        check.flag("spaces_between_special_tokens")
        if self.temperature < GREEDY_BELOW:
            for name, off in (("temperature", 0.0), ("top_p", 1.0), ("top_k", 0), ("min_p", 0.0)):
                self._set(name, off)
        elif self.temperature < LOWEST_TEMPERATURE:
            self._set("temperature", LOWEST_TEMPERATURE)

    def _check_lists(self) -> None:
        check = Checker(InvalidRequestError, self)
        for name in ("stop", "bad_words"):
            if not all(isinstance(text, str) and text for text in getattr(self, name)):
                check.fail(name, "a list of strings that are not empty")
        _check_amount("stop", self.stop or (), MAX_STOP_STRINGS, MAX_STOP_CHARACTERS)
        _check_amount("bad_words", self.bad_words or (), MAX_BAD_WORDS, MAX_BAD_WORDS_CHARACTERS)
        for name in ("stop_token_ids", "allowed_token_ids", "logprob_token_ids"):
            ids = getattr(self, name)
            if ids is not None and not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
                check.fail(name, "a list of token ids ≥ 0")
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            check.fail("allowed_token_ids", "None or hold at least one id")
        if self.logprob_token_ids is not None and len(self.logprob_token_ids) > MAX_LOGPROB_TOKEN_IDS:
            check.fail("logprob_token_ids", f"at most {MAX_LOGPROB_TOKEN_IDS} ids")
        if self.stop and not self.detokenize:
            check.fail("stop", "empty when detokenize=False, since stop strings are searched in the text")
        if not all(map(convention_of, self.logits_processors or ())):
            check.fail("logits_processors", "a list of callables that take (token_ids, logits), see its documentation")
        if self.output_kind is not None and not isinstance(self.output_kind, RequestOutputKind):
            check.fail("output_kind", "a RequestOutputKind or None")
        if self.structured_outputs is not None and not isinstance(self.structured_outputs, StructuredOutputsParams):
            check.fail("structured_outputs", "a StructuredOutputsParams or None")
        if self.repetition_detection is not None and not isinstance(self.repetition_detection, RepetitionDetection):
            check.fail("repetition_detection", "a RepetitionDetection or None")


def _check_amount(name: str, texts: Sequence[str], max_texts: int, max_characters: int) -> None:
    """Everybody in a batch waits while the strings of one of them are looked for."""
    num_characters = sum(map(len, texts))
    if len(texts) > max_texts or num_characters > max_characters:
        raise InvalidRequestError(
            f"{name} has {len(texts)} strings of {num_characters} characters in all, but the limit is {max_texts} "
            f"strings and {max_characters} characters; give fewer or shorter ones",
            field=name,
        )


def _as_tuple(name: str, value: object) -> tuple[Any, ...]:
    if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
        raise InvalidRequestError(f"{name}={value!r} is out of range: it must be a list", field=name)
    return tuple(value)


def _normalised_bias(bias: Mapping[Any, Any]) -> dict[int, float]:
    """Keys as integers (JSON sends strings), values checked."""
    if not isinstance(bias, Mapping):
        message = f"logit_bias={bias!r} is out of range: it must map token ids to numbers"
        raise InvalidRequestError(message, field="logit_bias")
    result: dict[int, float] = {}
    for key, value in bias.items():
        is_id = (isinstance(key, int) and not isinstance(key, bool)) or (isinstance(key, str) and key.isdecimal())
        if not is_id or int(key) < 0 or not _is_bias(value):
            raise InvalidRequestError(
                f"logit_bias={{{key!r}: {value!r}}} is out of range: it must map token ids to numbers in [-100, 100]",
                field="logit_bias",
            )
        result[int(key)] = float(value)
    return result


def _is_bias(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and -100 <= value <= 100
