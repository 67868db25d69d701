"""Tools in chats: checked, shown to the model, called, and told apart from the text."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Iterable
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from helpers import WAIT_SECONDS, FakeRunner, in_threads, is_idle, make_llm, wait_until
from helpers_models import EOS, VOCAB_SIZE, make_model, make_tokenizer
from paged_backend import (
    LLM,
    CompletionOutput,
    ConfigError,
    EngineConfig,
    EngineError,
    GrammarError,
    InvalidRequestError,
    RequestOutputKind,
    SamplingParams,
    StructuredOutputsParams,
)
from paged_backend.chat.tokenizer import Tokenizer
from paged_backend.chat.tool_grammar import tool_grammar
from paged_backend.chat.tool_parsers import TOOL_PARSERS
from paged_backend.chat.tool_parsers.hermes import HermesParser
from paged_backend.chat.tools import check_tools
from paged_backend.handle import _extend
from paged_backend.model.demo import demo_folder
from paged_backend.sampling.grammar import GrammarCompiler

WITH_TOOLS = """\
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}Write <tool_call>...</tool_call>.<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content or '' }}
{%- for call in message.tool_calls %}<tool_call>{{ call.function.name }}
{%- for name, value in call.function.arguments.items() %} {{ name }}={{ value }}{% endfor %}</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

# Takes arguments as text, and refuses ids that are not short ones.
WITH_TEXT = """\
{%- for message in messages %}
{%- if message.tool_calls %}[TOOL_CALLS]{% for call in message.tool_calls %}
{%- if call.id | length != 9 %}{{ raise_exception('ids have nine characters') }}{% endif %}
{{- call.function.name + '[ARGS]' + call.function.arguments + '#' + call.id }}{% endfor %}
{%- elif message.role == 'tool' %}[RESULT]{{ message.tool_call_id }}:{{ message.content }}
{%- else %}[{{ message.role }}]{{ message.content }}{% endif %}{% endfor %}
{%- if tools %}[TOOLS]{{ tools | tojson }}{% endif %}"""

PLAIN = "{% for message in messages %}[{{ message.role }}]{{ message.content }}\n{% endfor %}"

NO_SYSTEM = """\
{%- for message in messages %}
{%- if message.role not in ('user', 'assistant') %}{{ raise_exception('only users and assistants') }}{% endif %}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
{{- '[' + message.role + ']' + message.content }}
{% endfor %}"""

ASK = [{"role": "user", "content": "How is the weather in Zürich?"}]


