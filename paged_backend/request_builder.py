"""What callers pass to `LLM` becomes requests: prompts or chats, parameters, options."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any, NamedTuple

from paged_backend.beam_search_params import BeamSearchParams
from paged_backend.chat.chat_builder import ChatBuilder, ChatOptions
from paged_backend.chat.tokenizer import Tokenizer
from paged_backend.engine.request import Request
from paged_backend.engine.request_factory import RequestFactory, RequestOptions
from paged_backend.errors import InvalidRequestError, blamed_on, unknown_argument
from paged_backend.lora import LoRARequest
from paged_backend.markup import constrained, markup_of, reasoning_markup
from paged_backend.pooling_params import ClassificationSupport, PoolingParams
from paged_backend.reranking import PairScoring, pairs_of
from paged_backend.sampling_params import SamplingParams
from paged_backend.scoring import Pair, Scoring, continuations_of, pair_of

Prompt = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, or vLLM's `{"prompt": ...}` or `{"prompt_token_ids": ...}`, which may hold a `cache_salt` too."""

_OPTIONS = ("request_id", "priority", "cache_salt", "timeout", "lora_request")
_PROMPT_KEYS = ("prompt", "prompt_token_ids", "cache_salt")
_NUM_END_TOKENS = 16
"""Enough of a prompt's end to see whether it opens the reasoning."""
_SAMPLING_NAMES = frozenset(field.name for field in dataclasses.fields(SamplingParams))
_SCORING = SamplingParams(max_tokens=0, prompt_logprobs=0, detokenize=False)
_CLASSIFYING = PoolingParams(pooling="cls", normalize=False)
"""Says that a vector is wanted; which one, the classifier decides."""
_CHAT_OPTIONS = tuple(field.name for field in dataclasses.fields(ChatOptions))
_NOT_AVAILABLE_YET = ("prompt_adapter_request",)


class _Prompt(NamedTuple):
    """A prompt, and those of the options of its request that it brings with it."""

    token_ids: list[int]
    options: dict[str, Any]


