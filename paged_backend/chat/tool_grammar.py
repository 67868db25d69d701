"""Grammars: what a model may write when it must call or its calls must follow their schemas, and before it answers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from paged_backend.chat.call_format import CallFormat
from paged_backend.chat.lark import LarkWriter
from paged_backend.chat.reasoning import Reasoning, Stage
from paged_backend.chat.tools import Tools

MAX_CALLS = 16
"""Most calls of one constrained output, so that a model comes to an end."""


def tool_grammar(tools: Tools, form: CallFormat, special_ids: Mapping[str, int]) -> str | None:
    """What outputs must match, in Lark; None if anything goes.

    If one tool is strict, the calls of all tools must follow their schemas.
    """
    if not tools.is_constrained:
        return None
    lark = LarkWriter(special_ids)
    before, between, after = form.split_call()
    for index, (name, schema) in enumerate(tools.schemas.items()):
        arguments = _ARGUMENTS[form.style](lark, f"arguments_{index}", schema, form)
        lark.rule(f"call_{index}", f"{lark.literal(name + between)} {arguments} {lark.literal(after)}")
    lark.rule("named", " | ".join(f"call_{index}" for index in range(len(tools.schemas))))
    more = f"({lark.literal(form.between + before)} named){{0,{MAX_CALLS - 1}}}" if tools.is_parallel else '""'
    lark.rule("rest", f"{more} {lark.literal(form.end)}")
    lark.rule("calls", f"{lark.literal(form.begin + before)} named rest")
    lark.rule("start", "calls" if tools.is_required else _free(lark, form, is_parallel=tools.is_parallel))
    return lark.grammar()


def _free(lark: LarkWriter, form: CallFormat, *, is_parallel: bool) -> str:
    """Text, in which calls begin with the trigger; where there is none, either calls or an answer."""
    opening = form.begin + form.split_call()[0]
    if form.answer:
        return f"calls | {lark.literal(form.answer)} TEXT"
    if not form.trigger:
        lark.rule("ANSWER", rf"/[^\{opening[0]}](.|\n)*/")
        return 'calls | ANSWER | ""'
    lark.text_through("trigger", form.trigger)
    lark.rule("block", f"trigger {lark.literal(opening.removeprefix(form.trigger))} named rest")
    return f"block{'*' if is_parallel else '?'} TEXT"


def _json(lark: LarkWriter, name: str, schema: Mapping[str, Any], form: CallFormat) -> str:
    return lark.json(name, schema)


def _xml(lark: LarkWriter, name: str, schema: Mapping[str, Any], form: CallFormat) -> str:
    """A tag for each parameter, in the order of the schema."""
    parts = []
    for index, (key, part, is_required) in enumerate(_properties(schema)):
        end = "\n</parameter>\n"
        value = f"{name}_{index}"
        if choices := _text_choices(part):
            written = f"{lark.rule(value, ' | '.join(map(lark.literal, choices)))} {lark.literal(end)}"
        elif _is_text(part):
            written = lark.text_through(value, end)
        else:
            written = f"{lark.json(value, part)} {lark.literal(end)}"
        tag = f"{lark.literal(f'<parameter={key}>' + chr(10))} {written}"
        parts.append(tag if is_required else f"({tag})?")
    return lark.rule(name, " ".join(parts) or '""')


def _keywords(lark: LarkWriter, name: str, schema: Mapping[str, Any], form: CallFormat) -> str:
    items = [
        (f"{lark.literal(key + '=')} {lark.json(f'{name}_{index}', part)}", is_required)
        for index, (key, part, is_required) in enumerate(_properties(schema))
    ]
    return _separated(lark, name, items, ", ")


def _fields(lark: LarkWriter, name: str, schema: Mapping[str, Any], form: CallFormat) -> str:
    items = []
    for index, (key, part, is_required) in enumerate(_properties(schema)):
        value = f"{name}_{index}"
        if choices := _text_choices(part):
            written = lark.rule(value, " | ".join(lark.literal(form.quote + one + form.quote) for one in choices))
        elif _is_text(part):
            written = f"{lark.literal(form.quote)} {lark.text_through(value, form.quote)}"
        else:
            written = lark.json(value, part)
        items.append((f"{lark.literal(key + ':')} {written}", is_required))
    return _separated(lark, name, items, ",")


_ARGUMENTS = {"json": _json, "xml": _xml, "keywords": _keywords, "fields": _fields}


def _properties(schema: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any], bool]]:
    """Name, schema and whether it is required, of each; references in it still lead somewhere."""
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    required = schema.get("required") or ()
    for key, part in (schema.get("properties") or {}).items():
        yield key, {**(part if isinstance(part, Mapping) else {}), **shared}, key in required


def _text_choices(schema: Mapping[str, Any]) -> list[str]:
    """The values of a parameter that takes certain texts and nothing else."""
    choices = schema.get("enum") or ([schema["const"]] if "const" in schema else [])
    return list(choices) if all(isinstance(choice, str) for choice in choices) else []


def _is_text(schema: Mapping[str, Any]) -> bool:
    return schema.get("type") == "string" and not any(key in schema for key in ("const", "pattern", "format"))


def _separated(lark: LarkWriter, name: str, items: list[tuple[str, bool]], separator: str) -> str:
    """The items in order, those that are not required only if the model likes, with the separator between them."""
    following = lark.rule(f"{name}_after_{len(items)}", '""')
    first = following
    for index, (item, is_required) in reversed(list(enumerate(items))):
        first_here = f"{item} {following}"
        next_here = f"{lark.literal(separator)} {item} {following}"
        first = lark.rule(f"{name}_from_{index}", first_here if is_required else f"{first_here} | {first}")
        following = lark.rule(f"{name}_after_{index}", next_here if is_required else f"{next_here} | {following}")
    return lark.rule(name, first)


def reasoning_grammar(reasoning: Reasoning, special_ids: Mapping[str, int], *, is_answer: bool) -> str | None:
    """A rule `reasoning` for what comes before calls, or before an answer; None if nothing does."""
    form = reasoning.form
    if reasoning.stage is Stage.AFTER:
        return None
    lark = LarkWriter(special_ids)
    thought = lark.text_through("thought", form.end)
    rest = f"{thought} {lark.literal(form.after)}" + ("" if form.after else r" /\n{0,2}/")
    opening = lark.literal(form.answer) if is_answer else '""'
    if reasoning.stage is Stage.INSIDE:
        lark.rule("reasoning", f"{rest} {opening}")
    else:
        lark.rule("reasoning", f"({lark.literal(form.start)} {rest})? {opening}")
    return lark.grammar()