def tool(name: str = "weather", parameters: Any = None, **function: Any) -> dict[str, Any]:
    parameters = parameters or {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        "required": ["city"],
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": name, "parameters": parameters} | function}


def history(arguments: object = '{"city": "Zürich"}', content: Any = None, call_id: str = "call_1") -> list[Any]:
    call = {"id": call_id, "type": "function", "function": {"name": "weather", "arguments": arguments}}
    return [
        *ASK,
        {"role": "assistant", "content": content, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call_id, "content": [{"type": "text", "text": "rain"}]},
    ]


def chat_tokenizer(template: str = WITH_TOOLS) -> Tokenizer:
    return Tokenizer(make_tokenizer(chat_template=template))


def forced(text: str, tokenizer: PreTrainedTokenizerFast | None = None, **params: Any) -> SamplingParams:
    ids = [*(tokenizer or make_tokenizer()).encode(text), EOS]
    return SamplingParams(**{"max_tokens": None, "extra_args": {"forced": ids}} | params)


def chat_llm(template: str = WITH_TOOLS, **options: Any) -> Any:
    tokenizer = chat_tokenizer(template)
    return make_llm(tokenizer=tokenizer, eos_token_ids=[EOS], max_model_len=2000, num_blocks=2000, **options)


def joined(outputs: Iterable[Any]) -> CompletionOutput:
    whole = CompletionOutput(0)
    for output in outputs:
        _extend(whole, output.outputs[0])
    return whole


CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich"}}\n</tool_call>'


@pytest.mark.parametrize(
    ("tools", "message"),
    [
        ("weather", "tools of type str"),
        ([1], r"tools\[0\] is of type int"),
        ([{"type": "retrieval"}], r"tools\[0\] has the type 'retrieval'"),
        ([{"type": "function"}], r"tools\[0\] has no mapping under 'function'"),
        ([tool(), tool("two words")], r"tools\[1\] has function.name='two words'"),
        ([tool(), tool("b"), tool()], r"tools\[2\] has the name 'weather', as tools\[0\] has"),
        ([tool(parameters=[1])], r"tools\[0\] \(weather\) has function.parameters="),
        ([tool(parameters={"type": "string"})], r"function.parameters of type 'string'"),
        ([tool(parameters={"properties": [1]})], r"function.parameters.properties"),
        ([tool(), tool("b", {"required": 5})], r"tools\[1\] \(b\) has function.parameters.required=5; give a list"),
        ([tool(parameters={"required": "city"})], r"function.parameters.required='city'"),
        ([tool(parameters={"required": [1]})], r"function.parameters.required=\[1\]"),
        ([tool(parameters={"properties": {"x": 5}})], r"function.parameters.properties\['x'\]=5"),
        ([tool(parameters={"properties": {"x": {"enum": 5}}})], r"function.parameters.properties\['x'\].enum=5"),
        ([tool(description=3)], r"function.description=3"),
        ([tool(strict="yes")], r"function.strict='yes'"),
        ([tool(parameters={"type": "object", "properties": {"x": {"default": object()}}})], r"tools\[0\].*JSON"),
    ],
)
def test_bad_tools_are_refused_by_index_and_field(tools: Any, message: str) -> None:
    with chat_llm() as llm, pytest.raises(InvalidRequestError, match=message):
        llm.chat(ASK, tools=tools)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tool_choice": "auto"}, "without tools"),
        ({"tools": [], "tool_choice": "required"}, "without tools"),
        ({"tools": [tool()], "tool_choice": "any"}, "tool_choice='any' must be"),
        ({"tools": [tool()], "tool_choice": {"type": "function"}}, "must be 'auto'"),
        ({"tools": [tool()], "tool_choice": {"type": "function", "function": {"name": "x"}}}, "not among the tools"),
        ({"tools": [tool()], "parallel_tool_calls": "no"}, "parallel_tool_calls='no'"),
        ({"tools": [tool()], "tool_call_parser": "hermess"}, "tool_call_parser='hermess'.*hermes"),
        ({"reasoning_parser": "x"}, "reasoning_parser='x'"),
        ({"tools": [tool()], "tool_choice": "required", "tool_call_parser": None}, "tool_call_parser is None"),
        ({"tool_choise": "auto"}, "tool_choice"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], message: str) -> None:
    with chat_llm() as llm, pytest.raises(InvalidRequestError, match=message):
        llm.chat(ASK, **options)


def test_an_unknown_parser_is_no_setting() -> None:
    with pytest.raises(ConfigError, match="tool_call_parser='x'"):
        chat_llm(tool_call_parser="x")


def test_absent_options_and_none_mean_the_same() -> None:
    assert check_tools(None, None, None) is None
    assert check_tools([], "none", None) is None
    assert check_tools([tool()], "none") is None
    checked = check_tools([tool("a", description=None), {"function": {"name": "b", "parameters": None}}])
    assert checked is not None
    assert list(checked.schemas) == ["a", "b"] and not checked.is_required and checked.is_parallel
    assert checked.definitions[1]["function"]["parameters"] == {"type": "object", "properties": {}}


def test_the_template_gets_the_tools_as_hugging_face_gives_them() -> None:
    tokenizer = chat_tokenizer()
    tools = [tool(description="What it is like outside.")]
    rendered = tokenizer.render_chat(ASK, tools=tools)

    assert rendered == tokenizer.hf_tokenizer.apply_chat_template(
        ASK, tools=tools, add_generation_prompt=True, tokenize=False
    )
    assert '"city"' in rendered