class RequestBuilder:
    """Makes all requests of one call before any of them is queued, so that a bad one leaves nothing behind."""

    def __init__(
        self,
        factory: RequestFactory,
        tokenizer: Tokenizer | None,
        default_sampling: Mapping[str, Any],
        *,
        tool_call_parser: str | None = "auto",
        reasoning_parser: str | None = "auto",
    ) -> None:
        self._factory = factory
        self._chats = None if tokenizer is None else ChatBuilder(tokenizer, tool_call_parser, reasoning_parser)
        self._tokenizer = tokenizer
        self._default_sampling = default_sampling

    @property
    def tokenizer(self) -> Tokenizer:
        """Raises InvalidRequestError if the model came without one."""
        if self._tokenizer is None:
            raise InvalidRequestError("this engine has no tokenizer: pass one to LLM(), or prompts as token ids")
        return self._tokenizer

    def default_sampling_params(self, **overrides: Any) -> SamplingParams:
        return SamplingParams(**{**self._default_sampling, **overrides})

    def default_chat_params(self, **overrides: Any) -> SamplingParams:
        return SamplingParams(**{"max_tokens": None, **self._default_sampling, **overrides})

    def completions(
        self, prompts: Any, sampling_params: Any, *, final_only: bool = False, **options: Any
    ) -> list[Request]:
        self._factory.check_generates()
        prompts = [prompts] if _is_one_prompt(prompts) else list(prompts)
        params = _params_for(len(prompts), sampling_params, self.default_sampling_params)
        read = [self._marked(self._read(prompt), one) for prompt, one in zip(prompts, params, strict=True)]
        return self._requests(read, params, options, final_only=final_only)

    def chats(self, messages: Any, sampling_params: Any, *, final_only: bool = False, **options: Any) -> list[Request]:
        self._factory.check_generates()
        chat_options = ChatOptions(**{name: options.pop(name) for name in _CHAT_OPTIONS if name in options})
        conversations = list(messages) if _is_list_of_conversations(messages) else [messages]
        params = _params_for(len(conversations), sampling_params, self.default_chat_params)
        tokenizer = self.tokenizer
        assert self._chats is not None
        chats = [self._chats.prepare(conversation, chat_options) for conversation in conversations]
        params = [constrained(one, chat, tokenizer) for one, chat in zip(params, chats, strict=True)]
        with blamed_on("messages", instead_of="prompt"):
            prompts = [
                _Prompt(self._encoded_chat(chat.text), {"prompt": chat.text, "markup": markup_of(chat, tokenizer)})
                for chat in chats
            ]
            return self._requests(prompts, params, options, final_only=final_only)

    def chat_token_ids(self, messages: Any, **options: Any) -> list[int]:
        """The prompt of one chat, however long."""
        for name in options:
            if name not in _CHAT_OPTIONS:
                raise InvalidRequestError(unknown_argument("the prompt of a chat", name, _CHAT_OPTIONS), field=name)
        tokenizer = self.tokenizer
        assert self._chats is not None
        with blamed_on("messages", instead_of="prompt"):
            return tokenizer.encode_chat(self._chats.prepare(messages, ChatOptions(**options)).text)

    def beams(self, prompts: Any, params: Any, **options: Any) -> list[Request]:
        prompts = [prompts] if _is_one_prompt(prompts) else list(prompts)
        beams = [params] * len(prompts) if isinstance(params, BeamSearchParams) else params
        if not isinstance(beams, Sequence) or not all(isinstance(item, BeamSearchParams) for item in beams):
            message = f"params={params!r} must be a BeamSearchParams, or a list with one per prompt"
            raise InvalidRequestError(message, field="params")
        sampling = _params_for(len(prompts), [item.sampling_params() for item in beams], self.default_sampling_params)
        read = [self._read(prompt) for prompt in prompts]
        for prompt, item in zip(read, beams, strict=True):
            prompt.options["beam_params"] = item
        return self._requests(read, sampling, options, final_only=True)

    def scores(self, prompts: Any, continuations: Any, **options: Any) -> Scoring:
        is_one = _is_one_prompt(prompts)
        prompts = [prompts] if is_one else list(prompts)
        of_each = continuations_of(prompts, continuations, is_one=is_one)
        pairs: list[Pair] = []
        to_compute: list[_Prompt] = []
        for prompt, its_continuations in zip(prompts, of_each, strict=True):
            content, salt = _content(prompt)
            for continuation in its_continuations:
                pair = pair_of(content, continuation, lambda: self.tokenizer)
                pairs.append(pair)
                own = {"cache_salt": salt, "prompt_logprobs_start": len(pair.prompt)}
                to_compute.append(_Prompt(pair.prompt + pair.continuation, own))
        requests = self._requests(to_compute, [_SCORING] * len(pairs), options, final_only=True)
        return Scoring(requests, pairs, list(map(len, of_each)))

    def embeddings(
        self,
        prompts: Any,
        *,
        pooling: str | None = None,
        normalize: bool | None = None,
        dimensions: int | None = None,
        truncate_prompt_tokens: int | None = None,
        **options: Any,
    ) -> list[Request]:
        prompts = [prompts] if _is_one_prompt(prompts) else list(prompts)
        params = self._factory.pooling_params(pooling, normalize, dimensions)
        is_cut = truncate_prompt_tokens is not None
        read = [self._truncated(self._read(prompt, is_cut=is_cut), truncate_prompt_tokens) for prompt in prompts]
        wish = [SamplingParams(max_tokens=0)] * len(prompts)
        return self._requests(read, wish, options, final_only=True, pooling=params)

    def pairs(
        self,
        text_1: Any,
        text_2: Any,
        *,
        use_activation: bool = True,
        truncate_prompt_tokens: int | None = None,
        **options: Any,
    ) -> PairScoring:
        pairs, support = pairs_of(text_1, text_2), self._factory.classification
        if support is None:
            requests, texts = list[Request](), dict[str, int]()
            for name, side in zip(("text_1", "text_2"), zip(*pairs, strict=True), strict=True):
                new = [text for text in dict.fromkeys(side) if text not in texts]
                texts |= {text: len(texts) + index for index, text in enumerate(new)}
                with blamed_on(name, instead_of="prompt"):
                    requests += self.embeddings(new, truncate_prompt_tokens=truncate_prompt_tokens, **options)
            indices = [(texts[one], texts[other]) for one, other in pairs]
            return PairScoring(requests, indices, None, use_activation)
        if len(support.labels) != 1:
            raise InvalidRequestError(
                f"a score needs a model with one label, and this one has {len(support.labels)}: "
                f"{', '.join(support.labels[:4])}; use classify()"
            )
        limit = self._limit(truncate_prompt_tokens)
        with blamed_on("text_2", instead_of="prompt"):
            read = [self._pair(one, other, limit) for one, other in pairs]
            requests = self._classifying(read, options)
        return PairScoring(requests, [(index,) for index in range(len(pairs))], support, use_activation)

    def classifications(
        self, prompts: Any, *, truncate_prompt_tokens: int | None = None, **options: Any
    ) -> tuple[list[Request], ClassificationSupport]:
        support = self._factory.classification
        if support is None:
            raise InvalidRequestError("this model has no head that classifies; use generate(), chat() or embed()")
        prompts = [prompts] if _is_one_prompt(prompts) else list(prompts)
        read = [self._truncated(self._read(prompt), truncate_prompt_tokens) for prompt in prompts]
        return self._classifying(read, options), support

    def _pair(self, first: str, second: str, limit: int | None) -> _Prompt:
        token_ids, token_type_ids = self.tokenizer.encode_pair(first, second, limit)
        return _Prompt(token_ids, {"prompt": f"{first}\n{second}", "token_type_ids": token_type_ids})

    def _classifying(self, prompts: list[_Prompt], options: dict[str, Any]) -> list[Request]:
        wish = [SamplingParams(max_tokens=0)] * len(prompts)
        return self._requests(prompts, wish, options, final_only=True, pooling=_CLASSIFYING)

    def load_adapter(self, wanted: LoRARequest) -> None:
        with blamed_on("lora_path"):
            self._factory.adapters.get(wanted)

    def remove_adapter(self, name: str) -> bool:
        return self._factory.adapters.remove(name)

    def adapter_names(self) -> list[str]:
        return self._factory.adapters.names()

    def _truncated(self, prompt: _Prompt, limit: int | None) -> _Prompt:
        """The prompt cut to `limit` tokens; what the tokenizer puts after a text stays behind it."""
        limit = self._limit(limit)
        if limit is None:
            return prompt
        num_final = 0 if prompt.options.get("prompt") is None else self.tokenizer.num_final_special_tokens
        if len(prompt.token_ids) <= limit or limit <= num_final:
            return prompt._replace(token_ids=prompt.token_ids[:limit])
        end = prompt.token_ids[len(prompt.token_ids) - num_final :]
        return prompt._replace(token_ids=prompt.token_ids[: limit - num_final] + end)

    def _limit(self, limit: int | None) -> int | None:
        """What `truncate_prompt_tokens` says; None: nothing is cut."""
        if limit is None:
            return None
        if isinstance(limit, bool) or not isinstance(limit, int) or (limit < 1 and limit != -1):
            raise InvalidRequestError(
                f"truncate_prompt_tokens={limit!r} must be an integer ≥ 1, or -1 for as many as the model takes",
                field="truncate_prompt_tokens",
            )
        return self._factory.max_prompt_tokens if limit == -1 else limit

    def _marked(self, prompt: _Prompt, params: SamplingParams) -> _Prompt:
        """With what limits its reasoning, if that is asked for."""
        if self._chats is None or not isinstance(params, SamplingParams) or params.thinking_token_budget is None:
            return prompt
        end = self.tokenizer.decode(prompt.token_ids[-_NUM_END_TOKENS:], skip_special_tokens=False)
        prompt.options["markup"] = reasoning_markup(self._chats.stage_after(end), self.tokenizer)
        return prompt

    def _encoded_chat(self, text: str) -> list[int]:
        self._factory.check_length(self.tokenizer.min_num_tokens(text))
        return self.tokenizer.encode_chat(text)

    def _read(self, prompt: Any, *, is_cut: bool = False) -> _Prompt:
        """As token ids; what is far too long is refused before it is tokenised, unless it is cut afterwards."""
        content, salt = _content(prompt)
        if isinstance(content, list):
            return _Prompt(content, {"cache_salt": salt})
        if isinstance(content, str) and not is_cut:
            self._factory.check_length(self.tokenizer.min_num_tokens(content))
        return _Prompt(self.tokenizer.encode(content), {"cache_salt": salt, "prompt": content})

    def _requests(
        self, prompts: Sequence[_Prompt], params: Sequence[SamplingParams], options: dict[str, Any], **of_all: Any
    ) -> list[Request]:
        """`options` are the caller's; `of_all` are others, which all of the requests have."""
        calls = list(zip(prompts, params, _options_of_each(prompts, options, of_all), strict=True))
        for index, (prompt, one, its_options) in enumerate(calls):
            try:
                self._factory.check(prompt.token_ids, one, its_options)
            except InvalidRequestError as error:
                if len(calls) == 1:
                    raise
                raise InvalidRequestError(f"prompt {index}: {error}", field=error.field) from None
        return [self._factory.make(prompt.token_ids, one, its_options) for prompt, one, its_options in calls]


