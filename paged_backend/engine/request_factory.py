"""A prompt and its parameters to a request, or a refusal that says why: the last place where anything is checked."""

from __future__ import annotations

import dataclasses
import random
import threading
import time
import uuid
from collections.abc import Callable
from typing import Any

from paged_backend.beam_search_params import BeamSearchParams
from paged_backend.engine.kv_layout import KVLayout
from paged_backend.engine.request import NO_MARKUP, Markup, Request
from paged_backend.errors import InvalidRequestError, blamed_on
from paged_backend.fields import is_finite
from paged_backend.lora import Adapter, Adapters, LoRARequest
from paged_backend.pooling_params import ClassificationSupport, EmbeddingSupport, PoolingParams
from paged_backend.sampling_params import RequestOutputKind, SamplingParams
from paged_backend.structured_outputs import StructuredOutputsParams

EncodeWord = Callable[[str], tuple[tuple[int, ...], ...]]
CompileGrammar = Callable[[StructuredOutputsParams, str | None], Any]
"""Given what outputs must match, and the grammar of what may come before it."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the model and the memory allow."""

    vocab_size: int
    max_model_len: int
    num_slots: int
    """Most tokens of one sequence that the KV cache holds."""
    layout: KVLayout | None = None
    num_blocks: int = 0
    """Of the KV cache, if there is one."""
    max_logprobs: int
    eos_token_ids: frozenset[int]
    embedding: EmbeddingSupport | None = None
    """None: the model gives no vectors."""
    classification: ClassificationSupport | None = None
    """Given for models with a head that classifies, which give nothing else."""
    generates: bool = True
    """False for encoders and classifiers."""

    @property
    def max_len(self) -> int:
        """Most tokens of a prompt and its output together."""
        return min(self.max_model_len, self.num_slots)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RequestOptions:
    """What a request is besides its prompt and its sampling parameters; `Request` says what these are."""

    request_id: str | None = None
    priority: int = 0
    cache_salt: str | None = None
    timeout: float | None = None
    """In seconds."""
    prompt: str | None = None
    final_only: bool = False
    markup: Markup = NO_MARKUP
    beam_params: BeamSearchParams | None = None
    prompt_logprobs_start: int = 1
    pooling: PoolingParams | None = None
    lora_request: LoRARequest | None = None
    token_type_ids: list[int] | None = None


_PASSED_ON = tuple(
    field.name
    for field in dataclasses.fields(RequestOptions)
    if field.name not in ("request_id", "timeout", "lora_request")
)


