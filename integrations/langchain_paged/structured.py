"""Parsers of answers that must follow a schema: the wished-for type, or an error, but never half of an answer."""

from __future__ import annotations

from operator import itemgetter
from typing import Any

from langchain_core.exceptions import OutputParserException
from langchain_core.language_models import LanguageModelInput
from langchain_core.messages import AIMessage
from langchain_core.output_parsers import BaseOutputParser, JsonOutputParser, PydanticOutputParser
from langchain_core.output_parsers.openai_tools import JsonOutputKeyToolsParser, PydanticToolsParser
from langchain_core.outputs import ChatGeneration, Generation
from langchain_core.runnables import Runnable, RunnableMap, RunnablePassthrough
from langchain_core.utils.function_calling import convert_to_openai_tool
from langchain_core.utils.pydantic import is_basemodel_subclass


def parser_of(schema: Any, *, of_calls: bool) -> BaseOutputParser[Any]:
    """What reads objects of a class, or mappings for any other schema, from an answer's text or from its call."""
    is_class = isinstance(schema, type) and is_basemodel_subclass(schema)
    if of_calls and is_class:
        return _ObjectOfCall(tools=[schema], first_tool_only=True)
    if of_calls:
        return _MappingOfCall(key_name=convert_to_openai_tool(schema)["function"]["name"], first_tool_only=True)
    return _Object(pydantic_object=schema) if is_class else _Mapping()


def with_raw(
    model: Runnable[LanguageModelInput, AIMessage], parser: BaseOutputParser[Any]
) -> Runnable[LanguageModelInput, Any]:
    """The answer under `raw`, what it says under `parsed`, and the error if it cannot be read under `parsing_error`."""
    parsed = RunnablePassthrough.assign(parsed=itemgetter("raw") | parser, parsing_error=lambda _: None)
    failed = RunnablePassthrough.assign(parsed=lambda _: None)
    return RunnableMap(raw=model) | parsed.with_fallbacks([failed], exception_key="parsing_error")


def _check_whole(result: list[Generation]) -> None:
    """LangChain's parsers complete JSON that breaks off, and find nothing where a call breaks off.

    A stop string or stop token of the caller's cuts as `max_tokens` does; what ends by itself has no `stop_reason`.
    """
    generation = result[0]
    message = generation.message if isinstance(generation, ChatGeneration) else None
    ending = {} if message is None else message.response_metadata
    if message is not None and (ending.get("finish_reason") == "length" or "stop_reason" in ending):
        raise OutputParserException(
            "the answer was cut off before its end, so it is not what was asked for; raise max_tokens or drop stop",
            llm_output=message.text,
        )


class _Mapping(JsonOutputParser):
    def parse_result(self, result: list[Generation], *, partial: bool = False) -> Any:
        _check_whole(result)
        return super().parse_result(result, partial=partial)


class _Object(PydanticOutputParser[Any]):
    def parse_result(self, result: list[Generation], *, partial: bool = False) -> Any:
        _check_whole(result)
        return super().parse_result(result, partial=partial)


class _MappingOfCall(JsonOutputKeyToolsParser):
    def parse_result(self, result: list[Generation], *, partial: bool = False) -> Any:
        _check_whole(result)
        return super().parse_result(result, partial=partial)


class _ObjectOfCall(PydanticToolsParser):
    def parse_result(self, result: list[Generation], *, partial: bool = False) -> Any:
        _check_whole(result)
        return super().parse_result(result, partial=partial)