def _options_of_each(
    prompts: Sequence[_Prompt], options: dict[str, Any], of_all: dict[str, Any]
) -> list[RequestOptions]:
    """What a prompt brings with it counts more than what the caller gives for all."""
    options = {name: value for name, value in options.items() if name not in _NOT_AVAILABLE_YET or value}
    _check_names(options)
    if options.get("request_id") is not None and len(prompts) > 1:
        message = f"request_id={options['request_id']!r} names one request, not {len(prompts)}"
        raise InvalidRequestError(message, field="request_id")
    with blamed_on("priority"):
        priorities = _one_for_each(options.pop("priority", 0), "priorities", len(prompts))
    with blamed_on("lora_request"):
        adapters = _one_for_each(options.pop("lora_request", None), "lora_requests", len(prompts))
    own = [{name: value for name, value in prompt.options.items() if value is not None} for prompt in prompts]
    return [
        RequestOptions(**{"priority": rank, "lora_request": adapter, **options, **of_all, **its_own})
        for rank, adapter, its_own in zip(priorities, adapters, own, strict=True)
    ]


def _one_for_each(value: Any, plural: str, num_prompts: int) -> list[Any]:
    values = list(value) if isinstance(value, (list, tuple)) else [value] * num_prompts
    if len(values) != num_prompts:
        raise InvalidRequestError(f"{len(values)} {plural} for {num_prompts} prompts; give one, or one for each")
    return values


