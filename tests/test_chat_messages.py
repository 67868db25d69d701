"""Messages to prompts: as Hugging Face renders them, checked before anything is queued."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from helpers import byte_level_tokenizer, in_threads, is_idle, make_llm
from paged_backend import InvalidRequestError, SamplingParams
from paged_backend.chat.messages import normalised
from paged_backend.chat.tokenizer import Tokenizer

CHATML = """\
{{ bos_token }}
{%- for message in messages %}
{%- if loop.first and message.role != 'system' %}<|im_start|>system
Be kind.<|im_end|>
{% endif %}<|im_start|>{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls %}<call>{{ call.function.name }}
{%- for name, value in call.function.arguments.items() %} {{ name }}={{ value }}{% endfor %}</call>
{%- endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

STRICT = """\
{%- if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{%- for message in messages %}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('Conversation roles must alternate user/assistant') }}{% endif %}
{{- message.role }}: {{ message.content }}
{% endfor %}"""


def make_hf_tokenizer(template: str | None = CHATML, *, add_bos: bool = True) -> PreTrainedTokenizerFast:
    """Byte by byte, with `<s>` before every text unless told otherwise."""
    backend = byte_level_tokenizer()
    backend.add_special_tokens([AddedToken(text, special=True) for text in ("<s>", "<|im_start|>", "<|im_end|>")])
    if add_bos:
        backend.post_processor = TemplateProcessing(
            single="<s> $A", pair=None, special_tokens=[("<s>", backend.token_to_id("<s>"))]
        )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="<|im_end|>")
    tokenizer.chat_template = template
    return tokenizer


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def with_call(arguments: object, **function: Any) -> dict[str, Any]:
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": arguments} | function}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


@pytest.mark.parametrize("add_bos", [True, False])
@pytest.mark.parametrize("messages", [[user("Hi!")], [{"role": "system", "content": "Be brief."}, user("🙂")]])
def test_a_chat_is_tokenised_as_hugging_face_does_with_one_bos(messages: list[dict[str, Any]], add_bos: bool) -> None:
    hf = make_hf_tokenizer(add_bos=add_bos)
    tokenizer = Tokenizer(hf)
    ids = tokenizer.encode_chat(tokenizer.render_chat(messages))

    assert ids == hf.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
    assert ids.count(hf.bos_token_id) == 1
    assert hf.decode(ids).count("system\n") == 1


@pytest.mark.parametrize("text", ["plain", "<s>starts with it", "", "<|im_end|> within <s>", "\0"])
@pytest.mark.parametrize("add_bos", [True, False])
def test_a_text_gets_the_special_tokens_the_tokenizer_adds_but_never_a_second_bos(text: str, add_bos: bool) -> None:
    hf = make_hf_tokenizer(add_bos=add_bos)
    bos = hf.bos_token_id
    ids = Tokenizer(hf).encode(text)

    assert ids == (hf(text.removeprefix("<s>"))["input_ids"] if add_bos else hf(text)["input_ids"])
    assert ids[:2] != [bos, bos]


def test_a_rendered_chat_may_be_sent_as_a_plain_prompt() -> None:
    tokenizer = Tokenizer(make_hf_tokenizer())
    rendered = tokenizer.render_chat([user("Hi!")])

    assert tokenizer.encode(rendered) == tokenizer.encode_chat(rendered)


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_a_text_survives_encoding_and_decoding(text: str) -> None:
    tokenizer = Tokenizer(make_hf_tokenizer(add_bos=False))
    decoder = tokenizer.decoder()
    ids = tokenizer.encode(text)

    assert tokenizer.decode(ids) == decoder.without_special(ids) == decoder.with_special(ids) == text


@pytest.mark.parametrize("text", ["\ud83d", "a\udc00b", "\ude42\ud83d"])
def test_lone_surrogates_are_refused_wherever_they_come_from(text: str) -> None:
    tokenizer = Tokenizer(make_hf_tokenizer())
    with make_llm(tokenizer=tokenizer) as llm:
        for call in (
            lambda: llm.generate(text),
            lambda: llm.generate(["fine", text]),
            lambda: llm.chat([user(text)]),
            lambda: llm.chat([user([{"type": "text", "text": text}])]),
        ):
            with pytest.raises(InvalidRequestError, match="surrogate"):
                call()
        assert is_idle(llm.stats())

    assert tokenizer.encode(json.loads(r'"\ud83d\ude42"')) == tokenizer.encode("🙂")


