"""Markup of every family, in pieces of any size, well-formed or not: nothing is lost, and nothing is an error."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paged_backend import CompletionOutput, ToolCall
from paged_backend.chat.output_format import OutputFormat
from paged_backend.chat.reasoning import REASONING_PARSERS, Reasoning, Stage
from paged_backend.chat.tool_parsers import TOOL_PARSERS, detect_tool_parser
from paged_backend.handle import _extend

F = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "days": {"type": "integer"},
    },
}
TOOLS: dict[str, dict[str, Any]] = {"f": F, "g": {"type": "object"}}
NAMES = sorted(TOOL_PARSERS)
ARGUMENTS: list[dict[str, Any]] = [
    {},
    {"days": 42},
    {"city": "Zürich 🙂 东京", "days": -1},
    {"city": 'a "quoted" {brace} ] } and \\ back', "days": 0},
    {"note": None, "days": 3},
    {"deep": {"a": [{"b": []}, {}, "}}"], "c": True}, "x": 1.5},
    {"city": "two\nlines\tand </tool_cal", "note": "null-ish"},
]


def make_format(name: str | None, **options: Any) -> OutputFormat:
    return OutputFormat(**{"tool_parser": name and TOOL_PARSERS[name], "tools": TOOLS} | options)


def deltas(form: OutputFormat, pieces: list[str], finish_reason: str = "stop") -> list[CompletionOutput]:
    parser = form.parser()
    result = []
    for index, piece in enumerate(pieces):
        news = CompletionOutput(0, piece, finish_reason=finish_reason if index == len(pieces) - 1 else None)
        parser.parse(news)
        result.append(news)
    return result


def joined(outputs: list[CompletionOutput]) -> CompletionOutput:
    whole = CompletionOutput(0)
    for output in outputs:
        _extend(whole, output)
    return whole


def parse(form: OutputFormat, text: str) -> CompletionOutput:
    return joined(deltas(form, [text]))


def calls(output: CompletionOutput) -> list[tuple[str | None, Any]]:
    return [(call.name, json.loads(call.arguments)) for call in output.tool_calls]


def comparable(output: CompletionOutput) -> Any:
    """All but the ids, which are made anew."""
    invalid = [(call.index, call.name, call.arguments, call.error) for call in output.invalid_tool_calls]
    return (
        *(output.text, output.reasoning, invalid),
        [(call.index, call.name, call.arguments) for call in output.tool_calls],
    )


def cut(text: str, size: int) -> list[str]:
    return [text[start : start + size] for start in range(0, len(text), size)] or [""]


def write(name: str, *written: tuple[str, dict[str, Any]]) -> str:
    return TOOL_PARSERS[name].call_format.write(written)


@pytest.mark.parametrize("arguments", ARGUMENTS, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_what_a_family_writes_is_read_back(name: str, arguments: dict[str, Any]) -> None:
    output = parse(make_format(name), write(name, ("f", arguments)))

    assert calls(output) == [("f", arguments)]
    assert (output.text, output.invalid_tool_calls, output.finish_reason) == ("", [], "stop")


@pytest.mark.parametrize("name", NAMES)
def test_several_calls_come_in_order_each_with_an_id(name: str) -> None:
    output = parse(make_format(name), write(name, ("f", {"days": 1}), ("g", {}), ("f", {"days": 2})))

    assert calls(output) == [("f", {"days": 1}), ("g", {}), ("f", {"days": 2})]
    assert [call.index for call in output.tool_calls] == [0, 1, 2]
    assert len({call.id for call in output.tool_calls}) == 3
    assert output.text == ""


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize("name", NAMES)
def test_a_stream_of_any_grain_joins_to_the_whole(name: str, size: int) -> None:
    text = write(name, *(("f", arguments) for arguments in ARGUMENTS))
    outputs = deltas(make_format(name), cut(text, size))

    assert comparable(joined(outputs)) == comparable(parse(make_format(name), text))
    opened = [call for output in outputs for call in output.tool_calls if call.name is not None]
    assert [call.index for call in opened] == list(range(len(ARGUMENTS)))  # name and id once for each
    assert all(call.id for call in opened)


@pytest.mark.parametrize("name", ["hermes", "mistral", "deepseek_v31", "llama3_json", "openai", "granite"])
def test_arguments_are_streamed_while_they_come_and_exactly_as_written(name: str) -> None:
    text = write(name, ("f", {"city": "A long name of a city", "days": 1}))
    pieces = deltas(make_format(name), cut(text, 4))
    with_arguments = [output for output in pieces if any(call.arguments for call in output.tool_calls)]

    assert len(with_arguments) > 5
    assert joined(pieces).tool_calls[0].arguments == '{"city": "A long name of a city", "days": 1}'


@pytest.mark.parametrize("name", [name for name in NAMES if TOOL_PARSERS[name].call_format.trigger])
def test_text_around_calls_is_content(name: str) -> None:
    text = f"Let me see.\n\n{write(name, ('f', {'days': 1}))}\nDone [1] {{x}}."
    outputs = deltas(make_format(name), cut(text, 3))

    assert joined(outputs).text == "Let me see.\n\n\nDone [1] {x}."
    assert calls(joined(outputs)) == [("f", {"days": 1})]


PLAIN = [
    "",
    "Hi!",
    " \n leading and trailing \n",
    "a < b [1, 2] {x: 1} (f(x))",
    '{"answer": 42}\n',
    "[1, 2]",
    "```\nx\n```",
]


@pytest.mark.parametrize("size", [1, 1000])
@pytest.mark.parametrize("text", PLAIN)
@pytest.mark.parametrize("name", NAMES)
def test_an_answer_without_calls_is_left_as_it_is(name: str, text: str, size: int) -> None:
    output = joined(deltas(make_format(name), cut(text, size)))

    assert (output.text, output.tool_calls, output.invalid_tool_calls) == (text, [], [])


@pytest.mark.parametrize("name", NAMES)
def test_a_call_of_an_unknown_tool_is_invalid_and_stays_in_the_text(name: str) -> None:
    text = write(name, ("h", {"days": 1}))
    output = parse(make_format(name), text)
    [invalid] = output.invalid_tool_calls

    assert output.tool_calls == []
    assert invalid.name == "h" and "no tool 'h'" in invalid.error and invalid.id
    assert json.loads(invalid.arguments) == {"days": 1}
    assert '"h"' in output.text or "h" in output.text.replace("function", "")


@pytest.mark.parametrize("name", NAMES)
def test_a_call_cut_short_is_text_and_whatever_was_streamed_of_it_is_taken_back(name: str) -> None:
    text = write(name, ("f", {"city": "Paris", "days": 1}))
    cut_at = text.index("Paris") + 3
    outputs = deltas(make_format(name), cut(text[:cut_at], 2), finish_reason="length")
    output = joined(outputs)
    opened = {call.index for news in outputs for call in news.tool_calls}

    assert output.tool_calls == []
    assert output.text.endswith("Par")
    assert opened <= {invalid.index for invalid in output.invalid_tool_calls}
    assert comparable(output) == comparable(joined(deltas(make_format(name), [text[:cut_at]], "length")))


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize("value", ["42", "true", "null", "[]", "{}", '{"a": {"b": [1, {}]}}', '"}}"', "-1.5e3"])
def test_closing_braces_are_the_arguments_own(value: str, size: int) -> None:
    text = f'<tool_call>\n{{"name": "f", "arguments": {{"id": {value}}}}}\n</tool_call>'
    output = joined(deltas(make_format("hermes"), cut(text, size)))

    assert output.tool_calls[0].arguments == f'{{"id": {value}}}'
    assert (output.text, output.invalid_tool_calls) == ("", [])


class Case(NamedTuple):
    parser: str
    text: str
    calls: Sequence[tuple[str, Any]] = ()
    content: str = ""
    error: str | None = None


A = ("f", {"days": 1})
CASES = [
    Case("hermes", '<tool_call>{"arguments": {"days": 1}, "name": "f"}</tool_call>', [A]),
    Case("hermes", '<tool_call>{"name": "f", "arguments": "{\\"days\\": 1}"}</tool_call>', [A]),
    Case("hermes", '<tool_call>{"name": "f"}</tool_call>', [("f", {})]),
    Case("hermes", '<tool_call>{"name": "f", "arguments": null}</tool_call>', [("f", {})]),
    Case("hermes", '<tool_call>{"name": "f", "arguments": {"days": 1}}', [A]),
    Case("hermes", '<tool_call>{"name": "f", "arguments": {"days": 1}} bye', [A], "bye"),
    Case("hermes", '<tool_call>{"name": "f", "arguments": {"days": 1}}}\n</tool_call>', [A], "}"),
    Case("hermes", '<tool_call>{"name": "f", "arguments": {"days": 1}}\n{"name": "f"}</tool_call>', [A, ("f", {})]),
    Case(
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"days": 1}} x</tool_call> y</tool_call>',
        [A],
        "x y</tool_call>",
    ),
    Case(
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"days": 1}}\n{"name": 1}\n</tool_call>',
        [A],
        '{"name": 1}\n</tool_call>',
        "no string",
    ),
    Case("hermes", "see <tool_call>nothing</tool_call>", [], "see <tool_call>nothing</tool_call>", "'{' is missing"),
    Case("hermes", "<tool_call>", [], "<tool_call>", "at the end"),
    Case("hermes", "<tool_cal", [], "<tool_cal"),
    Case("hermes", '<tool_call>{"name": 1}', [], '<tool_call>{"name": 1}', "no string"),
    Case(
        "hermes",
        '<tool_call>{"name": "f", "arguments": [1]}',
        [],
        '<tool_call>{"name": "f", "arguments": [1]}',
        "object",
    ),
    Case(
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": NaN}}',
        [],
        '<tool_call>{"name": "f", "arguments": {"a": NaN}}',
        "NaN",
    ),
    Case("llama3_json", '<|python_tag|>{"name": "f", "parameters": {"days": 1}}', [A]),
    Case("llama3_json", '{"type": "function", "function": "f", "parameters": {"days": 1}}', [A]),
    Case("llama3_json", '{"name": "f", "parameters": {"days": 1}}; {"name": "g", "parameters": {}}', [A, ("g", {})]),
    Case("llama3_json", '<|python_tag|>print("x")', [], '<|python_tag|>print("x")'),
    Case("llama3_json", '{"name": "Bob", "age": 3}', [], '{"name": "Bob", "age": 3}'),
    Case("json", 'Sure:\n```json\n{"name": "f", "arguments": {"days": 1}}\n```', [A], "Sure:"),
    Case("json", '[{"name": "f", "arguments": {"days": 1}}, {"name": "g", "parameters": {}}]', [A, ("g", {})]),
    Case("json", '[{"type": "function", "function": {"name": "f", "arguments": "{\\"days\\": 1}"}}]', [A]),
    Case("json", '{"name": "f", "arguments": {"days": }}', [], '{"name": "f", "arguments": {"days": }}', "JSON"),
    Case("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {"days": 1}, "id": "abcdefghi"}]', [A]),
    Case("mistral", '[TOOL_CALLS]f[ARGS]{"days": 1}[TOOL_CALLS]g{}', [A, ("g", {})]),
    Case("mistral", '[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{"days": 1}', [A]),
    Case("mistral", "[TOOL_CALLS]f[ARGS]days", [], "[TOOL_CALLS]f[ARGS]days", "object"),
    Case(
        "deepseek_v3", '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"days": 1}<｜tool▁call▁end｜>', [A]
    ),
    Case("deepseek_v31", "<｜tool▁calls▁begin｜>what", [], "<｜tool▁calls▁begin｜>what", "ends before"),
    Case("pythonic", "[f(days=1), g()]", [A, ("g", {})]),
    Case("pythonic", "<|python_start|>[f(days=1)]<|python_end|>", [A]),
    Case("pythonic", "[f(city='it\\'s \"x\"', days=+1,)]", [("f", {"city": 'it\'s "x"', "days": 1})]),
    Case("pythonic", "[f(x=(1, None), y={'a': True})]", [("f", {"x": [1, None], "y": {"a": True}})]),
    Case("pythonic", "[f(1)]", [], "[f(1)]", "is missing"),
    Case("pythonic", "[f(days=1), oops]", [A], ", oops]"),
    Case("pythonic", "[f(a=__import__('os').system('x'))]", [], "[f(a=__import__('os').system('x'))]", "no value"),
    Case("gemma", "```tool_code\nprint(f(days=1))\ng()\n```", [A, ("g", {})]),
    Case("gemma", "```tool_code\nimport os\n```", [], "```tool_code\nimport os\n```", "no call"),
    Case("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=days>\n1\n</parameter>\n</function>\n</tool_call>", [A]),
    Case("qwen3_coder", "<tool_call><function=f><parameter=city>007</parameter></function>", [("f", {"city": "007"})]),
    Case(
        "qwen3_coder", "<tool_call><function=f><parameter=note>\nnull\n</parameter></function>", [("f", {"note": None})]
    ),
    Case("qwen3_coder", '<tool_call>{"name": "f", "arguments": {"days": 1}}</tool_call>', [A]),
    Case("functiongemma", "<start_function_call>call:f{days:1}<end_function_call>", [A]),
    Case(
        "gemma4",
        '<|tool_call>call:f{city:<|"|>a}, <tool_call|><|"|>,x:[1,{y:true}]}<tool_call|>',
        [("f", {"city": "a}, <tool_call|>", "x": [1, {"y": True}]})],
    ),
    Case("openai", '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"days": 1}<|call|>', [A]),
    Case("openai", '<|start|>assistant to=functions.f<|channel|>commentary json<|message|>{"days": 1}', [A]),
    Case("openai", "<|channel|>final<|message|>Hi!<|return|>", [], "Hi!"),
    Case(
        "openai",
        "<|channel|>commentary to=functions.f<|message|>no<|call|>",
        [],
        "<|channel|>commentary to=functions.f<|message|>no<|call|>",
        "object",
    ),
]


@pytest.mark.parametrize("size", [1, 5, 1000])
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.parser}: {case.text}")
def test_variants_and_mistakes(case: Case, size: int) -> None:
    output = joined(deltas(make_format(case.parser), cut(case.text, size)))

    assert calls(output) == list(case.calls)
    assert output.text == case.content
    if case.error is not None:
        assert case.error in output.invalid_tool_calls[0].error
    elif case.calls and not case.content.startswith(","):
        assert output.invalid_tool_calls == []


@pytest.mark.parametrize("schema", [{"type": None}, {"type": 5}, {"type": [{}]}, {"anyOf": 5}, {"anyOf": [5, {}]}, 5])
def test_a_value_is_read_as_json_where_the_schema_is_nonsense(schema: Any) -> None:
    form = make_format("qwen3_coder", tools={"f": {"type": "object", "properties": {"x": schema}}})
    output = parse(form, "<tool_call><function=f><parameter=x>1</parameter></function></tool_call>")

    assert calls(output) == [("f", {"x": 1})]


def test_an_id_that_the_model_gives_is_kept_and_mistrals_own_are_short() -> None:
    given_id = parse(make_format("mistral"), "[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{}").tool_calls[0].id
    made_id = parse(make_format("mistral"), "[TOOL_CALLS]f[ARGS]{}").tool_calls[0].id

    assert given_id == "abcdefghi"
    assert made_id is not None and len(made_id) == 9 and made_id.isalnum()
    assert str(parse(make_format("hermes"), write("hermes", ("f", {}))).tool_calls[0].id).startswith("call_")


@pytest.mark.parametrize("name", NAMES)
def test_one_call_only_if_parallel_calls_are_off(name: str) -> None:
    output = parse(make_format(name, max_calls=1), write(name, ("f", {"days": 1}), ("g", {})))

    assert calls(output) == [("f", {"days": 1})]
    assert ["parallel_tool_calls" in invalid.error for invalid in output.invalid_tool_calls] == [True]


FRAGMENTS = [
    *{marker for parser in TOOL_PARSERS.values() for marker in parser.markers},
    *('{"name": "f", "arguments": ', '{"days": 1}', "{}", "}", "]", "[", ", ", "; ", "\n", " ", '"', "\\", "f", "g"),
    *("f(", "days=1", ")", "call:", "{days:1}", "<function=f>", "<parameter=days>", "</parameter>", "</function>"),
    *(
        "```json\n",
        "```tool_code\n",
        "```",
        "functools",
        "commentary to=functions.f",
        "analysis",
        "final",
        "🙂",
        "text",
    ),
    *("<think>", "</think>", "to"),
]


@settings(max_examples=300, deadline=None)
@given(
    name=st.sampled_from(NAMES),
    fragments=st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=3), max_size=14),
    cuts=st.lists(st.integers(1, 200), max_size=12),
    stage=st.sampled_from([None, *Stage]),
    max_calls=st.sampled_from([None, 1]),
)
def test_no_cut_changes_the_result_and_no_text_is_an_error(
    name: str, fragments: list[str], cuts: list[int], stage: Stage | None, max_calls: int | None
) -> None:
    text = "".join(fragments)
    positions = sorted({0, len(text), *(position for position in cuts if position < len(text))})
    pieces = [text[start:end] for start, end in itertools.pairwise(positions)] or [""]
    reasoning = None if stage is None else Reasoning(REASONING_PARSERS["qwen3"], stage)
    form = make_format(name, reasoning=reasoning, max_calls=max_calls)
    whole = parse(form, text)

    assert comparable(joined(deltas(form, pieces))) == comparable(whole)
    assert comparable(joined(deltas(form, list(text) or [""]))) == comparable(whole)
    for call in whole.tool_calls:
        assert call.name in TOOLS and isinstance(json.loads(call.arguments), dict)


KEYS = st.from_regex(r"[a-z_]{1,6}", fullmatch=True)


@settings(max_examples=200, deadline=None)
@given(
    name=st.sampled_from(NAMES),
    arguments=st.dictionaries(
        KEYS,
        st.recursive(
            st.none()
            | st.booleans()
            | st.integers(-(10**20), 10**20)
            | st.floats(allow_nan=False, allow_infinity=False)
            | st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=8),
            lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
            max_leaves=6,
        ),
        max_size=4,
    ),
)
def test_any_arguments_are_read_back(name: str, arguments: dict[str, Any]) -> None:
    if TOOL_PARSERS[name].call_format.style == "xml":  # which cannot tell "1" from 1 without a schema
        arguments = {key: value for key, value in arguments.items() if not isinstance(value, str)}

    assert calls(parse(make_format(name), write(name, ("g", arguments)))) == [("g", arguments)]


def test_a_rejected_call_takes_back_what_was_streamed_of_it() -> None:
    whole = CompletionOutput(0)
    _extend(whole, CompletionOutput(0, tool_calls=[ToolCall(0, "a", "f", '{"x"'), ToolCall(1, "b", "g", "{}")]))
    outputs = deltas(make_format("hermes"), ['<tool_call>{"name": "f", "arguments": {"x": 1', '}, "x": ]}'])
    taken_back = joined(outputs)

    assert [call.name for call in outputs[0].tool_calls] == ["f"]
    assert (taken_back.tool_calls, [invalid.index for invalid in taken_back.invalid_tool_calls]) == ([], [0])
    assert taken_back.text == '<tool_call>{"name": "f", "arguments": {"x": 1}, "x": ]}'


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{{ tools }}<tool_call>{{ x }}</tool_call>", "hermes"),
        ("<tool_call><function={{ name }}>", "qwen3_coder"),
        ("<|start_header_id|>{{ tools }} respond with {\"name\": x, \"parameters\": y}", "llama3_json"),
        ("[TOOL_CALLS][{{ calls }}]", "mistral"),
        ("[TOOL_CALLS]{{ name }}[ARGS]{{ args }}", "mistral_args"),
        ("<｜tool▁calls▁begin｜>```json", "deepseek_v3"),
        ("<｜tool▁calls▁begin｜>{{ x }}", "deepseek_v31"),
        ("<|start|>assistant<|channel|>final<|message|>", "openai"),
        ("<start_function_call>", "functiongemma"),
        ("{{ message.content }}", None),
    ],
)  # fmt: skip
def test_the_family_is_known_by_what_its_template_writes(template: str, name: str | None) -> None:
    assert detect_tool_parser(template) == name
