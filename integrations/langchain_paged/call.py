"""One call of a model: what counts for its answer, in the engine's terms."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Self

from langchain_core.messages import BaseMessage
from langchain_core.outputs import ChatResult, LLMResult

from langchain_paged.messages import has_open_answer, to_openai
from langchain_paged.outputs import MessageChunkWriter, TextChunkWriter, chat_result, llm_result
from langchain_paged.settings import ChatSettings, RequestSettings
from langchain_paged.tools import to_structured_outputs, to_tool_choice, to_tools
from paged_backend import LLM, InvalidRequestError, RequestOutput, SamplingParams, StructuredOutputsParams, unknown_name

_OF_A_CALL = ("tools", "tool_choice", "response_format", "strict")
_TEMPLATE_OPTIONS = ("chat_template", "chat_template_kwargs", "continue_final_message")
_OPTIONS = (*_TEMPLATE_OPTIONS, "timeout", "priority", "cache_salt", "lora_request")
_NOT_SAMPLING = (*_OPTIONS, "logprobs", "top_logprobs", "stream_usage", "parallel_tool_calls")


@dataclasses.dataclass(frozen=True, slots=True)
class Completion:
    """How the prompts of one call are completed."""

    model: str
    settings: dict[str, Any]

    @property
    def options(self) -> dict[str, Any]:
        """What the engine's methods take besides prompts and sampling parameters."""
        return _given_options(self.settings)

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
    tool_options: dict[str, Any]

    @classmethod
    def of(
        cls,
        fields: ChatSettings,
        model: str,
        messages: Sequence[BaseMessage],
        stop: list[str] | None,
        kwargs: Mapping[str, Any],
    ) -> Self:
        of_call = {name: value for name, value in kwargs.items() if name in _OF_A_CALL and value is not None}
        settings = settings_of_call(fields, stop, {k: v for k, v in kwargs.items() if k not in _OF_A_CALL})
        settings["structured_outputs"] = _one_of(settings["structured_outputs"], of_call.get("response_format"))
        if settings["continue_final_message"] is None:
            settings["continue_final_message"] = has_open_answer(messages)
        return cls(model, settings, to_openai(messages), _tool_options(of_call, settings["parallel_tool_calls"]))

    @property
    def chat_options(self) -> dict[str, Any]:
        """What the engine's chat methods take besides messages and sampling parameters."""
        return _given_options(self.settings) | self.tool_options

    @property
    def prompt_options(self) -> dict[str, Any]:
        """Those of them that make the prompt."""
        of_template = {name: self.settings[name] for name in _TEMPLATE_OPTIONS if self.settings[name] is not None}
        return of_template | self.tool_options

    def chat_result(self, outputs: Sequence[RequestOutput]) -> ChatResult:
        return chat_result(outputs[0], self.model, num_top_logprobs=self.num_top_logprobs)

    def message_writer(self, *, as_blocks: bool) -> MessageChunkWriter:
        """Raises InvalidRequestError if the chunks of several answers would mix."""
        self.check_streams()
        with_usage = self.settings["stream_usage"] is not False
        return MessageChunkWriter(
            self.model, num_top_logprobs=self.num_top_logprobs, with_usage=with_usage, as_blocks=as_blocks
        )


def settings_of_call(fields: RequestSettings, stop: list[str] | None, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Every setting's value for one call: the call's, else the field's.

    Raises InvalidRequestError for a name that nobody knows.
    """
    settings = ChatSettings if isinstance(fields, ChatSettings) else RequestSettings
    values = {name: getattr(fields, name) for name in settings.model_fields}
    for name, value in kwargs.items():
        if name not in values:
            of_call = _OF_A_CALL if settings is ChatSettings else ()
            raise InvalidRequestError(
                unknown_name(f"a call of {type(fields).__name__}", name, [*values, *of_call, "model"])
            )
        values[name] = value
    if stop is not None:
        values["stop"] = stop
    values["structured_outputs"] = _structured_outputs(values["structured_outputs"])
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


def _given_options(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {name: settings[name] for name in _OPTIONS if settings.get(name) is not None}


def _tool_options(of_call: Mapping[str, Any], parallel: bool | None) -> dict[str, Any]:
    """A call's tools and what is said of them, in the engine's form."""
    options: dict[str, Any] = {}
    choice = to_tool_choice(of_call.get("tool_choice"))
    if of_call.get("tools"):
        options["tools"] = to_tools(of_call["tools"], of_call.get("strict"))
        is_one = isinstance(choice, dict) if parallel is None else not parallel
        options["parallel_tool_calls"] = not is_one
    return options if choice is None else options | {"tool_choice": choice}


def _structured_outputs(value: Any) -> StructuredOutputsParams | None:
    return StructuredOutputsParams(**value) if isinstance(value, Mapping) else value


def _one_of(structured_outputs: StructuredOutputsParams | None, response_format: Any) -> StructuredOutputsParams | None:
    """The call's `response_format`, which counts more than the other way to say it."""
    return to_structured_outputs(response_format) or structured_outputs