@pytest.mark.parametrize("content", [None, "", []])
def test_no_content_is_empty_content(content: object) -> None:
    assert normalised([user(content)]) == [user("")]
    assert normalised([{"role": "user"}]) == [user("")]


def test_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "a"}, "b", {"text": "c"}]

    assert normalised([user(parts), {"role": "tool", "content": parts, "tool_call_id": "1"}]) == [
        user("abc"),
        {"role": "tool", "content": "abc", "tool_call_id": "1"},
    ]


@pytest.mark.parametrize("arguments", ['{"a": 1}', {"a": 1}, ' {"a": 1}\n'])
def test_arguments_of_tool_calls_reach_the_template_as_a_mapping(arguments: object) -> None:
    messages = [user("1+?"), with_call(arguments)]
    expected = make_hf_tokenizer().apply_chat_template(
        [user("1+?"), with_call({"a": 1}) | {"content": ""}], tokenize=False, add_generation_prompt=True
    )

    assert Tokenizer(make_hf_tokenizer()).render_chat(messages) == expected
    assert "<call>add a=1</call>" in expected


@pytest.mark.parametrize("arguments", ["{}", "", " ", "null", None, {}])
def test_no_arguments_are_an_empty_mapping(arguments: object) -> None:
    assert normalised([with_call(arguments)])[0]["tool_calls"][0]["function"]["arguments"] == {}


@pytest.mark.parametrize("tool_calls", [None, []])
def test_no_tool_calls_are_as_if_not_there(tool_calls: object) -> None:
    message = {"role": "assistant", "content": "x", "tool_calls": tool_calls}

    assert normalised([message]) == [{"role": "assistant", "content": "x"}]


def test_messages_are_not_changed() -> None:
    messages = [with_call('{"a": 1}'), {"role": "developer", "content": ["x"], "name": None}]
    before = json.dumps(messages)
    normalised(messages)

    assert json.dumps(messages) == before


@pytest.mark.parametrize(
    "messages, reason",
    [
        ([], "at least one message"),
        ("Hi!", "at least one message"),
        (user("Hi!"), "at least one message"),
        (["Hi!"], r"messages\[0\]"),
        ([user("Hi!"), {"content": "x"}], r"messages\[1\].*'role'"),
        ([{"role": "alien", "content": "x"}], "'alien'.*user"),
        ([{"role": ["user"], "content": "x"}], "role"),
        ([user(5)], "int"),
        ([user(b"x")], "bytes"),
        ([user({"type": "text", "text": "x"})], "dict"),
        ([user([{"type": "image_url", "image_url": {"url": "x"}}])], "'image_url'.*text only"),
        ([user([None])], "NoneType"),
        ([with_call("not json")], "no JSON"),
        ([with_call("[1]")], "no JSON object"),
        ([with_call("[" * 100_000)], "no JSON"),
        ([with_call("9" * 5000)], "no JSON"),
        ([{"role": "assistant", "tool_calls": ["x"]}], "tool call"),
        ([{"role": "assistant", "tool_calls": 5}], "tool_calls"),
    ],
)
def test_what_no_template_can_be_given_is_refused_with_its_place(messages: Any, reason: str) -> None:
    with pytest.raises(InvalidRequestError, match=reason):
        normalised(messages)


@pytest.mark.parametrize(
    "messages, reason",
    [
        ([{"role": "system", "content": "x"}, user("Hi!")], "System role not supported"),
        ([{"role": "developer", "content": "x"}, user("Hi!")], "System role not supported"),
        ([user("a"), user("b")], "must alternate"),
        ([{"role": "assistant", "content": "a"}, user("b")], "must alternate"),
    ],
)
def test_what_a_template_refuses_is_an_invalid_request_with_its_words(messages: Any, reason: str) -> None:
    with make_llm(tokenizer=Tokenizer(make_hf_tokenizer(STRICT))) as llm:
        with pytest.raises(InvalidRequestError, match=reason) as caught:
            llm.chat(messages)
        assert isinstance(caught.value, ValueError)
        assert is_idle(llm.stats())
        assert llm.chat([user("a")], SamplingParams(max_tokens=2))[0].finished