@pytest.mark.parametrize("tool_choice", [None, "auto", "required"])
def test_tools_reach_the_prompt_unless_there_is_no_choice(tool_choice: Any) -> None:
    with chat_llm() as llm:
        params = forced(CALL, max_tokens=1)
        handle = llm.stream_chat(ASK, params, tools=[tool(strict=False)])
        assert '"weather"' in handle.result(20).prompt
        assert "strict" not in handle.result(20).prompt
        [output] = llm.chat(ASK, params, tools=[tool()], tool_choice="none")
        assert "weather" not in output.prompt.replace("the weather in", "")


def test_a_template_without_a_place_for_tools_gets_them_in_the_system_message() -> None:
    render = chat_tokenizer(PLAIN).render_chat
    rendered = render([{"role": "system", "content": "Be brief."}, *ASK], tools=[tool()])

    assert rendered.startswith("[system]Be brief.\n\n")
    assert rendered.count("[system]") == 1 and '"city": {"type": "string"}' in rendered
    assert '<tool_call>\n{"name": "function_name", "arguments": {"argument_name": "value"}}' in rendered
    assert render(ASK, tools=[tool()]).startswith("[system]")
    in_another_way = render(ASK, tools=[tool()], call_format=TOOL_PARSERS["pythonic"].call_format)
    assert "[function_name(argument_name='value')]" in in_another_way


def test_a_template_that_refuses_the_system_role_gets_them_in_the_first_message() -> None:
    rendered = chat_tokenizer(NO_SYSTEM).render_chat(ASK, tools=[tool()])

    assert rendered.startswith("[user]You can call") and rendered.endswith("How is the weather in Zürich?\n")


@pytest.mark.parametrize("content", [None, "", []])
@pytest.mark.parametrize("arguments", ['{"city": "Zürich"}', {"city": "Zürich"}])
def test_past_calls_are_rendered_as_the_template_loops_over_them(arguments: object, content: Any) -> None:
    rendered = chat_tokenizer().render_chat(history(arguments, content), tools=[tool()])

    assert "<|im_start|>assistant\n<tool_call>weather city=Zürich</tool_call><|im_end|>" in rendered
    assert "<|im_start|>tool\nrain<|im_end|>" in rendered


@pytest.mark.parametrize("arguments", ["", "null", "{}", None])
def test_past_calls_without_arguments_are_rendered(arguments: object) -> None:
    assert "<tool_call>weather</tool_call>" in chat_tokenizer().render_chat(history(arguments))


def test_a_template_that_wants_arguments_as_text_gets_text_and_short_ids() -> None:
    mistral = TOOL_PARSERS["mistral"].call_format
    render = chat_tokenizer(WITH_TEXT).render_chat
    rendered = render(history(call_id="call_1234567890"), tools=[tool()], call_format=mistral)
    short_id = rendered.partition("#")[2][:9]

    assert 'weather[ARGS]{"city": "Zürich"}#' in rendered
    assert f"[RESULT]{short_id}:rain" in rendered and short_id.isalnum()
    assert "#abcdefghi[RESULT]abcdefghi" in render(history(call_id="abcdefghi"), call_format=mistral)


