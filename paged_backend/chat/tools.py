"""Tools, as callers pass them: checked once, and what a call of them may be."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from paged_backend.errors import InvalidRequestError

Choice = Literal["auto", "required"]

_CHOICES = ("auto", "none", "required")
_NAME = re.compile(r"[a-zA-Z0-9_.\-]{1,64}")
_NO_PARAMETERS = {"type": "object", "properties": {}}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tools:
    """The tools of one call and what the model is to do with them."""

    definitions: tuple[dict[str, Any], ...]
    """In OpenAI's form, as chat templates take them."""
    schemas: dict[str, dict[str, Any]]
    """Name to the schema of the arguments, of the tools that may be called."""
    is_required: bool
    """Whether there must be a call."""
    is_parallel: bool
    """Whether there may be several calls."""
    strict_names: frozenset[str]
    """Those whose arguments must follow their schemas, also when the model is free to call or not."""

    @property
    def is_constrained(self) -> bool:
        """Whether what the model writes must follow the schemas."""
        return self.is_required or bool(self.strict_names)


def check_tools(tools: object, tool_choice: object = None, parallel_tool_calls: object = None) -> Tools | None:
    """What the three arguments mean, or None if there is nothing to call. Raises InvalidRequestError."""
    if parallel_tool_calls is not None and not isinstance(parallel_tool_calls, bool):
        message = f"parallel_tool_calls={parallel_tool_calls!r} must be True or False"
        raise InvalidRequestError(message, field="parallel_tool_calls")
    if not tools:
        if tool_choice not in (None, "none"):
            message = f"tool_choice={tool_choice!r} was given without tools; give tools=[...]"
            raise InvalidRequestError(message, field="tool_choice")
        return None
    if isinstance(tools, (str, Mapping)) or not isinstance(tools, Sequence):
        message = f"tools of type {type(tools).__name__} must be a list of function definitions"
        raise InvalidRequestError(message, field="tools")
    definitions = tuple(_definition(tool, index) for index, tool in enumerate(tools))
    functions = {definition["function"]["name"]: definition["function"] for definition in definitions}
    _check_unique([definition["function"]["name"] for definition in definitions])
    chosen = _chosen_name(tool_choice, list(functions))
    if tool_choice == "none":
        return None
    return Tools(
        definitions=tuple(_without_strict(definition) for definition in definitions),
        schemas={
            name: function["parameters"] for name, function in functions.items() if chosen is None or name == chosen
        },
        is_required=tool_choice == "required" or chosen is not None,
        is_parallel=parallel_tool_calls is not False,
        strict_names=frozenset(name for name, function in functions.items() if function.get("strict")),
    )


def _definition(tool: object, index: int) -> dict[str, Any]:
    if not isinstance(tool, Mapping):
        raise _bad(index, f"is of type {type(tool).__name__}; give {{'type': 'function', 'function': {{...}}}}")
    if tool.get("type", "function") != "function":
        raise _bad(index, f"has the type {tool.get('type')!r}; this engine knows 'function'")
    function = tool.get("function")
    if not isinstance(function, Mapping):
        raise _bad(index, "has no mapping under 'function'")
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise _bad(index, f"has function.name={name!r}; it must be 1 to 64 letters, digits, '_', '-' and '.'")
    description = function.get("description")
    if description is not None and not isinstance(description, str):
        raise _bad(index, f"({name}) has function.description={description!r}; it must be a string")
    if function.get("strict") not in (None, True, False):
        raise _bad(index, f"({name}) has function.strict={function['strict']!r}; it must be True or False")
    known = {key: value for key, value in function.items() if value is not None}
    definition = {**tool, "type": "function", "function": {**known, "parameters": _parameters(function, name, index)}}
    try:
        json.dumps(definition, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise _bad(index, f"({name}) cannot be written as JSON: {error}") from None
    return definition


def _parameters(function: Mapping[str, Any], name: str, index: int) -> dict[str, Any]:
    parameters = function.get("parameters")
    if parameters is None:
        return dict(_NO_PARAMETERS)
    if not isinstance(parameters, Mapping):
        raise _bad(index, f"({name}) has function.parameters={parameters!r}; it must be a JSON schema of an object")
    if parameters.get("type", "object") != "object":
        raise _bad(index, f"({name}) has function.parameters of type {parameters['type']!r}; it must be 'object'")
    if not isinstance(parameters.get("properties", {}), Mapping):
        raise _bad(index, f"({name}) has function.parameters.properties={parameters['properties']!r}; give a mapping")
    _check_fields(parameters, f"({name}) has function.parameters", index)
    return {"type": "object", "properties": {}, **parameters}


def _check_fields(parameters: Mapping[str, Any], where: str, index: int) -> None:
    """What is read here and not by a compiler of schemas, which has errors of its own."""
    required = parameters.get("required")
    if required is not None and not (_is_list(required) and all(isinstance(key, str) for key in required)):
        raise _bad(index, f"{where}.required={required!r}; give a list of names")
    for key, part in parameters.get("properties", {}).items():
        if not isinstance(part, (Mapping, bool)):
            raise _bad(index, f"{where}.properties[{key!r}]={part!r}; it must be a JSON schema")
        choices = part.get("enum") if isinstance(part, Mapping) else None
        if choices is not None and not _is_list(choices):
            raise _bad(index, f"{where}.properties[{key!r}].enum={choices!r}; give a list of values")


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes))


def _check_unique(names: list[str]) -> None:
    for index, name in enumerate(names):
        if name in names[:index]:
            raise _bad(index, f"has the name {name!r}, as tools[{names.index(name)}] has; names must differ")


def _chosen_name(tool_choice: object, names: list[str]) -> str | None:
    """The tool that must be called, if one is named."""
    if tool_choice is None or tool_choice in _CHOICES:
        return None
    function = tool_choice.get("function") if isinstance(tool_choice, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise InvalidRequestError(
            f"tool_choice={tool_choice!r} must be {', '.join(map(repr, _CHOICES))} or "
            "{'type': 'function', 'function': {'name': ...}}",
            field="tool_choice",
        )
    name = str(function["name"])
    if name not in names:
        raise InvalidRequestError(
            f"tool_choice names the tool {name!r}, which is not among the tools: {', '.join(map(repr, names))}",
            field="tool_choice",
        )
    return name


def _without_strict(definition: dict[str, Any]) -> dict[str, Any]:
    """`strict` is for the engine, and would only distract the model."""
    return {**definition, "function": {k: v for k, v in definition["function"].items() if k != "strict"}}


def _bad(index: int, what: str) -> InvalidRequestError:
    return InvalidRequestError(f"tools[{index}] {what}", field="tools")