def test_a_model_without_a_template_says_what_to_give_and_completes_text() -> None:
    with make_llm(tokenizer=Tokenizer(make_hf_tokenizer(None))) as llm:
        with pytest.raises(InvalidRequestError, match="chat_template="):
            llm.chat([user("Hi!")])
        assert llm.chat([user("Hi!")], chat_template=STRICT)[0].prompt == "user: Hi!\n"
        assert llm.generate("Hi!")[0].finished


def test_a_template_given_at_the_start_replaces_the_models_own_and_one_given_at_the_call_both() -> None:
    tokenizer = Tokenizer(make_hf_tokenizer(), chat_template=STRICT)

    assert tokenizer.render_chat([user("Hi!")]) == "user: Hi!\n"
    assert tokenizer.render_chat([user("Hi!")], chat_template="{{ messages[0].content }}") == "Hi!"


def test_templates_get_what_the_caller_has_for_them() -> None:
    tokenizer = Tokenizer(make_hf_tokenizer("{{ mood }}"))

    assert tokenizer.render_chat([user("Hi!")], chat_template_kwargs={"mood": "good"}) == "good"


@pytest.mark.parametrize("prefill", ["According to", "According to "])
def test_the_last_message_can_be_left_open_for_the_model_to_go_on_with(prefill: str) -> None:
    messages = [user("Why?"), {"role": "assistant", "content": prefill}]
    rendered = Tokenizer(make_hf_tokenizer()).render_chat(messages, continue_final_message=True)

    assert rendered == make_hf_tokenizer().apply_chat_template(messages, tokenize=False, continue_final_message=True)
    assert rendered.rstrip().endswith("<|im_start|>assistant\nAccording to")


def test_a_new_turn_and_an_open_one_exclude_each_other() -> None:
    tokenizer = Tokenizer(make_hf_tokenizer())
    messages = [user("Why?"), {"role": "assistant", "content": "Because"}]
    with pytest.raises(InvalidRequestError, match="exclude"):
        tokenizer.render_chat(messages, continue_final_message=True, add_generation_prompt=True)

    assert not tokenizer.render_chat(messages, add_generation_prompt=False).endswith("assistant\n")


def test_a_message_that_ends_in_tool_calls_cannot_be_continued() -> None:
    with pytest.raises(InvalidRequestError, match="ends in tool calls; leave it out"):
        Tokenizer(make_hf_tokenizer()).render_chat([user("Hi!"), with_call({})], continue_final_message=True)


def test_calls_in_the_older_form_are_calls() -> None:
    older = {"role": "assistant", "content": None, "function_call": {"name": "add", "arguments": '{"a": 1}'}}
    assert normalised([older, {"role": "function", "name": "add", "content": "2"}]) == [
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}],
        },
        {"role": "tool", "name": "add", "content": "2"},
    ]
    with pytest.raises(InvalidRequestError, match="no JSON"):
        normalised([older | {"function_call": {"name": "add", "arguments": "a=1"}}])


def test_threads_share_one_tokenizer() -> None:
    tokenizer = Tokenizer(make_hf_tokenizer())
    texts = [f"{number} " * 200 for number in range(8)]

    def encode(text: str) -> list[list[int]]:
        return [tokenizer.encode(text, add_special_tokens=bool(number % 2)) for number in range(20)]

    assert in_threads(*(lambda text=text: encode(text) for text in texts)) == [encode(text) for text in texts]


def test_a_word_is_spelled_as_at_the_start_of_a_text_and_as_after_a_space() -> None:
    tokenizer = Tokenizer(make_hf_tokenizer())

    assert tokenizer.encode_word("ab") == (tuple(b"ab"), tuple(b" ab"))
    assert tokenizer.encode_word(" ab") == (tuple(b" ab"),)