@pytest.mark.parametrize("template", [PLAIN, NO_SYSTEM])
def test_past_calls_become_text_where_the_template_has_no_place_for_them(template: str) -> None:
    messages = [*history(content="Let me see."), {"role": "user", "content": "And tomorrow?"}]
    rendered = chat_tokenizer(template).render_chat(messages)

    assert f"[assistant]Let me see.\n{CALL}\n" in rendered
    assert "[user]<tool_response>\nrain\n</tool_response>\nAnd tomorrow?\n" in rendered
    assert "[tool]" not in rendered


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_a_call_comes_back_whole_and_in_deltas(size: int) -> None:
    with chat_llm() as llm:
        text = f"Let me see.\n{CALL}"
        [whole] = llm.chat(ASK, forced(text), tools=[tool()])
        outputs = list(llm.stream_chat(ASK, forced(text, stream_interval=size), tools=[tool()]))
    [call] = whole.outputs[0].tool_calls
    [streamed] = joined(outputs).tool_calls

    assert (call.index, call.name, call.arguments) == (0, "weather", '{"city": "Zürich"}')
    assert (streamed.index, streamed.name, streamed.arguments) == (0, "weather", '{"city": "Zürich"}')
    assert whole.outputs[0].text == joined(outputs).text == "Let me see."
    assert whole.outputs[0].finish_reason == joined(outputs).finish_reason == "stop"
    assert [piece.id for output in outputs for piece in output.outputs[0].tool_calls if piece.id] == [streamed.id]
    assert joined(outputs).token_ids == whole.outputs[0].token_ids


@pytest.mark.parametrize("kind", [RequestOutputKind.CUMULATIVE, RequestOutputKind.FINAL_ONLY])
def test_the_last_output_of_a_stream_holds_the_calls(kind: RequestOutputKind) -> None:
    with chat_llm() as llm:
        outputs = list(llm.stream_chat(ASK, forced(CALL, output_kind=kind), tools=[tool()]))
    arguments = [output.outputs[0].tool_calls[0].arguments for output in outputs if output.outputs[0].tool_calls]

    assert arguments[-1] == '{"city": "Zürich"}'
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(arguments))
    assert len({id(output.outputs[0].tool_calls) for output in outputs}) == len(outputs)


async def test_async_chats_take_tools_too() -> None:
    with chat_llm() as llm:
        [whole] = await llm.achat(ASK, forced(CALL), tools=[tool()])
        outputs = [output async for output in llm.astream_chat(ASK, forced(CALL), tools=[tool()])]

    assert whole.outputs[0].tool_calls[0].name == "weather"
    assert joined(outputs).tool_calls[0].arguments == '{"city": "Zürich"}'


def test_each_sample_has_calls_of_its_own() -> None:
    with chat_llm() as llm:
        [output] = llm.chat(ASK, forced(CALL, n=3), tools=[tool()])

    assert [[call.name for call in sample.tool_calls] for sample in output.outputs] == [["weather"]] * 3
    assert len({sample.tool_calls[0].id for sample in output.outputs}) == 3


def test_without_tools_or_a_parser_the_text_is_left_alone() -> None:
    with chat_llm() as llm:
        for options in ({}, {"tools": [tool()], "tool_choice": "none"}, {"tools": [tool()], "tool_call_parser": None}):
            [output] = llm.chat(ASK, forced(CALL), **options)
            assert (output.outputs[0].text, output.outputs[0].tool_calls) == (CALL, [])


def test_a_truncated_call_is_text_and_an_invalid_call() -> None:
    with chat_llm() as llm:
        [output] = llm.chat(ASK, forced(CALL, max_tokens=len(CALL.encode()) - 20), tools=[tool()])
    [sample] = output.outputs

    assert (sample.tool_calls, sample.finish_reason) == ([], "length")
    assert sample.text.startswith('<tool_call>\n{"name": "weather"')
    assert sample.invalid_tool_calls[0].name == "weather" and sample.invalid_tool_calls[0].error


class BrokenParser(HermesParser):
    """Has a mistake that shows at the first call."""

    def run(self) -> Any:
        yield from self.text_until("<tool_call>")
        raise KeyError("a mistake")


def test_a_mistake_in_a_parser_ends_the_request_and_every_read_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TOOL_PARSERS, "broken", BrokenParser)
    goes_on = forced(CALL + " " * 1000, n=2)

    def ask() -> Any:
        return llm.stream_chat(ASK, goes_on, tools=[tool()], tool_call_parser="broken")

    async def ask_async() -> None:
        await ask().aresult()

    with chat_llm() as llm:
        handle = ask()
        for _ in range(2):
            with pytest.raises(EngineError, match=r"could not be read: KeyError\('a mistake'\)"):
                handle.result(WAIT_SECONDS)
        with pytest.raises(EngineError, match="could not be read"):
            list(ask())
        with pytest.raises(EngineError, match="could not be read"):
            asyncio.run(asyncio.wait_for(ask_async(), WAIT_SECONDS))
        wait_until(lambda: is_idle(llm.stats()))


