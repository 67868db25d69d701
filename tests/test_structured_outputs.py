"""Whatever the model's logits, the output matches its schema, expression or grammar, and the batch does not notice."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import threading
from typing import Any

import pydantic
import pytest
import torch
import typing_extensions
from hypothesis import given
from hypothesis import strategies as st

import paged_kernels
from helpers import byte_level_tokenizer, is_idle
from helpers_structured import POISON, make_llm, make_schema, make_tokenizer, validate
from paged_backend import (
    LLM,
    EngineError,
    InvalidRequestError,
    MissingExtraError,
    RequestOutput,
    SamplingParams,
    StructuredOutputsParams,
)
from paged_backend.sampling import grammar
from paged_backend.sampling.grammar import GrammarCompiler
from paged_kernels import reference

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 10},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
PROMPT = list(range(65, 75))


@pytest.fixture(scope="module")
def llm() -> Any:
    with make_llm() as llm:
        yield llm


def make_params(seed: int = 0, max_tokens: int = 300, **options: Any) -> SamplingParams:
    """What is no sampling parameter is one of StructuredOutputsParams."""
    kinds = {name: options.pop(name) for name in StructuredOutputsParams.__dataclass_fields__ if name in options}
    return SamplingParams(seed=seed, max_tokens=max_tokens, structured_outputs=kinds or None, **options)


def generate(llm: LLM, *params: SamplingParams) -> list[RequestOutput]:
    return llm.generate([PROMPT] * len(params), list(params), use_tqdm=False)


def text_of(llm: LLM, **options: Any) -> str:
    """The output of one request, which has to end by itself."""
    output = generate(llm, make_params(**options))[0].outputs[0]
    assert output.finish_reason == "stop", output
    return output.text


# What is generated


def test_outputs_validate_in_mixed_batches_and_under_preemption() -> None:
    schemas = [make_schema(seed) for seed in range(40)]
    bound = [make_params(seed, json=schema) for seed, schema in enumerate(schemas)]
    free = [make_params(seed, max_tokens=40) for seed in range(10)]
    with make_llm(num_blocks=100) as llm:
        outputs = generate(llm, *bound, *free)
        assert llm.stats().num_preemptions > 0
        solo = [generate(llm, params)[0] for params in (bound + free)[::9]]
    for schema, output in zip(schemas, outputs, strict=False):
        assert output.outputs[0].finish_reason == "stop"
        validate(schema, output.outputs[0].text)
    assert [output.outputs[0].token_ids for output in outputs[::9]] == [output.outputs[0].token_ids for output in solo]


REGEXES = [
    *("abc", "a+", "a{2,5}", "(yes|no)", "[a-z]{3}", r"\d{4}-\d{2}-\d{2}", r"\w+@\w+\.(com|org)", "(a|b)*c"),
    *(r"[A-F0-9]{8}", r"\+?\d{1,3} \d{5,9}", "(foo|foobar|foobarbaz)", "(ab){2}", "é+", "[^a-z]{2}", r"\([a-z]\)"),
    *(r"-?\d+(\.\d+)?", "[\U0001f600-\U0001f64f]{3}", "北京|東京", ".{5}", r"\[(\d,)*\d\]", '"[^"]*"', "a|", "x?y?z?"),
    *(r"\S+", r"[ab]{0,4}", "(?i)hello", "[一-龥]{2}", r"^start.*end$", "((a|b)(c|d)){1,4}", r"\\n", r"\t", "a.c"),
    *(r"([01]\d|2[0-3]):[0-5]\d", r"#[0-9a-f]{6}", "(a*)*b", "(x+x+)+y", r"v\d+\.\d+\.\d+", "(?s)a.c", "😀|😁"),
    *(r"[A-Z][a-z]{1,6}", "q[^u]", r"\d{1,3}(\.\d{1,3}){3}", "((((a))))", "(a|ab)(c|bcd)", r"[\w./]{1,5}", r"\$\d+"),
    *("(one|two|three)( (one|two))?", "(a{1,3}b){2,3}", r"(\d{3} ){2}\d", '[^"\\\\]{3}', "(?:ab|c)?d"),
]


def test_expressions_match_from_start_to_end(llm: LLM) -> None:
    outputs = generate(llm, *(make_params(i, regex=item, temperature=1.5) for i, item in enumerate(REGEXES)))
    assert len(REGEXES) >= 50
    for expression, output in zip(REGEXES, outputs, strict=True):
        completion = output.outputs[0]
        if completion.finish_reason == "stop":
            assert re.fullmatch(expression, completion.text), (expression, completion.text)
    assert sum(output.outputs[0].finish_reason == "stop" for output in outputs) >= 45


CHOICES = ["\U0001f642", "\U0001f44d\U0001f3fd", "ok", "okay", 'say "hi"\\\n']
ENUM = {"enum": ["München", "北京"]}


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
@pytest.mark.parametrize("seed", range(5))
def test_characters_may_span_tokens(kind: str, seed: int) -> None:
    with make_llm(make_tokenizer(kind), num_padding=5) as llm:
        assert re.fullmatch("[\U0001f600-\U0001f64f]{3}", text_of(llm, seed=seed, regex="[\U0001f600-\U0001f64f]{3}"))
        assert text_of(llm, seed=seed, choice=CHOICES) in CHOICES
        assert json.loads(text_of(llm, seed=seed, json=ENUM)) in ENUM["enum"]
        assert re.fullmatch(".{5}", text_of(llm, seed=seed, regex=".{5}"))


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ('root ::= "<" [ab]{3} ">"', "<[ab]{3}>"),
        ('start: "<" /[ab]{3}/ ">"', "<[ab]{3}>"),
        ('start: "v=" %json {"type": "integer", "minimum": 1, "maximum": 20}', r"v=\d{1,2}"),
        ('start: "1"', "1"),
    ],
)
def test_grammars_may_be_gbnf_or_lark(llm: LLM, given: str, expected: str) -> None:
    assert re.fullmatch(expected, text_of(llm, grammar=given))


def test_json_object_is_any_object(llm: LLM) -> None:
    assert isinstance(json.loads(text_of(llm, json_object=True)), dict)


# White space


def outside_strings(text: str) -> str:
    return re.sub(r'"(\\.|[^"\\])*("|$)', '""', text)


@pytest.mark.parametrize("kind", [{"json_object": True}, {"json": PERSON}])
def test_white_space_is_bounded_however_much_the_model_likes_it(kind: dict[str, Any]) -> None:
    with make_llm(favoured=['"', "}", " ", "  ", "\n", "\n\n"]) as llm:
        bias = {llm.tokenizer.encode(text)[0]: 20.0 for text in (" ", "  ", "\n", "\n\n")}
        for seed in range(4):
            completion = generate(llm, make_params(seed, max_tokens=80, logit_bias=bias, **kind))[0].outputs[0]
            assert not re.search(r"\s\s|^\s|\s$", outside_strings(completion.text))
            if completion.finish_reason == "stop":
                json.loads(completion.text)


def test_white_space_can_be_chosen(llm: LLM) -> None:
    assert not re.search(r"\s", outside_strings(text_of(llm, json=PERSON, disable_any_whitespace=True)))
    pattern = {"json": {"type": "array", "items": {"const": 1}, "minItems": 3}, "whitespace_pattern": "\n\t"}
    texts = [text_of(llm, seed=seed, **pattern) for seed in range(10)]
    assert any("\n\t" in text for text in texts)
    assert all(re.fullmatch(r"(\n\t|[\[\]1,])*", text) for text in texts)


# The end


def test_the_output_ends_where_nothing_may_follow(llm: LLM) -> None:
    output = generate(llm, make_params(regex="[a-z]{3}", ignore_eos=True))[0].outputs[0]
    assert (output.finish_reason, output.stop_reason, len(output.text)) == ("stop", None, 3)
    assert llm.get_tokenizer().eos_token_id not in output.token_ids


def test_the_last_token_allowed_may_complete_the_output(llm: LLM) -> None:
    num_tokens = len(generate(llm, make_params(json=PERSON))[0].outputs[0].token_ids)
    assert generate(llm, make_params(json=PERSON, max_tokens=num_tokens))[0].outputs[0].finish_reason == "stop"
    assert generate(llm, make_params(json=PERSON, max_tokens=num_tokens - 1))[0].outputs[0].finish_reason == "length"


def test_where_the_output_may_end_or_go_on_the_end_token_decides(llm: LLM) -> None:
    lengths = {len(text_of(llm, seed=seed, regex="[ab]*", allowed_token_ids=[97, *_ends(llm)])) for seed in range(8)}
    assert len(lengths) > 1
    endless = generate(llm, make_params(regex="[ab]*", ignore_eos=True, max_tokens=50))[0].outputs[0]
    assert (endless.finish_reason, len(endless.token_ids)) == ("length", 50)


def test_an_empty_output_may_be_all_that_matches(llm: LLM) -> None:
    assert text_of(llm, regex="", skip_special_tokens=False, ignore_eos=True) == ""


def test_a_stop_token_of_ones_own_ends_it_where_it_may_end(llm: LLM) -> None:
    output = generate(llm, make_params(regex="a{2,}", stop_token_ids=[200], allowed_token_ids=[97, 200]))[0].outputs[0]
    assert re.fullmatch("a{2,}", output.text)
    assert (output.finish_reason, output.stop_reason) == ("stop", 200)


def test_a_stop_string_cuts_the_text(llm: LLM) -> None:
    output = generate(llm, make_params(regex="abc", stop="b"))[0].outputs[0]
    assert (output.text, output.stop_reason) == ("a", "b")


def _ends(llm: LLM) -> list[int]:
    return [llm.get_tokenizer().eos_token_id]


# Other parameters


@pytest.mark.parametrize(
    "options",
    [
        {"allowed_token_ids": [97]},
        {"logit_bias": dict.fromkeys(range(256), -100)},
        {"logit_bias": {97: 100.0}},
        {"bad_words": ["0", "1", '"', "}", ", "]},
        {"min_tokens": 200},
        {"repetition_penalty": 1e30, "frequency_penalty": 2.0},
        {"temperature": 0.0},
        {"top_k": 3, "top_p": 0.5, "min_p": 0.1},
        {"logprobs": 3},
    ],
    ids=lambda options: next(iter(options)),
)
def test_the_grammar_wins_over_other_parameters(llm: LLM, options: dict[str, Any]) -> None:
    validate(PERSON, text_of(llm, json=PERSON, **options))


def test_among_what_the_grammar_allows_other_parameters_decide(llm: LLM) -> None:
    assert text_of(llm, regex="[ab]{5}", allowed_token_ids=[97]) == "aaaaa"
    assert text_of(llm, regex="[ac]{5}", logit_bias={97: -100}) == "ccccc"
    assert len(text_of(llm, regex="a*", min_tokens=6)) >= 6


def test_log_probabilities_are_of_the_raw_logits(llm: LLM) -> None:
    bound = generate(llm, make_params(regex="a", logprobs=2))[0].outputs[0]
    free = generate(llm, make_params(max_tokens=1, logprobs=2))[0].outputs[0]
    assert bound.logprobs is not None and free.logprobs is not None
    assert list(bound.logprobs[0].values())[1:] == list(free.logprobs[0].values())[-2:]


# One batch, many outputs


def test_samples_of_one_request_each_follow_the_grammar(llm: LLM) -> None:
    texts = [output.text for output in generate(llm, make_params(json=PERSON, n=3))[0].outputs]
    assert len(set(texts)) == 3
    for text in texts:
        validate(PERSON, text)


def test_a_compiled_grammar_is_nobodys_state(llm: LLM) -> None:
    first, second = (generate(llm, make_params(grammar='start: "1" | "22"')) for _ in range(2))
    assert first[0].outputs == second[0].outputs
    many = generate(llm, *(make_params(seed, json=PERSON) for seed in range(12)))
    assert [generate(llm, make_params(seed, json=PERSON))[0].outputs for seed in range(12)] == [
        one.outputs for one in many
    ]


def test_aborting_one_of_two_leaves_the_other_alone(llm: LLM) -> None:
    alone = text_of(llm, json=PERSON)
    handles = [llm.submit(PROMPT, make_params(json=PERSON)) for _ in range(2)]
    handles[0].abort()
    assert handles[1].result().outputs[0].text == alone


def test_an_output_that_leaves_its_grammar_fails_its_request_alone(llm: LLM) -> None:
    alone = text_of(llm, json=PERSON)
    handles = [llm.submit(prompt, make_params(json=PERSON)) for prompt in ([POISON], PROMPT)]
    with pytest.raises(EngineError, match="could not be chosen: GrammarError"):
        handles[0].result()
    assert handles[1].result().outputs[0].text == alone
    assert is_idle(llm.stats())


def test_streamed_pieces_join_to_the_whole(llm: LLM) -> None:
    pieces = [output.outputs[0].text for output in llm.stream(PROMPT, make_params(json=PERSON))]
    assert "".join(pieces) == text_of(llm, json=PERSON)


async def test_the_event_loop_goes_on_while_a_grammar_is_compiled(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    loop_went_on = threading.Event()
    compile_really = grammar._compile

    def compile_then(*args: Any) -> Any:
        assert loop_went_on.wait(10)
        return compile_really(*args)

    async def go_on() -> None:
        await asyncio.sleep(0)  # the other one has begun
        loop_went_on.set()

    monkeypatch.setattr(grammar, "_compile", compile_then)
    answer = llm.agenerate(PROMPT, make_params(regex="the loop goes on [ab]"))
    (outputs, _) = await asyncio.wait_for(asyncio.gather(answer, go_on()), 20)
    assert "the loop goes on" in outputs[0].outputs[0].text


# Refusals

DEEP = '{"type": "array", "items": ' * 500 + "{}" + "}" * 500
REFUSED: list[dict[str, Any]] = [
    {"json": ""},
    {"json": "not json"},
    {"json": "[]"},
    {"json": {"$ref": "#/nope"}},
    {"json": {"$ref": "#"}},
    {"json": {"type": "strin"}},
    {"json": {"not": {"type": "string"}}},
    {"json": {"type": "string", "format": "bogus"}},
    {"json": {"x": float("nan")}},
    {"json": 3},
    {"json": DEEP},
    {"json": DEEP * 30},
    {"json": {"enum": ["x" * 100 + str(i) for i in range(20_000)]}},
    {"json": PERSON, "whitespace_pattern": "("},
    {"json": PERSON, "whitespace_pattern": " ", "disable_any_whitespace": True},
    {"regex": "("},
    {"regex": r"(a)\1"},
    {"regex": r"[^\s\S]"},
    {"regex": "a", "whitespace_pattern": " "},
    {"regex": 5},
    {"regex": "a", "json": "{}"},
    {"grammar": "start:: x"},
    {"grammar": ""},
    {"grammar": "start: start"},
    {"choice": []},
    {"choice": "yes"},
    {"choice": ["yes", 1]},
    {"json_object": False},
    {"json_object": None},
    {"jsn": {}},
]


def test_what_cannot_be_matched_is_refused_and_harms_nobody(llm: LLM) -> None:
    alone = text_of(llm, json=PERSON)
    running = llm.submit(PROMPT, make_params(json=PERSON))
    for refused in REFUSED:
        with pytest.raises(InvalidRequestError):
            generate(llm, make_params(), SamplingParams(structured_outputs=refused))
    assert running.result().outputs[0].text == alone == text_of(llm, json=PERSON)
    assert is_idle(llm.stats())


LARGE = [{"json": {"type": "integer", "maximum": 20_000_000_000}}, {"regex": "((a{1,100}){1,100}){1,100}"}]


@pytest.mark.parametrize("large", LARGE)
def test_large_numbers_are_fine(llm: LLM, large: dict[str, Any]) -> None:
    generate(llm, make_params(max_tokens=20, **large))


DEEP_GRAMMARS = """
import sys, threading
import numpy as np
sys.path[:0] = {path}
from helpers_structured import make_tokenizer
from paged_backend import StructuredOutputsParams
from paged_backend.sampling import grammar
from paged_backend.sampling.grammar import GrammarCompiler

