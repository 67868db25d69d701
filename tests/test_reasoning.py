"""Reasoning is told apart from the answer, and ends where its budget does."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch

from helpers import make_llm, make_request
from helpers_models import EOS, VOCAB_SIZE, make_model, make_tokenizer
from paged_backend import LLM, CompletionOutput, InvalidRequestError, SamplingParams, StructuredOutputsParams
from paged_backend.chat.output_format import OutputFormat
from paged_backend.chat.reasoning import REASONING_PARSERS, Reasoning, Stage, detect_reasoning_parser
from paged_backend.chat.tokenizer import Tokenizer
from paged_backend.engine.request import Markup, ReasoningMarks
from paged_backend.handle import _extend
from paged_backend.sampling.sampler import Sampler

# Opens the reasoning in the generation prompt, unless told to do without.
THINKING = """\
{%- for message in messages %}<|im_start|>{{ message.role }}
{%- if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}
{{ message.content }}<|im_end|>
{% endfor %}
{%- if tools %}{{ tools | tojson }}<tool_call></tool_call>{% endif %}
{%- if add_generation_prompt %}<|im_start|>assistant
<think>
{% if enable_thinking is defined and not enable_thinking %}
</think>

{% endif %}{% endif %}"""
# Leaves it to the model.
FREE = THINKING.replace("assistant\n<think>\n", "assistant\n").replace("\n</think>\n", "<think>\n\n</think>\n")
ASK = [{"role": "user", "content": "Why?"}]
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
TOOL = {"type": "function", "function": {"name": "look", "parameters": NOTHING}}
THINK = "<think>", "</think>"


def parse(name: str, stage: Stage, pieces: Iterable[str]) -> CompletionOutput:
    parser = OutputFormat(reasoning=Reasoning(REASONING_PARSERS[name], stage)).parser()
    whole, pieces = CompletionOutput(0), list(pieces)
    for index, piece in enumerate(pieces):
        news = CompletionOutput(0, piece, finish_reason="stop" if index == len(pieces) - 1 else None)
        parser.parse(news)
        _extend(whole, news)
    return whole


def forced(text: str, **params: Any) -> SamplingParams:
    ids = [*make_tokenizer().encode(text), EOS]
    return SamplingParams(**{"max_tokens": None, "extra_args": {"forced": ids}} | params)


def chat_llm(template: str = THINKING, **options: Any) -> Any:
    tokenizer = Tokenizer(make_tokenizer(chat_template=template))
    return make_llm(tokenizer=tokenizer, eos_token_ids=[EOS], max_model_len=2000, num_blocks=2000, **options)


@pytest.mark.parametrize("size", [1, 2, 5, 1000])
@pytest.mark.parametrize(
    ("name", "stage", "text", "reasoning", "content"),
    [
        ("qwen3", Stage.BEFORE, "<think>\nHm.\n</think>\n\nYes.", "Hm.", "Yes."),
        ("qwen3", Stage.BEFORE, "\n<think>a < b</think>c", "a < b", "c"),
        ("qwen3", Stage.BEFORE, "Yes. <think>no</think>", None, "Yes. <think>no</think>"),
        ("qwen3", Stage.BEFORE, " Yes.\n", None, " Yes.\n"),
        ("qwen3", Stage.BEFORE, "<thin", None, "<thin"),
        ("qwen3", Stage.BEFORE, "<think>never ends </thin", "never ends </thin", ""),
        ("qwen3", Stage.BEFORE, "<think></think>Yes.", None, "Yes."),
        ("qwen3", Stage.INSIDE, "Hm.\n\nTwo.</think>Yes.</think>", "Hm.\n\nTwo.", "Yes.</think>"),
        ("qwen3", Stage.INSIDE, "<think>Hm.</think>Yes.", "Hm.", "Yes."),
        ("qwen3", Stage.INSIDE, "Hm.", "Hm.", ""),
        ("qwen3", Stage.AFTER, "<think>x</think>", None, "<think>x</think>"),
        ("mistral", Stage.BEFORE, "[THINK]Hm.[/THINK]Yes.", "Hm.", "Yes."),
        ("granite", Stage.BEFORE, "Here is my thought process: Hm.\nHere is my response: Yes.", "Hm.", "Yes."),
        ("deepseek_r1", Stage.INSIDE, "", None, ""),
    ],
)
def test_reasoning_ends_where_its_mark_says(
    name: str, stage: Stage, text: str, reasoning: str | None, content: str, size: int
) -> None:
    pieces = [text[start : start + size] for start in range(0, len(text), size)] or [""]
    output = parse(name, stage, pieces)

    assert (output.reasoning, output.text) == (reasoning, content)


@pytest.mark.parametrize(
    ("prompt", "stage"),
    [
        ("<|assistant|>\n<think>\n", Stage.INSIDE),
        ("<think>\n\n</think>\n\n", Stage.AFTER),
        ("the user asks about <think>\nassistant:", Stage.BEFORE),
    ],
)
def test_the_prompt_says_where_an_output_begins(prompt: str, stage: Stage) -> None:
    assert REASONING_PARSERS["qwen3"].stage_after(prompt) is stage
    assumed = {Stage.BEFORE: Stage.INSIDE}.get(stage, stage)
    assert REASONING_PARSERS["deepseek_r1"].stage_after(prompt) is assumed


@pytest.mark.parametrize(
    ("template", "name"),
    [
        (THINKING, "qwen3"),
        ("{{ content.split('</think>')[-1] }}", "qwen3"),
        ("[THINK]{{ x }}[/THINK]", "mistral"),
        ("<|channel|>final", "openai"),
        ("{{ content }}", None),
    ],
)
def test_the_format_is_known_by_the_template(template: str, name: str | None) -> None:
    assert detect_reasoning_parser(template) == name


@pytest.mark.parametrize(("template", "opening"), [(THINKING, ""), (FREE, "<think>\n")])
def test_a_chat_streams_its_reasoning_apart_from_its_answer(template: str, opening: str) -> None:
    params = forced(opening + "Hm, why?\n</think>\n\nBecause.")
    with chat_llm(template) as llm:
        [whole] = llm.chat(ASK, params)
        pieces = [output.outputs[0] for output in llm.stream_chat(ASK, params)]

    assert (whole.outputs[0].reasoning, whole.outputs[0].text) == ("Hm, why?", "Because.")
    assert "".join(piece.reasoning or "" for piece in pieces) == "Hm, why?"
    assert "".join(piece.text for piece in pieces) == "Because."


@pytest.mark.parametrize("template", [THINKING, FREE])
def test_thinking_may_be_switched_off_in_the_template(template: str) -> None:
    with chat_llm(template) as llm:
        [output] = llm.chat(ASK, forced("Because."), chat_template_kwargs={"enable_thinking": False})

    assert (output.outputs[0].reasoning, output.outputs[0].text) == (None, "Because.")


def test_the_parser_may_be_named_or_switched_off() -> None:
    text = "Hm.</think>Yes."
    with chat_llm(reasoning_parser=None) as llm:
        assert llm.chat(ASK, forced(text))[0].outputs[0].text == text
        assert llm.chat(ASK, forced(text), reasoning_parser="auto")[0].outputs[0].text == "Yes."
    with chat_llm() as llm:
        assert llm.chat(ASK, forced(text), reasoning_parser=None)[0].outputs[0].text == text
        mistral = llm.chat(ASK, forced("[THINK]Hm.[/THINK]Yes."), reasoning_parser="mistral")[0].outputs[0]
    assert (mistral.reasoning, mistral.text) == ("Hm.", "Yes.")


def test_a_call_may_follow_the_reasoning_but_is_none_within_it() -> None:
    call = '<tool_call>{"name": "look", "arguments": {}}</tool_call>'
    with chat_llm() as llm:
        [output] = llm.chat(ASK, forced(f"Maybe {call}?</think>\n{call}"), tools=[TOOL])
    [sample] = output.outputs

    assert (sample.reasoning, sample.text) == (f"Maybe {call}?", "")
    assert [call.name for call in sample.tool_calls] == ["look"]


def test_going_on_with_a_message_goes_on_with_its_reasoning() -> None:
    def answer(content: str) -> CompletionOutput:
        messages = [*ASK, {"role": "assistant", "content": content}]
        return llm.chat(messages, forced("and so</think>on"), continue_final_message=True)[0].outputs[0]

    with chat_llm(FREE) as llm:
        assert answer("<think>Hm").reasoning == "and so"
        assert answer("<think>Hm</think>Yes").text == "and so</think>on"
        assert answer("Yes").text == "and so</think>on"


def test_past_reasoning_reaches_the_template_under_either_name() -> None:
    for name in ("reasoning", "reasoning_content"):
        message = {"role": "assistant", "content": "Yes.", name: "Hm."}
        assert "<think>Hm.</think>" in Tokenizer(make_tokenizer(chat_template=FREE)).render_chat([*ASK, message, *ASK])


def marks(*, is_open: bool = True) -> ReasoningMarks:
    tokenizer = make_tokenizer()
    return ReasoningMarks(
        start=THINK[0],
        end=THINK[1],
        is_open=is_open,
        closing_ids=tuple(tokenizer.encode(THINK[1])),
        decode=tokenizer.decode,
    )


def written(first: str, budget: int, *, is_open: bool, max_tokens: int = 60, forget: bool = False) -> str:
    """What comes out if the model wants to write `first`, and dots after that."""
    tokenizer, sampler = make_tokenizer(), Sampler(VOCAB_SIZE)
    request = make_request([1, 2], thinking_token_budget=budget, temperature=0.0, max_tokens=max_tokens)
    request.markup = Markup(knows_reasoning=True, reasoning=marks(is_open=is_open))
    [sequence] = request.sequences
    wanted = tokenizer.encode(first)
    for index in range(max_tokens):
        logits = torch.zeros(1, VOCAB_SIZE)
        logits[0, wanted[index] if index < len(wanted) else ord(".")] = 9.0
        sequence.token_ids.append(sampler.sample(logits, [sequence])[0].token_id)
        if forget:
            sequence.sampling_state = None
    return str(tokenizer.decode(sequence.token_ids[2:]))


@pytest.mark.parametrize("forget", [False, True])
@pytest.mark.parametrize("budget", [0, 1, 5])
def test_the_end_is_forced_once_the_budget_is_spent(budget: int, forget: bool) -> None:
    text = written("", budget, is_open=True, forget=forget)

    assert text == "." * budget + "</think>" + "." * (60 - 8 - budget)


@pytest.mark.parametrize("opening", ["<think>", "\n<think>"])
def test_the_budget_begins_with_the_reasoning(opening: str) -> None:
    text = written(opening, 3, is_open=False)

    assert text.startswith(f"{opening}...</think>......") and text.count("</think>") == 1


@pytest.mark.parametrize("first", ["Yes.", " <thin", "Yes <think>"])
def test_what_is_no_reasoning_is_not_limited(first: str) -> None:
    assert "</think>" not in written(first, 2, is_open=False)


@pytest.mark.parametrize("budget", [12, 15, 100])
def test_reasoning_that_ends_in_time_is_left_alone(budget: int) -> None:
    text = written("Hm, </think>Yes", budget, is_open=True)

    assert text.startswith("Hm, </think>Yes....") and text.count("</think>") == 1


def test_a_character_is_finished_before_the_end_is_forced() -> None:
    assert written("🙂🙂", 6, is_open=True).startswith("🙂🙂</think>")


def num_thoughts(token_ids: list[int]) -> int:
    """How many tokens come before those of the end of the reasoning."""
    end = list(b"</think>")
    return next(index for index in range(len(token_ids)) if token_ids[index : index + len(end)] == end)


THOUGHTS = [{"role": "user", "content": "x"}]


@pytest.fixture(scope="module")
def thinker() -> Any:
    with LLM(make_model(max_position_embeddings=4096), make_tokenizer(chat_template=THINKING), seed=1) as llm:
        yield llm


@pytest.mark.parametrize("n", [1, 3])
def test_a_budget_holds_for_each_sample_of_a_real_model(thinker: LLM, n: int) -> None:
    params = SamplingParams(max_tokens=40, thinking_token_budget=6, ignore_eos=True, n=n, temperature=1.0)
    [output] = thinker.chat(THOUGHTS, params, reasoning_parser="qwen3")

    [raw] = thinker.generate([output.prompt], params, use_tqdm=False)
    for sample in (*output.outputs, *raw.outputs):
        assert num_thoughts(sample.token_ids) in range(6, 10)  # a character is not cut


def test_a_budget_survives_preemption() -> None:
    params = SamplingParams(max_tokens=48, thinking_token_budget=20, ignore_eos=True, temperature=0.0)
    tokenizer = make_tokenizer(chat_template=THINKING)
    chats = [[{"role": "user", "content": str(index)}] for index in range(4)]
    with LLM(make_model(), tokenizer) as roomy:
        expected = [output.outputs[0].token_ids for output in roomy.chat(chats, params, use_tqdm=False)]
    with LLM(make_model(), tokenizer, num_gpu_blocks_override=14, enable_prefix_caching=False) as crowded:
        outputs = crowded.chat(chats, params, use_tqdm=False)
        assert crowded.stats().num_preemptions > 0

    assert [output.outputs[0].token_ids for output in outputs] == expected
    assert all(num_thoughts(ids) in range(20, 24) for ids in expected)


def test_a_budget_needs_a_format_of_reasoning() -> None:
    params = SamplingParams(thinking_token_budget=5, max_tokens=4)
    with chat_llm("{{ messages[0].content }}") as llm:
        for call in (lambda: llm.chat(ASK, params), lambda: llm.generate("x", params)):
            with pytest.raises(InvalidRequestError, match="thinking_token_budget=5 needs a model with a reasoning"):
                call()
    for budget in (-1, 1.5, True):
        with pytest.raises(InvalidRequestError, match="thinking_token_budget"):
            SamplingParams(thinking_token_budget=budget)


SHAPES = [
    StructuredOutputsParams(json={"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"],
                                  "additionalProperties": False}),
    StructuredOutputsParams(regex="[ab]{3}"),
    StructuredOutputsParams(choice=["yes", "no"]),
    StructuredOutputsParams(grammar='start: "x" /[0-9]/'),
]  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.kind)
def test_structured_output_begins_after_the_reasoning(thinker: LLM, shape: StructuredOutputsParams) -> None:
    params = SamplingParams(
        max_tokens=80, thinking_token_budget=9, structured_outputs=shape, temperature=1.0, seed=4, n=2
    )
    [output] = thinker.chat(THOUGHTS, params)
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    [without] = thinker.chat(THOUGHTS, params, **off)

    for sample in (*output.outputs, *without.outputs):
        assert sample.finish_reason == "stop"
        assert sample.text[0] in '{abynx"'[:6] and len(sample.text) <= 40
    assert all(num_thoughts(sample.token_ids) in range(9, 13) for sample in output.outputs)
    assert all(sample.reasoning is None for sample in without.outputs)


def test_a_required_call_comes_after_the_reasoning(thinker: LLM) -> None:
    params = SamplingParams(max_tokens=150, thinking_token_budget=7, temperature=1.0, seed=4)
    options = {"tool_choice": "required", "parallel_tool_calls": False}
    [output] = thinker.chat(THOUGHTS, params, tools=[TOOL], **options)
    [sample] = output.outputs

    assert num_thoughts(sample.token_ids) in range(7, 11)
    assert [(call.name, call.arguments) for call in sample.tool_calls] == [("look", "{}")]
    assert (sample.text, sample.finish_reason) == ("", "stop")