def _check_names(options: dict[str, Any]) -> None:
    for name in options:
        if name in _NOT_AVAILABLE_YET:
            raise InvalidRequestError(f"{name} is not available yet; leave it out", field=name)
        if name in _SAMPLING_NAMES:
            raise InvalidRequestError(f"{name} is a sampling parameter: give SamplingParams({name}=...)", field=name)
        if name not in _OPTIONS:
            message = unknown_argument("a request", name, (*_OPTIONS, *_CHAT_OPTIONS))
            raise InvalidRequestError(message, field=name)


def _content(prompt: Any) -> tuple[Any, str | None]:
    """The text or the ids of a prompt, and its cache salt."""
    if isinstance(prompt, Mapping):
        for key in prompt:
            if key not in _PROMPT_KEYS:
                raise InvalidRequestError(unknown_argument("a prompt", key, _PROMPT_KEYS), field="prompt")
        known = [prompt[key] for key in ("prompt_token_ids", "prompt") if prompt.get(key) is not None]
        if not known:
            message = f"a prompt given as a mapping needs 'prompt' or 'prompt_token_ids': {prompt!r}"
            raise InvalidRequestError(message, field="prompt")
        return _content(known[0])[0], prompt.get("cache_salt")
    if hasattr(prompt, "tolist"):  # an array of ids
        prompt = prompt.tolist()
    if isinstance(prompt, Sequence) and not isinstance(prompt, (str, bytes)):
        return [int(item) if isinstance(item, Integral) else item for item in prompt], None
    return prompt, None


def _params_for(num_prompts: int, params: Any, default: Callable[[], SamplingParams]) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or default()] * num_prompts
    if isinstance(params, BeamSearchParams):
        raise InvalidRequestError(
            "a BeamSearchParams is for beam_search(), which gives its outputs at the end, not in a stream",
            field="sampling_params",
        )
    if not isinstance(params, Sequence):
        message = f"sampling_params={params!r} must be a SamplingParams, or a list with one per prompt"
        raise InvalidRequestError(message, field="sampling_params")
    if len(params) != num_prompts:
        message = f"{len(params)} sampling_params for {num_prompts} prompts; give one, or one for each"
        raise InvalidRequestError(message, field="sampling_params")
    return list(params)


def _is_one_prompt(prompts: Any) -> bool:
    """Text, a mapping or a list of ids; anything else that can be iterated over holds prompts."""
    if isinstance(prompts, (str, bytes, Mapping)) or not isinstance(prompts, Iterable):
        return True
    if getattr(prompts, "ndim", None) == 1:
        return True
    return isinstance(prompts, Sequence) and bool(prompts) and all(isinstance(item, Integral) for item in prompts)


def _is_list_of_conversations(messages: Any) -> bool:
    if not isinstance(messages, Sequence) or not messages or not isinstance(messages[0], (list, tuple)):
        return False
    return not messages[0] or isinstance(messages[0][0], Mapping)