rules = "start: r0\\n" + "".join(f"r{{i}}: r{{i + 1}}\\n" for i in range(7000)) + 'r7000: "a"'
refs = {{str(i): {{"$ref": f"#/$defs/{{i + 1}}"}} for i in range(3500)}} | {{"3500": {{"const": "a"}}}}
grammars = [{{"grammar": rules}}, {{"grammar": rules.replace("r", "R").replace("staRt", "start")}}]
grammars.append({{"json": {{"$ref": "#/$defs/0", "$defs": refs}}}})
compiler = GrammarCompiler(make_tokenizer().backend, 300, [276])

def follow(compiled):
    matcher = compiled.matcher()
    matcher.fill(np.zeros(matcher.num_words, np.int32))
    matcher.catch_up(list((b"a", b'"a"')[compiled is json_grammar]))
    assert matcher.is_complete

*lark_grammars, json_grammar = [compiler.compile(StructuredOutputsParams(**given)) for given in grammars]
threads = [threading.Thread(target=follow, args=[one]) for one in (*lark_grammars, json_grammar)]
for thread in threads:
    thread.start()
    thread.join()
print("followed")
"""


def test_long_chains_of_rules_do_not_overflow_the_stack() -> None:
    code = DEEP_GRAMMARS.format(path=sys.path)
    completed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (completed.returncode, completed.stdout, completed.stderr) == (0, "followed\n", "")


def test_nobody_waits_for_ever_for_a_grammar(monkeypatch: pytest.MonkeyPatch) -> None:
    may_end = threading.Event()
    monkeypatch.setattr(grammar, "_MAX_COMPILE_SECONDS", 0.05)
    monkeypatch.setattr(grammar, "_compile", lambda *_: may_end.wait(20))
    with pytest.raises(InvalidRequestError, match=r"not compiled within 0.05 s"):
        GrammarCompiler(byte_level_tokenizer(), 257, [256]).compile(StructuredOutputsParams(regex="a"))
    may_end.set()


def test_structured_outputs_that_are_something_else_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="structured_outputs"):
        SamplingParams(structured_outputs="json")


def test_without_a_tokenizer_there_is_no_grammar() -> None:
    from helpers import make_llm as make_llm_without_tokenizer

    with make_llm_without_tokenizer() as llm, pytest.raises(InvalidRequestError, match="tokenizer"):
        llm.generate([1, 2, 3], make_params(regex="a"))


def test_a_model_needs_an_end_token(llm: LLM) -> None:
    with make_llm(has_end=False) as endless, pytest.raises(InvalidRequestError, match="end token"):
        generate(endless, make_params(regex="a"))


def test_a_tokenizer_without_a_fast_backend_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="fast"):
        GrammarCompiler(None, 300, [0]).compile(StructuredOutputsParams(regex="a"))


@pytest.mark.parametrize(("module", "given"), [("llguidance", {"regex": "a"}), ("pydantic", {"json": list[int]})])
def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch, module: str, given: dict[str, Any]) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingExtraError, match=r"paged-backend\[grammar\]"):
        GrammarCompiler(byte_level_tokenizer(), 257, [256]).compile(StructuredOutputsParams(**given))


# Schemas as types


class Pet(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=5)
    age: int = pydantic.Field(ge=0, le=20)
    friend: Pet | None = None


class Point(typing_extensions.TypedDict):
    x: int
    y: bool


def test_types_are_schemas(llm: LLM) -> None:
    for seed in range(5):
        Pet.model_validate_json(text_of(llm, seed=seed, json=Pet))
        point = json.loads(text_of(llm, seed=seed, json=Point))
        assert list(point) == ["x", "y"]


def test_extra_properties_are_what_the_schema_says_they_are(llm: LLM) -> None:
    schema = {"type": "object", "properties": {"x": {"const": 1}}, "required": ["x"]}
    texts = [text_of(llm, seed=seed, json=schema) for seed in range(8)]
    assert any(len(json.loads(text)) > 1 for text in texts)
    closed = [text_of(llm, seed=seed, json=schema, disable_additional_properties=True) for seed in range(8)]
    assert all(json.loads(text) == {"x": 1} for text in closed)


def test_what_was_given_can_be_changed_afterwards() -> None:
    schema, choices = {"type": "string"}, ["a"]
    of_schema, of_choices = StructuredOutputsParams(json=schema), StructuredOutputsParams(choice=choices)
    schema["type"], choices[0] = "integer", "b"
    assert (of_schema.json, of_choices.choice) == ('{"type": "string"}', ("a",))
    assert of_schema == StructuredOutputsParams(json='{"type":"string"}')


# Parts


def test_a_matcher_is_a_function_of_the_tokens() -> None:
    tokenizer = make_tokenizer()
    compiled = GrammarCompiler(tokenizer.backend, 300, [276]).compile(StructuredOutputsParams(regex="(abc|axy)z"))
    matcher = compiled.matcher()
    for text, is_complete in (("ab", False), ("ax", False), ("axyz", True), ("a", False), ("abcz", True)):
        matcher.catch_up(list(text.encode()))
        assert matcher.is_complete == is_complete


def test_only_the_grammars_used_last_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar, "_MAX_CACHED", 2)
    compiler = GrammarCompiler(make_tokenizer().backend, 300, [276])
    first, second, third = (StructuredOutputsParams(regex=text) for text in "abc")
    kept = compiler.compile(first)
    compiler.compile(second)
    assert compiler.compile(first) is kept
    compiler.compile(third)
    assert compiler.compile(first) is kept


@given(st.integers(0, 2**32 - 1), st.integers(1, 100), st.sampled_from([0.0, 0.1, 0.5, 1.0]))
def test_mask_logits_computes_its_definition(seed: int, vocab_size: int, share: float) -> None:
    random = torch.Generator().manual_seed(seed)
    logits = torch.randn(5, vocab_size, generator=random)
    bits = torch.rand(2, 4 * 32, generator=random) < share
    words = (bits.long().view(2, 4, 32) << torch.arange(32)).sum(-1).to(torch.int32)
    rows, expected = torch.tensor([3, 1]), logits.clone()
    paged_kernels.mask_logits(logits, rows, words)
    reference.mask_logits(expected, rows, words)
    assert torch.equal(logits, expected)
    assert torch.equal(logits[rows].isneginf(), ~bits[:, :vocab_size])
