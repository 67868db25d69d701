"""Structured output of the demo model: valid at temperature 1, alone, crowded, and beside free rows."""

from __future__ import annotations

import re
from typing import Any

import pytest

from helpers_structured import make_schema, validate
from paged_backend import LLM, RequestOutput, SamplingParams

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # up to 32,000 tokens of a real model

SCHEMAS = [make_schema(seed) for seed in range(200)]
REGEXES = [
    *("abc", "a+b", "a{2,5}", "(yes|no)", "[a-z]{3}", r"\d{4}-\d{2}-\d{2}", r"[a-z]+@[a-z]+\.(com|org)", "(a|b){3}c"),
    *(r"[A-F0-9]{8}", r"\+?\d{1,3} \d{5,9}", "(foo|foobar|foobarbaz)", "(ab){2}", "é{1,3}", "[^a-z]{2}", r"\([a-z]\)"),
    *(r"-?\d{1,9}(\.\d{1,9})?", "[\U0001f600-\U0001f64f]{3}", "北京|東京", ".{5}", r"\[(\d,){0,5}\d\]", '"[^"]{0,9}"'),
    *(
        r"\S{1,20}",
        r"[ab]{0,4}",
        "(?i)hello",
        "[一-龥]{2}",
        "start.{0,9}end",
        "((a|b)(c|d)){1,4}",
        r"\\n",
        r"\t",
        "a.c",
    ),
    *(
        r"([01]\d|2[0-3]):[0-5]\d",
        r"#[0-9a-f]{6}",
        "(a{0,3}){0,3}b",
        r"v\d\.\d\.\d",
        "(?s)a.c",
        "😀|😁",
        "a|",
        "x?y?z?",
    ),
    *(r"[A-Z][a-z]{1,6}", "q[^u]", r"\d{1,3}(\.\d{1,3}){3}", "((((a))))", "(a|ab)(c|bcd)", r"[\w.]{1,5}", r"\$\d{1,5}"),
    *(r"[a-f]{2}(-[a-f]{2}){2}", r"(Mr|Ms) [A-Z]\."),
    *("(one|two|three)( (one|two))?", "(a{1,3}b){2,3}", r"(\d{3} ){2}\d", "(?:ab|c)?d"),
]


def make_params(index: int, max_tokens: int = 160, **given: Any) -> SamplingParams:
    return SamplingParams(seed=index, max_tokens=max_tokens, structured_outputs=given or None)


def answer(llm: LLM, params: list[SamplingParams]) -> list[RequestOutput]:
    chats = [[{"role": "user", "content": f"Give me an example, number {params_.seed}."}] for params_ in params]
    return llm.chat(chats, params, use_tqdm=False)


def check_valid(schemas: list[dict[str, Any]], outputs: list[RequestOutput]) -> None:
    num_complete = 0
    for schema, output in zip(schemas, outputs, strict=True):
        completion = output.outputs[0]
        if completion.finish_reason == "stop":
            validate(schema, completion.text)
            num_complete += 1
    assert num_complete >= 0.9 * len(outputs)


def test_outputs_of_200_schemas_validate() -> None:
    with LLM("demo", kv_cache_memory="512MiB") as llm:
        check_valid(SCHEMAS, answer(llm, [make_params(i, json=schema) for i, schema in enumerate(SCHEMAS)]))


def test_crowded_and_mixed_batches_change_nothing() -> None:
    """The cache holds a fifth of what all need; free rows are what they are alone."""
    schemas = SCHEMAS[:14]
    bound = [make_params(i, json=schema) for i, schema in enumerate(schemas)]
    free = [make_params(100 + i, max_tokens=24) for i in range(8)]
    with LLM(
        "demo", dtype="float32", num_gpu_blocks_override=34, enable_prefix_caching=False, max_model_len=512
    ) as llm:
        outputs = answer(llm, bound + free)
        assert llm.stats().num_preemptions > 0
    check_valid(schemas, outputs[: len(bound)])
    with LLM("demo", dtype="float32", kv_cache_memory="256MiB") as llm:
        alone = [answer(llm, [params])[0].outputs[0].text for params in free]
    assert [output.outputs[0].text for output in outputs[len(bound) :]] == alone


def test_expressions_match_from_start_to_end() -> None:
    assert len(REGEXES) >= 50
    with LLM("demo", kv_cache_memory="256MiB") as llm:
        outputs = answer(llm, [make_params(i, max_tokens=80, regex=text) for i, text in enumerate(REGEXES)])
    for text, output in zip(REGEXES, outputs, strict=True):
        completion = output.outputs[0]
        assert completion.finish_reason == "length" or re.fullmatch(text, completion.text), (text, completion.text)
    assert sum(output.outputs[0].finish_reason == "stop" for output in outputs) >= 45
