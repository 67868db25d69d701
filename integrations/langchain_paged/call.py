"""One call of a model: what counts for its answer, in the engine's terms."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Self

from langchain_core.messages import BaseMessage
from langchain_core.outputs import ChatResult, LLMResult

from langchain_paged.messages import has_open_answer, to_openai
from langchain_paged.outputs import MessageChunkWriter, TextChunkWriter, chat_result, llm_result
from langchain_paged.settings import ChatSettings, RequestSettings, unknown_name
from paged_backend import LLM, InvalidRequestError, RequestOutput, SamplingParams

_NOT_AVAILABLE_YET = (
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "functions",
    "function_call",
    "response_format",
    "strict",
)
_TEMPLATE_OPTIONS = ("chat_template", "chat_template_kwargs", "continue_final_message")
_OPTIONS = (*_TEMPLATE_OPTIONS, "timeout", "priority", "cache_salt")
_NOT_SAMPLING = (*_OPTIONS, "logprobs", "top_logprobs", "stream_usage")


@dataclasses.dataclass(frozen=True, slots=True)
class Completion:
    """How the prompts of one call are completed."""

    model: str
    settings: dict[str, Any]

    @property
    def options(self) -> dict[str, Any]:
        """What the engine's methods take besides prompts and sampling parameters."""
        return {name: self.settings[name] for name in _OPTIONS if self.settings.get(name) is not None}

    def sampling_params(self, llm: LLM) -> SamplingParams:
        """The model's recommendations, with what was given."""
        return llm.get_default_chat_params(**given_sampling(self.settings))

    @property
    def num_top_logprobs(self) -> int:
        return self.settings["top_logprobs"] or 0

    def result(self, outputs: Sequence[RequestOutput]) -> LLMResult:
        return llm_result(outputs, self.model, num_top_logprobs=self.num_top_logprobs)

    def chunk_writer(self) -> TextChunkWriter:
        """Raises InvalidRequestError if the chunks of several answers would mix."""
        self.check_streams()
        return TextChunkWriter(self.model, num_top_logprobs=self.num_top_logprobs)

    def check_streams(self) -> None:
        if self.settings["n"] not in (None, 1):
            raise InvalidRequestError(f"n={self.settings['n']} answers cannot be streamed; use generate(), or n=1")


@dataclasses.dataclass(frozen=True, slots=True)
class Chat(Completion):
    """One conversation, and how it is answered."""

    messages: list[dict[str, Any]]

    @classmethod
    def of(
        cls,
        fields: ChatSettings,
        model: str,
        messages: Sequence[BaseMessage],
        stop: list[str] | None,
        kwargs: Mapping[str, Any],
    ) -> Self:
        settings = settings_of_call(fields, stop, kwargs)
        if settings["continue_final_message"] is None:
            settings["continue_final_message"] = has_open_answer(messages)
        return cls(model, settings, to_openai(messages))

    @property
    def template_options(self) -> dict[str, Any]:
        return {name: self.settings[name] for name in _TEMPLATE_OPTIONS}

    def chat_result(self, outputs: Sequence[RequestOutput]) -> ChatResult:
        return chat_result(outputs[0], self.model, num_top_logprobs=self.num_top_logprobs)

    def message_writer(self) -> MessageChunkWriter:
        """Raises InvalidRequestError if the chunks of several answers would mix."""
        self.check_streams()
        with_usage = self.settings["stream_usage"] is not False
        return MessageChunkWriter(self.model, num_top_logprobs=self.num_top_logprobs, with_usage=with_usage)


def settings_of_call(fields: RequestSettings, stop: list[str] | None, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Every setting's value for one call: the call's, else the field's.

    Raises InvalidRequestError for a name that nobody knows, NotImplementedError for what is not available yet.
    """
    settings = ChatSettings if isinstance(fields, ChatSettings) else RequestSettings
    values = {name: getattr(fields, name) for name in settings.model_fields}
    for name, value in kwargs.items():
        if name in values:
            values[name] = value
        elif name not in _NOT_AVAILABLE_YET:
            raise InvalidRequestError(unknown_name(f"a call of {type(fields).__name__}", name, [*values, "model"]))
        elif value:
            raise NotImplementedError(f"{name}=... was given, but there are no tools and no structured output yet")
    if stop is not None:
        values["stop"] = stop
    return values


def given_sampling(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The sampling settings that somebody chose, by the engine's names."""
    given = {name: value for name, value in settings.items() if name not in _NOT_SAMPLING and value is not None}
    logprobs, num_top = settings["logprobs"], settings["top_logprobs"]
    if logprobs is not None and not isinstance(logprobs, bool):
        raise InvalidRequestError(f"logprobs={logprobs!r} must be True or False; top_logprobs says how many")
    if logprobs or (logprobs is None and num_top is not None):
        given["logprobs"] = num_top or 0
    return given
