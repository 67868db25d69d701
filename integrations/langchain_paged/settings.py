"""What a request may be given."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

from pydantic import AliasChoices, BaseModel, Field

from paged_backend import unknown_name


class RequestSettings(BaseModel):
    """How one request is answered.

    None, the default everywhere, leaves the choice to the model's generation_config.json, then to the engine. Each of
    these can be given to the constructor, to `bind` and to a single call; the call wins, also with 0 or None.
    """

    temperature: float | None = None
    """[0, 2]; 0 always takes the most likely token."""
    max_tokens: int | None = None
    """Most tokens to generate. None: until the model ends its answer, or its context is full."""
    min_tokens: int | None = None
    """No end before this many tokens."""
    stop: list[str] | str | None = Field(default=None, validation_alias=AliasChoices("stop", "stop_sequences"))
    """Texts that end the answer and are cut from it. Those of a call replace these; `[]` means none."""
    stop_token_ids: list[int] | None = None
    """Token ids that end the answer, besides the model's own end tokens."""
    seed: int | None = None
    """With a seed, the answer does not depend on what else the engine is doing."""
    n: int | None = None
    """Answers per prompt. `generate` returns them all, `invoke` the first; more than one cannot be streamed."""
    top_p: float | None = None
    """(0, 1]: sample among the fewest tokens whose probabilities add up to this."""
    top_k: int | None = None
    """Sample among the k most likely tokens; 0 means all."""
    min_p: float | None = None
    """[0, 1]: drop tokens less likely than this share of the most likely one's probability."""
    presence_penalty: float | None = None
    """[-2, 2], subtracted once from each token generated so far."""
    frequency_penalty: float | None = None
    """[-2, 2], subtracted from each generated token as often as it was generated."""
    repetition_penalty: float | None = None
    """> 0; above 1 makes tokens of the conversation and the answer less likely."""
    logit_bias: dict[int, float] | None = None
    """Added to the logits of these token ids; -100 bans, 100 forces."""
    bad_words: list[str] | None = None
    """Words that must not be generated."""
    ignore_eos: bool | None = None
    """True: generate past the model's end tokens."""
    logprobs: bool | None = None
    """True: the answer's metadata has each token's log-probability under `logprobs`, in OpenAI's form."""
    top_logprobs: int | None = None
    """As many of the most likely tokens are listed with each token; implies `logprobs`."""
    structured_outputs: Any = None
    """What the text must match from its first to its last character: a `paged_backend.StructuredOutputsParams`, or its
    fields, such as `{"regex": "[0-9]+"}`, `{"choice": ["yes", "no"]}` or `{"json": schema}`."""
    thinking_token_budget: int | None = None
    """Most tokens of reasoning, for models that reason; the answer is then begun."""
    timeout: float | None = None
    """Seconds until the request is given up with a TimeoutError."""
    priority: int | None = None
    """Lower is served first; None is 0."""
    cache_salt: str | None = None
    """Requests share cached prefixes only with requests of the same salt."""
    lora_request: Any = None
    """The LoRA adapter that answers: a `paged_backend.LoRARequest`. The engine needs `enable_lora=True`."""


class ChatSettings(RequestSettings):
    """How one answer of a chat is given; see `RequestSettings` for what None means."""

    chat_template: str | None = None
    """A Jinja template instead of the model's own."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Further variables for the template, such as `{"enable_thinking": False}`."""
    parallel_tool_calls: bool | None = None
    """False: one call of a tool per answer. None: one if the call names the tool, else as many as the model likes."""
    continue_final_message: bool | None = None
    """Go on with the last message instead of answering it. None: if it is an AIMessage with text."""
    stream_usage: bool | None = None
    """False: the last chunk of a stream has no `usage_metadata`."""


def warn_of_unknown(cls: type[BaseModel], values: Iterable[str]) -> None:
    """Warn of names given to the constructor of `cls` that are none of its fields. For its `before` validator."""
    aliases = (field.validation_alias for field in cls.model_fields.values())
    choices = (choice for alias in aliases if isinstance(alias, AliasChoices) for choice in alias.choices)
    known = {*cls.model_fields, *map(str, choices)}
    for name in values:
        if name not in known:
            # Between here and the caller: the validator, pydantic's __init__ and LangChain's.
            warnings.warn(f"{unknown_name(cls.__name__, name, known)}; it is ignored", stacklevel=5)