class RequestFactory:
    """Makes requests in the callers' threads. What it has made can be served: nothing checks again."""

    def __init__(
        self,
        limits: Limits,
        *,
        encode_word: EncodeWord | None,
        compile_grammar: CompileGrammar | None,
        adapters: Adapters | None = None,
        seed: int | None,
    ) -> None:
        self._limits = limits
        self._encode_word = encode_word
        self._compile_grammar = compile_grammar
        self._adapters = adapters
        self._seeds = random.Random(seed)
        self._lock = threading.Lock()

    @property
    def max_prompt_tokens(self) -> int:
        """Of a request that wants a vector."""
        return self._limits.max_len

    @property
    def adapters(self) -> Adapters:
        """Raises InvalidRequestError if there are none."""
        if self._adapters is None:
            raise InvalidRequestError(
                "LoRA adapters need an engine that was made with enable_lora=True, and a model that generates",
                field="lora_request",
            )
        return self._adapters

    @property
    def classification(self) -> ClassificationSupport | None:
        """What the model says of texts, if it has a head for that."""
        return self._limits.classification

    def check_generates(self) -> None:
        """Raises InvalidRequestError if the model gives embeddings or scores only."""
        if self._limits.classification is not None:
            raise InvalidRequestError(
                "this model is a classifier, which cannot generate text; use score_pairs(), rerank() or classify()"
            )
        if not self._limits.generates:
            raise InvalidRequestError("this model is an encoder, which cannot generate text; use embed()")

    def pooling_params(self, pooling: str | None, normalize: bool | None, dimensions: int | None) -> PoolingParams:
        """What was asked for, with the model's own choices for None; raises InvalidRequestError."""
        if self._limits.classification is not None:
            raise InvalidRequestError(
                "this model gives scores and no vectors; use score_pairs(), rerank() or classify()"
            )
        if self._limits.embedding is None:
            raise InvalidRequestError("this engine's runner gives no embeddings")
        return self._limits.embedding.params(pooling, normalize, dimensions)

    def check_length(self, num_at_least: int) -> None:
        """Raises InvalidRequestError for a prompt of at least so many tokens if they are too many in any case."""
        limits = self._limits
        if num_at_least > limits.max_len:
            limit = (
                f"the model's limit is max_model_len={limits.max_model_len}; shorten the prompt"
                if limits.max_model_len <= limits.num_slots
                else f"the KV cache holds {limits.num_slots}; shorten the prompt or raise kv_cache_memory"
            )
            raise InvalidRequestError(f"the prompt has {num_at_least} tokens or more, but {limit}", field="prompt")

    def check(self, prompt_token_ids: list[int], params: SamplingParams, options: RequestOptions) -> None:
        """Raises InvalidRequestError for what can never be served."""
        if options.pooling is None:
            self.check_generates()
        self._check_prompt(prompt_token_ids)
        self._check_params(params)
        max_tokens = self._max_tokens(len(prompt_token_ids), params)
        if options.beam_params is not None:
            self._check_beams(len(prompt_token_ids), max_tokens, options.beam_params.beam_width)
        _check_thinking_budget(params, options.markup)
        self._grammar(params, options.markup)
        self._adapter(options.lora_request)
        _check_options(options)

    def make(self, prompt_token_ids: list[int], params: SamplingParams, options: RequestOptions) -> Request:
        """Of what `check` has passed."""
        request = Request(
            request_id=options.request_id or uuid.uuid4().hex,
            prompt_token_ids=list(prompt_token_ids),
            params=params,
            max_tokens=self._max_tokens(len(prompt_token_ids), params),
            seed=self._draw_seed() if params.seed is None else params.seed,
            eos_token_ids=self._limits.eos_token_ids,
            bad_words_token_ids=self._bad_words(params),
            grammar=self._grammar(params, options.markup),
            adapter=self._adapter(options.lora_request),
            **{name: getattr(options, name) for name in _PASSED_ON},
        )
        if options.timeout is not None:
            request.deadline = time.monotonic() + options.timeout
        if params.output_kind is RequestOutputKind.FINAL_ONLY:
            request.final_only = True  # its text is decoded once, at its end
        return request

    def _draw_seed(self) -> int:
        with self._lock:
            return self._seeds.getrandbits(63)

    def _check_prompt(self, token_ids: list[int]) -> None:
        if not token_ids:
            raise InvalidRequestError("the prompt is empty; it must have at least one token", field="prompt")
        vocab_size = self._limits.vocab_size
        for token_id in token_ids:
            if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id < vocab_size:
                raise InvalidRequestError(
                    f"the prompt has the token id {token_id!r}, but the vocabulary holds ids from 0 to "
                    f"{vocab_size - 1}",
                    field="prompt",
                )

    def _max_tokens(self, num_prompt_tokens: int, params: SamplingParams) -> int:
        """What was asked for, or what is left; refuses what cannot be started."""
        limits = self._limits
        num_needed = num_prompt_tokens + max(params.min_tokens, 0 if params.max_tokens == 0 else 1)
        or_lower = ", lower min_tokens" if params.min_tokens > 1 else ""
        if num_needed > limits.max_model_len:
            raise InvalidRequestError(
                f"the prompt has {num_prompt_tokens} tokens and needs room for {num_needed}, but the model's limit is "
                f"max_model_len={limits.max_model_len}; shorten the prompt{or_lower}",
                field="prompt",
            )
        if num_needed > limits.num_slots:
            raise InvalidRequestError(
                f"the prompt has {num_prompt_tokens} tokens and needs room for {num_needed}, but the KV cache holds "
                f"{limits.num_slots}; shorten the prompt{or_lower} or raise kv_cache_memory",
                field="prompt",
            )
        num_left = limits.max_len - num_prompt_tokens
        return num_left if params.max_tokens is None else min(params.max_tokens, num_left)

    def _check_beams(self, num_prompt_tokens: int, max_tokens: int, beam_width: int) -> None:
        """Refuses beams that do not fit in the cache together; the full blocks of their prompt are shared."""
        limits = self._limits
        if limits.layout is None:
            return
        num_needed = limits.layout.num_blocks_for_beams(num_prompt_tokens, max_tokens, beam_width)
        if num_needed > limits.num_blocks:
            raise InvalidRequestError(
                f"beam_width={beam_width} beams of {num_prompt_tokens} prompt tokens, which they share, and up to "
                f"{max_tokens} new ones each need {num_needed} blocks, but the KV cache holds {limits.num_blocks}; "
                "lower beam_width or max_tokens, or raise kv_cache_memory",
                field="beam_width",
            )

    def _check_params(self, params: SamplingParams) -> None:
        if not isinstance(params, SamplingParams):
            raise InvalidRequestError(f"sampling_params={params!r} must be a SamplingParams", field="sampling_params")
        limits = self._limits
        for name in ("stop_token_ids", "allowed_token_ids", "logprob_token_ids", "logit_bias"):
            for token_id in getattr(params, name) or ():
                if token_id >= limits.vocab_size:
                    raise InvalidRequestError(
                        f"{name} has the token id {token_id}, but the vocabulary holds ids from 0 to "
                        f"{limits.vocab_size - 1}",
                        field=name,
                    )
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(params, name)
            if value is not None and limits.max_logprobs >= 0 and not 0 <= value <= limits.max_logprobs:
                raise InvalidRequestError(
                    f"{name}={value} is out of range: the engine's max_logprobs is {limits.max_logprobs}; "
                    "ask for fewer, or raise max_logprobs",
                    field=name,
                )
        if self._encode_word is None and (params.stop or params.bad_words):
            raise InvalidRequestError(
                "stop and bad_words need a tokenizer, and this engine has none; use token ids",
                field="stop" if params.stop else "bad_words",
            )

    def _bad_words(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        if not params.bad_words:
            return ()
        assert self._encode_word is not None
        with blamed_on("bad_words"):
            return tuple(spelling for word in params.bad_words for spelling in self._encode_word(word) if spelling)

    def _grammar(self, params: SamplingParams, markup: Markup) -> Any:
        """Compiled here, in the caller's thread; the compiler keeps it for the next time."""
        if params.structured_outputs is None:
            return None
        if self._compile_grammar is None:
            message = "structured_outputs needs a tokenizer, and this engine has none"
            raise InvalidRequestError(message, field="structured_outputs")
        with blamed_on("structured_outputs"):
            return self._compile_grammar(params.structured_outputs, markup.reasoning_grammar)

    def _adapter(self, wanted: LoRARequest | None) -> Adapter | None:
        """Loaded here, in the caller's thread; it is kept for the next time."""
        if wanted is None:
            return None
        if not isinstance(wanted, LoRARequest):
            raise InvalidRequestError(f"lora_request={wanted!r} must be a LoRARequest", field="lora_request")
        with blamed_on("lora_request"):
            return self.adapters.get(wanted)


def _check_thinking_budget(params: SamplingParams, markup: Markup) -> None:
    if params.thinking_token_budget is not None and not markup.knows_reasoning:
        raise InvalidRequestError(
            f"thinking_token_budget={params.thinking_token_budget} needs a model with a reasoning format, and none "
            "was found in this one's chat template; name it with reasoning_parser=..., or leave the budget out",
            field="thinking_token_budget",
        )


def _check_options(options: RequestOptions) -> None:
    if options.request_id is not None and (not isinstance(options.request_id, str) or not options.request_id):
        raise _bad_option(options, "request_id", "a string that is not empty")
    if isinstance(options.priority, bool) or not isinstance(options.priority, int):
        raise _bad_option(options, "priority", "an integer; lower is served first")
    if options.cache_salt is not None and (not isinstance(options.cache_salt, str) or not options.cache_salt):
        raise _bad_option(options, "cache_salt", "a string that is not empty")
    if options.timeout is not None and not _is_timeout(options.timeout):
        raise _bad_option(options, "timeout", "a number of seconds > 0")


def _bad_option(options: RequestOptions, name: str, must: str) -> InvalidRequestError:
    return InvalidRequestError(f"{name}={getattr(options, name)!r} must be {must}", field=name)


def _is_timeout(timeout: object) -> bool:
    return isinstance(timeout, (int, float)) and not isinstance(timeout, bool) and is_finite(timeout) and timeout > 0
