"""A chat, its tools and its options to a prompt, and to how the answer will be read."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from paged_backend.chat.messages import Message
from paged_backend.chat.output_format import OutputFormat
from paged_backend.chat.reasoning import (
    HARMONY,
    REASONING_PARSERS,
    Reasoning,
    ReasoningFormat,
    Stage,
    detect_reasoning_parser,
)
from paged_backend.chat.tokenizer import Tokenizer
from paged_backend.chat.tool_parsers import TOOL_PARSERS, detect_tool_parser
from paged_backend.chat.tool_parsers.base import ToolParser
from paged_backend.chat.tool_parsers.harmony import HarmonyParser
from paged_backend.chat.tool_parsers.hermes import HermesParser
from paged_backend.chat.tool_parsers.json_calls import JsonParser
from paged_backend.chat.tools import Tools, check_tools
from paged_backend.errors import ConfigError, InvalidRequestError

UNSET: Any = object()
"""Stands for the engine's own setting, where None means off."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions:
    """What `chat` takes besides messages, parameters and what all requests take."""

    chat_template: str | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: Mapping[str, Any] | None = None
    tools: Sequence[Mapping[str, Any]] | None = None
    tool_choice: str | Mapping[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    tool_call_parser: str | None = UNSET
    reasoning_parser: str | None = UNSET


class PreparedChat(NamedTuple):
    """A prompt, and how its outputs are to be read."""

    text: str
    output_format: OutputFormat
    tools: Tools | None
    """None: no calls are expected, or none are to be told apart from the text."""


def check_parsers(tool_call_parser: str | None, reasoning_parser: str | None) -> None:
    """Raises ConfigError for a name that nobody knows."""
    for name, value, known in (
        ("tool_call_parser", tool_call_parser, TOOL_PARSERS),
        ("reasoning_parser", reasoning_parser, REASONING_PARSERS),
    ):
        if value not in (None, "auto", *known):
            raise ConfigError(_unknown_parser(name, value, known))


class ChatBuilder:
    """Prepares chats for one model; `tool_call_parser` and `reasoning_parser` are the engine's settings."""

    def __init__(self, tokenizer: Tokenizer, tool_call_parser: str | None, reasoning_parser: str | None) -> None:
        self._tokenizer = tokenizer
        self._tool_call_parser = tool_call_parser
        self._reasoning_parser = reasoning_parser

    def prepare(self, messages: Sequence[Message], options: ChatOptions) -> PreparedChat:
        """Raises InvalidRequestError for whatever in it is wrong."""
        tools = check_tools(options.tools, options.tool_choice, options.parallel_tool_calls)
        template = self._tokenizer.template_text(options.chat_template, has_tools=tools is not None)
        parser = self._tool_parser(template, options)
        if parser is None and tools is not None and tools.is_required:
            raise InvalidRequestError(
                f"tool_choice={options.tool_choice!r} needs a format of tool calls, and tool_call_parser is None; name "
                "one, or leave it at 'auto'",
                field="tool_choice",
            )
        text = self._tokenizer.render_chat(
            messages,
            chat_template=options.chat_template,
            add_generation_prompt=options.add_generation_prompt,
            continue_final_message=options.continue_final_message,
            chat_template_kwargs=options.chat_template_kwargs,
            tools=tools.definitions if tools else None,
            call_format=(parser or HermesParser).call_format,
        )
        reasoning = self._reasoning_format(template, options)
        tools = tools if parser else None
        return PreparedChat(text, _format(text, messages, options, tools, parser, reasoning), tools)

    def stage_after(self, prompt: str) -> Reasoning | None:
        """How the reasoning begins after a prompt that is no chat; None if the model has no format for it."""
        try:
            template = self._tokenizer.template_text()
        except InvalidRequestError:
            template = ""
        form = self._reasoning_format(template, ChatOptions())
        return None if form is None else Reasoning(form, form.stage_after(prompt))

    def _tool_parser(self, template: str, options: ChatOptions) -> type[ToolParser] | None:
        name = self._tool_call_parser if options.tool_call_parser is UNSET else options.tool_call_parser
        if name is None or name in TOOL_PARSERS:
            return TOOL_PARSERS[name] if name else None
        if name != "auto":
            message = _unknown_parser("tool_call_parser", name, TOOL_PARSERS)
            raise InvalidRequestError(message, field="tool_call_parser")
        detected = detect_tool_parser(template)
        if detected is not None:
            return TOOL_PARSERS[detected]
        # Where the template says nothing of tools, it is the fallback prompt that says how to call them.
        return JsonParser if self._tokenizer.template_support(template).tools else HermesParser

    def _reasoning_format(self, template: str, options: ChatOptions) -> ReasoningFormat | None:
        name = self._reasoning_parser if options.reasoning_parser is UNSET else options.reasoning_parser
        if name not in (None, "auto", *REASONING_PARSERS):
            message = _unknown_parser("reasoning_parser", name, REASONING_PARSERS)
            raise InvalidRequestError(message, field="reasoning_parser")
        if name == "auto":
            name = detect_reasoning_parser(template)
        return None if name is None else REASONING_PARSERS[name]


def _format(
    prompt: str,
    messages: Sequence[Message],
    options: ChatOptions,
    tools: Tools | None,
    tool_parser: type[ToolParser] | None,
    form: ReasoningFormat | None,
) -> OutputFormat:
    without_tools = HarmonyParser if form is HARMONY else None
    return OutputFormat(
        tool_parser=tool_parser if tools else without_tools,
        tools=tools.schemas if tools else {},
        max_calls=None if tools is None or tools.is_parallel else 1,
        reasoning=None if form is None else Reasoning(form, _stage(form, prompt, messages, options)),
    )


def _stage(form: ReasoningFormat, prompt: str, messages: Sequence[Message], options: ChatOptions) -> Stage:
    content = messages[-1].get("content")
    if options.continue_final_message and isinstance(content, str):
        return form.stage_within(content)
    return form.stage_after(prompt)


def _unknown_parser(field: str, name: object, known: Mapping[str, Any]) -> str:
    return f"{field}={name!r} is out of range: it must be 'auto', None or one of {', '.join(known)}"
