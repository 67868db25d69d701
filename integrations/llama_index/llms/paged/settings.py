"""What a `Paged` and each of its calls may be given."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from llama_index.core.bridge.pydantic import BaseModel, Field

from paged_backend import InvalidRequestError, SamplingParams, unknown_name

SAMPLING_NAMES = frozenset(field.name for field in dataclasses.fields(SamplingParams))


class RequestSettings(BaseModel):
    """How one request is answered.

    None, the default everywhere, leaves the choice to the model's generation_config.json, then to the engine. Each of
    these, and each field of `paged_backend.SamplingParams`, can be given to the constructor and to a single call; the
    call wins, also with 0 or None.
    """

    temperature: float | None = None
    """[0, 2]; 0 always takes the most likely token."""
    max_tokens: int | None = None
    """Most tokens to generate. None: until the model ends its answer, or its context is full."""
    stop: list[str] | str | None = None
    """Texts that end the answer and are cut from it. Those of a call replace these; `[]` means none."""
    seed: int | None = None
    """With a seed, the answer does not depend on what else the engine is doing."""
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
    """> 0; above 1 makes tokens of the prompt and the answer less likely."""
    additional_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Further fields of `paged_backend.SamplingParams`. They can be given by name too: `Paged(min_tokens=3)`."""
    timeout: float | None = None
    """Seconds until the request is given up with a TimeoutError."""
    priority: int | None = None
    """Lower is served first; None is 0."""
    cache_salt: str | None = None
    """Requests share cached prefixes only with requests of the same salt."""
    lora_request: Any = None
    """The LoRA adapter that answers: a `paged_backend.LoRARequest`. The engine needs `enable_lora=True`."""
    chat_template: str | None = None
    """A Jinja template instead of the model's own."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Further variables for the template, such as `{"enable_thinking": False}`."""
    continue_final_message: bool | None = None
    """Go on with the last message instead of answering it. None: if it is the assistant's and has text."""


TEMPLATE_OPTIONS = ("chat_template", "chat_template_kwargs", "continue_final_message")
REQUEST_OPTIONS = ("timeout", "priority", "cache_salt", "lora_request")
TOOL_OPTIONS = ("tools", "tool_choice", "parallel_tool_calls")
OPTIONS = (*TEMPLATE_OPTIONS, *TOOL_OPTIONS, *REQUEST_OPTIONS)


def settings_of_call(fields: RequestSettings, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """What was chosen for one call: by the call, else by the fields. Raises InvalidRequestError for an unknown name."""
    own = {name: getattr(fields, name) for name in RequestSettings.model_fields if name != "additional_kwargs"}
    known = SAMPLING_NAMES.union(own, OPTIONS)
    for name in (*fields.additional_kwargs, *kwargs):
        if name not in known:
            raise InvalidRequestError(unknown_name("a call of Paged", name, known))
    chosen = own | fields.additional_kwargs | dict(kwargs)
    return {name: value for name, value in chosen.items() if value is not None}


def with_sampling_by_name(cls: type[BaseModel], values: Mapping[str, Any]) -> dict[str, Any]:
    """The constructor's arguments, with the sampling parameters that are no fields in `additional_kwargs`."""
    further = {name: values[name] for name in values if name in SAMPLING_NAMES and name not in cls.model_fields}
    if not further:
        return dict(values)
    others = {name: value for name, value in values.items() if name not in further}
    return {**others, "additional_kwargs": {**(values.get("additional_kwargs") or {}), **further}}
