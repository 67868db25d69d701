"""LangChain's tools, choices and formats in the engine's form, and the calls of an answer in LangChain's."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from langchain_core.messages import InvalidToolCall, ToolCall, ToolCallChunk
from langchain_core.messages.tool import invalid_tool_call, tool_call, tool_call_chunk
from langchain_core.tools import BaseTool
from langchain_core.utils.function_calling import convert_to_json_schema, convert_to_openai_tool
from langchain_core.utils.json import parse_partial_json
from langchain_core.utils.pydantic import is_basemodel_subclass

import paged_backend
from paged_backend import CompletionOutput, InvalidRequestError, StructuredOutputsParams

Tool = dict[str, Any] | type | Callable[..., Any] | BaseTool

_REQUIRED = ("any", "required", True)
_FIRST_BLOCK = 1000
# After one of these, no JSON that was broken off can be completed: a bracket that fits nothing, outside of strings.
_MISFITS = ("]", "}", '"]', '"}', '""]', '""}')


def to_tools(tools: Sequence[Tool], strict: bool | None = None) -> list[dict[str, Any]]:
    """OpenAI's form of whatever LangChain takes for a tool; `strict` is for those that say nothing of it."""
    return [_definition(convert_to_openai_tool(tool), strict) for tool in tools]


def _definition(tool: dict[str, Any], strict: bool | None) -> dict[str, Any]:
    """The tool with arguments that are its own only, unless it says otherwise: small models go on with others."""
    function = tool.get("function")
    if not isinstance(function, Mapping):
        return tool  # the engine says what is wrong with it
    function = {**({} if strict is None else {"strict": strict}), **function}
    if isinstance(function.get("parameters"), Mapping):
        function["parameters"] = {"additionalProperties": False, **function["parameters"]}
    return {**tool, "function": function}


def to_tool_choice(choice: object) -> str | dict[str, Any] | None:
    """One of OpenAI's: `"auto"`, `"none"`, `"required"`, one by name, or None. LangChain also says `"any"`, True for
    that, and just the name of a tool."""
    if choice in _REQUIRED:
        return "required"
    if choice is None or choice is False:
        return None
    if isinstance(choice, Mapping):
        return to_choice_of(choice.get("name")) if choice.get("type") == "tool" else dict(choice)
    if not isinstance(choice, str):
        raise InvalidRequestError(f"tool_choice={choice!r} must be 'auto', 'none', 'any', a tool's name or a mapping")
    return choice if choice in ("auto", "none") else to_choice_of(choice)


def name_of(schema: Any) -> str:
    """What a schema calls itself."""
    if isinstance(schema, Mapping):
        return str(schema.get("title") or schema.get("name") or "output")
    return str(getattr(schema, "__name__", "output"))


def to_choice_of(name: object) -> dict[str, Any]:
    """The choice of one tool, whatever its name."""
    return {"type": "function", "function": {"name": name}}


def check_choice(choice: str | dict[str, Any] | None, tools: Sequence[dict[str, Any]]) -> None:
    """Raises InvalidRequestError if a tool is named that is not there."""
    if not isinstance(choice, dict):
        return
    name, names = choice.get("function", {}).get("name"), [tool["function"]["name"] for tool in tools]
    if name not in names:
        raise InvalidRequestError(f"tool_choice names the tool {name!r}, which is not among the tools: {names}")


def to_structured_outputs(response_format: object) -> StructuredOutputsParams | None:
    """What OpenAI's `response_format` asks for; None for plain text. A schema itself is one of its forms here."""
    if response_format is None:
        return None
    if not isinstance(response_format, Mapping) or "type" not in response_format:
        return _of_schema(json_schema_of(response_format))
    kind = response_format["type"]
    if kind == "text":
        return None
    if kind == "json_object":
        return StructuredOutputsParams(json_object=True)
    schema = (response_format.get("json_schema") or {}).get("schema")
    if kind != "json_schema" or schema is None:
        raise InvalidRequestError(
            f"response_format={response_format!r} must be a schema, or have the type 'text', 'json_object' or "
            "'json_schema', that one with {'json_schema': {'schema': ...}}"
        )
    return _of_schema(schema)


def _of_schema(schema: Any) -> StructuredOutputsParams:
    """Nobody would see properties that the schema does not name, and small models go on with them for ever."""
    return StructuredOutputsParams(json=schema, disable_additional_properties=True)


def json_schema_of(schema: Any) -> dict[str, Any]:
    """The JSON schema of a pydantic class of either version, a TypedDict, an OpenAI function, or of itself."""
    if isinstance(schema, type) and is_basemodel_subclass(schema):
        of_class: Any = schema
        own: dict[str, Any] = (
            of_class.model_json_schema() if hasattr(schema, "model_json_schema") else of_class.schema()
        )
        return own
    if isinstance(schema, Mapping) and not {"function", "parameters"} & schema.keys():
        return dict(schema)
    return convert_to_json_schema(schema)


def calls_of(answer: CompletionOutput) -> tuple[list[ToolCall], list[InvalidToolCall]]:
    """The calls of a whole answer, and what looks like calls."""
    return [_call(call) for call in answer.tool_calls], [_invalid(call) for call in answer.invalid_tool_calls]


def _call(call: paged_backend.ToolCall) -> ToolCall:
    return tool_call(name=call.name or "", args=json.loads(call.arguments), id=call.id)


def _invalid(call: paged_backend.InvalidToolCall) -> InvalidToolCall:
    return invalid_tool_call(name=call.name, args=call.arguments, id=call.id, error=call.error)


class CallPieces:
    """The calls of an answer that is streamed, as the pieces that LangChain puts together again.

    LangChain makes a call of any JSON that is broken off. So that one which is none does not become one, a last piece
    is added to it that no JSON can have there.
    """

    def __init__(self, *, as_blocks: bool = False) -> None:
        self._arguments: dict[int, str] = {}
        self._as_blocks = as_blocks

    def of(self, news: CompletionOutput) -> list[ToolCallChunk]:
        pieces = [self._piece(call.index, call.name, call.arguments, call.id) for call in news.tool_calls]
        return pieces + [piece for call in news.invalid_tool_calls for piece in self._taken_back(call)]

    def _piece(self, index: int, name: str | None, arguments: str, id_: str | None) -> ToolCallChunk:
        self._arguments[index] = self._arguments.get(index, "") + arguments
        # Among content blocks, LangChain gives text the indices from 0 on, and would mix it with calls of the same.
        first = _FIRST_BLOCK if self._as_blocks else 0
        return tool_call_chunk(name=name, args=arguments, id=id_, index=first + index)

    def _taken_back(self, call: paged_backend.InvalidToolCall) -> list[ToolCallChunk]:
        if call.index in self._arguments:
            return [self._piece(call.index, None, _misfit(self._arguments[call.index]), None)]
        return [self._piece(call.index, call.name, call.arguments + _misfit(call.arguments), call.id)]


def _misfit(arguments: str) -> str:
    """What makes these arguments unreadable, if they are not yet."""
    return next(end for end in ("", *_MISFITS) if not _is_readable(arguments + end))


def _is_readable(arguments: str) -> bool:
    """Whether LangChain would make a call of it."""
    try:
        return not arguments or isinstance(parse_partial_json(arguments), dict)
    except ValueError:
        return False