SPECIAL = ["[TOOL_CALLS]", "[ARGS]", "<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|call|>"]


def special_tokenizer(template: str) -> PreTrainedTokenizerFast:
    """With the marks of Mistral and GPT-OSS as special tokens."""
    tokenizer = make_tokenizer(chat_template=template)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>", *SPECIAL]})
    return tokenizer


@pytest.mark.parametrize("skip_special_tokens", [True, False])
@pytest.mark.parametrize("final_only", [True, False])
def test_marks_that_are_special_tokens_are_read_and_others_dropped(final_only: bool, skip_special_tokens: bool) -> None:
    hf = special_tokenizer(WITH_TEXT)
    params = forced('Hi<|im_end|>[TOOL_CALLS]weather[ARGS]{"city": "x"}', hf, skip_special_tokens=skip_special_tokens)
    with make_llm(tokenizer=Tokenizer(hf), eos_token_ids=[EOS], max_model_len=2000, num_blocks=2000) as llm:
        if final_only:
            [output] = llm.chat(ASK, params, tools=[tool()])
            sample = output.outputs[0]
        else:
            sample = joined(llm.stream_chat(ASK, params, tools=[tool()]))
        [untouched] = llm.chat(ASK, params.replace(skip_special_tokens=True))

    assert sample.tool_calls[0].arguments == '{"city": "x"}'
    assert sample.text == ("Hi" if skip_special_tokens else "Hi<|im_end|>")
    assert untouched.outputs[0].text == 'Hiweather{"city": "x"}'


def test_channels_are_reasoning_calls_and_answer() -> None:
    hf = special_tokenizer("<|channel|><|message|>" + PLAIN)
    call = '<|start|>assistant<|channel|>commentary to=functions.weather json<|message|>{"city": "x"}<|call|>'
    text = f"<|channel|>analysis<|message|>Rain?<|end|>{call}<|start|>assistant<|channel|>final<|message|>Done"
    with make_llm(tokenizer=Tokenizer(hf), eos_token_ids=[EOS], max_model_len=4000, num_blocks=2000) as llm:
        sample = joined(llm.stream_chat(ASK, forced(text, hf), tools=[tool()]))
        [without_tools] = llm.chat(ASK, forced(text.replace(call, ""), hf))

    assert (sample.reasoning, sample.text) == ("Rain?", "Done")
    assert [(call.name, call.arguments) for call in sample.tool_calls] == [("weather", '{"city": "x"}')]
    assert (without_tools.outputs[0].reasoning, without_tools.outputs[0].text) == ("Rain?", "Done")


@pytest.fixture(scope="module")
def smollm2() -> PreTrainedTokenizerFast:
    """The demo model's tokenizer, where `}}` is one token and `<tool_call>` five."""
    return AutoTokenizer.from_pretrained(demo_folder(EngineConfig().cache_folder), local_files_only=True)


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize("value", ["42", "true", "null", "[]", "{}", '{"a": {"b": "}}"}}', '"</tool_call> 🙂"'])
def test_closing_braces_in_one_token_end_up_where_they_belong(
    smollm2: PreTrainedTokenizerFast, value: str, size: int
) -> None:
    arguments = f'{{"id": {value}}}'
    text = "\n".join([f'<tool_call>\n{{"name": "weather", "arguments": {arguments}}}\n</tool_call>'] * 2)
    params = SamplingParams(max_tokens=None, extra_args={"forced": [*smollm2.encode(text), 2]}, stream_interval=size)
    runner = FakeRunner(num_blocks=2000, vocab_size=49152)
    with make_llm(tokenizer=Tokenizer(smollm2), runner=runner, eos_token_ids=[2], max_model_len=4000) as llm:
        streamed = joined(llm.stream_chat(ASK, params, tools=[tool()]))
        [whole] = llm.chat(ASK, params, tools=[tool()])

    for sample in (streamed, whole.outputs[0]):
        assert [(call.index, call.arguments) for call in sample.tool_calls] == [(0, arguments), (1, arguments)]
        assert (sample.text, sample.invalid_tool_calls) == ("", [])


def test_tools_need_text() -> None:
    with chat_llm() as llm, pytest.raises(InvalidRequestError, match="detokenize"):
        llm.chat(ASK, forced(CALL, detokenize=False), tools=[tool()])


def test_many_threads_share_one_template() -> None:
    with chat_llm(PLAIN) as llm:
        results = in_threads(*[lambda: llm.chat(ASK, forced(CALL), tools=[tool()])] * 8)
    assert {output.outputs[0].tool_calls[0].name for [output] in results} == {"weather"}


NESTED = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["a", "b c"]},
        "items": {"type": "array", "items": {"$ref": "#/$defs/item"}, "maxItems": 1},
        "flag": {"type": "boolean"},
        "level": {"type": "integer", "minimum": 0, "maximum": 9},
    },
    "required": ["kind", "level"],
    "additionalProperties": False,
    "$defs": {
        "item": {
            "type": "object",
            "properties": {"x": {"type": "boolean"}},
            "required": ["x"],
            "additionalProperties": False,
        }
    },
}
CONSTRAINED = [
    tool("nested", NESTED),
    tool("nothing", {"type": "object", "properties": {}, "additionalProperties": False}),
    tool("one_of", {"type": "object", "properties": {"x": {"type": "string", "enum": ["p", "q"]}}, "required": ["x"]}
         | {"additionalProperties": False}),
]  # fmt: skip


SIMPLE = [{"type": "boolean"}, {"enum": [1, "two", None]}, {"type": "array", "items": {"type": "null"}, "maxItems": 3}]
DOZEN = [
    *CONSTRAINED,
    *(
        tool(f"tool-{number}.{kind}", {"type": "object", "properties": {"x": part, "y": part},
                                       "required": ["y"], "additionalProperties": False})
        for number in range(3)
        for kind, part in enumerate(SIMPLE)
    ),
]  # fmt: skip


@pytest.fixture(scope="module")
def random_llm() -> Any:
    """Writes nonsense, unless it is made to write something else. A token is a byte, so it has room for many."""
    with LLM(make_model(max_position_embeddings=8192), special_tokenizer(WITH_TOOLS), seed=3) as llm:
        yield llm


def check_calls(output: CompletionOutput, tools: list[dict[str, Any]]) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    assert output.invalid_tool_calls == [] and output.text == ""
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in tools}
    for call in output.tool_calls:
        jsonschema.validate(json.loads(call.arguments), schemas[call.name])


FAMILIES = sorted(set(TOOL_PARSERS) - {"qwen3_xml", "llama4_json", "llama4_pythonic"})


@pytest.mark.parametrize("name", FAMILIES)
def test_a_required_call_is_valid_whatever_the_model_likes_to_write(random_llm: Any, name: str) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=600, n=2, seed=5)
    options = {"tool_choice": "required", "tool_call_parser": name, "parallel_tool_calls": False}
    [output] = random_llm.chat(ASK, params, tools=CONSTRAINED, **options)

    for sample in output.outputs:
        assert (len(sample.tool_calls), sample.finish_reason) == (1, "stop"), sample
        check_calls(sample, CONSTRAINED)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_required_calls_in_parallel_are_all_valid(random_llm: Any, name: str) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=4000, n=3, seed=9)
    options = {"tool_choice": "required", "tool_call_parser": name}
    [output] = random_llm.chat(ASK, params, tools=DOZEN, **options)

    for sample in output.outputs:
        assert 1 <= len(sample.tool_calls) <= 16 and sample.finish_reason == "stop"
        check_calls(sample, DOZEN)


@pytest.mark.parametrize("called", ["nested", "nothing"])
def test_a_named_tool_is_the_one_that_is_called(random_llm: Any, called: str) -> None:
    choice = {"type": "function", "function": {"name": called}}
    params = SamplingParams(temperature=1.0, max_tokens=1500, n=4, seed=1)
    [output] = random_llm.chat(ASK, params, tools=CONSTRAINED, tool_choice=choice, parallel_tool_calls=False)

    assert [[call.name for call in sample.tool_calls] for sample in output.outputs] == [[called]] * 4
    for sample in output.outputs:
        check_calls(sample, CONSTRAINED)


@pytest.mark.parametrize("name", FAMILIES)
def test_strict_tools_leave_the_model_free_but_hold_their_calls_to_the_schema(name: str) -> None:
    tokenizer = Tokenizer(special_tokenizer(WITH_TOOLS))
    parser = TOOL_PARSERS[name]
    form = parser.call_format
    tools = check_tools([tool("nested", NESTED, strict=True)])
    assert tools is not None
    source = tool_grammar(tools, form, tokenizer.special_ids(parser.markers))
    grammar = GrammarCompiler(tokenizer.backend, VOCAB_SIZE, [EOS]).compile(StructuredOutputsParams(grammar=source))

    def is_allowed(text: str) -> bool:
        matcher = grammar.matcher()
        try:
            matcher.catch_up(tokenizer.encode(text, add_special_tokens=False))
        except GrammarError:
            return False
        return matcher.may_end

    before = "" if form.answer or not form.trigger else "Let me see. "
    call = form.write([("nested", {"kind": "b c", "level": 3})]).replace("'", '"')
    assert is_allowed(f"{form.answer}An answer without calls.")
    assert is_allowed(before + call)
    assert not is_allowed(before + call.replace("b c", "z"))
    assert not is_allowed(before + call.replace("3", "30"))
    assert not is_allowed(before + call.replace("nested", "unknown"))
    assert is_allowed(before + call + before + call) is bool(before)


@pytest.mark.parametrize(
    ("choice", "strict", "following"),
    [
        ("required", False, "<|channel|>commentary to=functions.nothing"),
        ("auto", True, "<|channel|>commentary to=functions.nothing"),
        ("auto", False, "ccc"),
    ],
)
def test_calls_stay_possible_where_the_thinking_budget_ends_the_reasoning(
    random_llm: Any, choice: str, strict: bool, following: str
) -> None:
    tools = [tool("nothing", {"type": "object", "properties": {}, "additionalProperties": False}, strict=strict)]
    likes_c = SamplingParams(temperature=0.0, max_tokens=80, thinking_token_budget=5, logit_bias={ord("c"): 90})
    options = {"tool_choice": choice, "tool_call_parser": "openai", "reasoning_parser": "openai"}
    [output] = random_llm.chat(
        ASK, likes_c, tools=tools, chat_template=WITH_TOOLS + "<|channel|>analysis<|message|>", **options
    )

    written = random_llm.get_tokenizer().decode(output.outputs[0].token_ids)
    assert written.startswith("ccccc<|end|><|start|>assistant" + following)


def test_tools_that_constrain_exclude_structured_outputs(random_llm: Any) -> None:
    params = SamplingParams(structured_outputs=StructuredOutputsParams(regex="a+"), max_tokens=8)
    with pytest.raises(InvalidRequestError, match="exclude each other"):
        random_llm.chat(ASK, params, tools=[tool()], tool_choice="required")
    [output] = random_llm.chat(ASK, params, tools=[tool()])
    assert set(output.outputs[0].text) == {"a"}


def test_the_vocabulary_of_the_test_model_holds_the_marks() -> None:
    assert len(special_tokenizer(PLAIN)) <= VOCAB_SIZE
