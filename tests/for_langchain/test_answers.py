"""`ChatPaged`: messages in, one and the same answer out, whatever the way to ask."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage, ToolMessage, trim_messages

from helpers_langchain import (
    answers,
    ignores_beta_warnings,
    joined,
    make_llm,
    num_finished,
    within_deadline,
)
from langchain_paged import ChatPaged
from paged_backend import LLM


@ignores_beta_warnings
@pytest.mark.parametrize("settings", [{}, {"max_tokens": 6}, {"stop": ["sai"]}, {"stop": "lo", "max_tokens": 50}])
def test_every_way_to_ask_gives_the_same_text_usage_and_ending(llm: LLM, settings: dict[str, Any]) -> None:
    found = answers(ChatPaged(llm=llm, **settings))
    first = found["invoke"]
    assert {way: answer.text for way, answer in found.items()} == dict.fromkeys(found, first.text)
    assert {way: answer.usage_metadata for way, answer in found.items()} == dict.fromkeys(found, first.usage_metadata)
    for key in ("finish_reason", "stop_reason", "model_name", "model_provider"):
        values = {way: answer.response_metadata.get(key) for way, answer in found.items()}
        assert values == dict.fromkeys(found, first.response_metadata.get(key)), key


@ignores_beta_warnings
def test_output_version_v1_gives_blocks_with_the_same_text(llm: LLM) -> None:
    found = answers(ChatPaged(llm=llm, output_version="v1"))
    assert {way: answer.text for way, answer in found.items()} == dict.fromkeys(found, "You said: Hello.")
    assert {block["type"] for answer in found.values() for block in answer.content} == {"text"}


def test_an_answer_says_how_it_ended_and_what_it_took(llm: LLM) -> None:
    answer = ChatPaged(llm=llm).invoke("Hello.")
    prompt = "<|im_start|>user\nHello.<|im_end|>\n<|im_start|>assistant\n"
    num_input_tokens = len(llm.tokenizer.encode(prompt, add_special_tokens=False))
    assert answer.content == "You said: Hello."
    assert answer.response_metadata == {"finish_reason": "stop", "model_name": "echo", "model_provider": "paged"}
    assert answer.usage_metadata == {
        "input_tokens": num_input_tokens,
        "output_tokens": len("You said: Hello.") + 1,
        "total_tokens": num_input_tokens + len("You said: Hello.") + 1,
        "input_token_details": {"cache_read": 0},
    }


def test_a_stop_text_is_named_and_cut_from_the_answer(llm: LLM) -> None:
    answer = ChatPaged(llm=llm, stop=["said", "zzz"]).invoke("Hello.")
    assert (answer.content, answer.response_metadata["stop_reason"]) == ("You ", "said")


def test_only_the_last_chunk_says_how_the_answer_ended_and_what_it_took(slow_llm: LLM) -> None:
    *others, last = ChatPaged(llm=slow_llm, max_tokens=9).stream("Hello.")
    assert others
    assert [(chunk.response_metadata, chunk.usage_metadata, chunk.chunk_position) for chunk in others] == [
        ({}, None, None)
    ] * len(others)
    assert last.response_metadata["finish_reason"] == "length"
    assert last.usage_metadata is not None
    assert (last.usage_metadata["output_tokens"], last.chunk_position) == (9, "last")


def test_usage_in_a_stream_can_be_left_out(llm: LLM) -> None:
    assert joined(ChatPaged(llm=llm, stream_usage=False).stream("Hello.")).usage_metadata is None
    assert joined(ChatPaged(llm=llm).stream("Hello.", stream_usage=False)).usage_metadata is None


def test_cached_prompt_tokens_are_counted() -> None:
    with make_llm() as llm:
        model = ChatPaged(llm=llm)
        question = "A question that fills several blocks of sixteen tokens, since each byte is one."
        messages = [model.invoke(question), model.invoke(question), joined(model.stream(question))]
    cached = [message.usage_metadata["input_token_details"]["cache_read"] for message in messages]
    assert cached[0] == 0
    assert cached[1] == cached[2] >= 64


def test_text_that_is_split_within_a_character_streams_whole(llm: LLM) -> None:
    chunks = [chunk.content for chunk in ChatPaged(llm=llm).stream("smile 🙂 ünd")]
    assert "".join(chunks) == "You said: smile 🙂 ünd"
    assert "\ufffd" not in "".join(chunks)


@pytest.mark.parametrize("num_top", [None, 0, 3])
def test_logprobs_come_in_openais_form_streamed_or_not(llm: LLM, num_top: int | None) -> None:
    model = ChatPaged(llm=llm, logprobs=True, top_logprobs=num_top, max_tokens=4)
    invoked = model.invoke("Hello.").response_metadata["logprobs"]
    assert joined(model.stream("Hello.")).response_metadata["logprobs"] == invoked
    assert [token["token"] for token in invoked["content"]] == list("You ")
    assert [token["bytes"] for token in invoked["content"]] == [[byte] for byte in b"You "]
    assert [len(token["top_logprobs"]) for token in invoked["content"]] == [num_top or 0] * 4


def test_top_logprobs_alone_asks_for_logprobs(llm: LLM) -> None:
    assert "logprobs" in ChatPaged(llm=llm, top_logprobs=2).invoke("Hello.").response_metadata
    assert "logprobs" not in ChatPaged(llm=llm, top_logprobs=2, logprobs=False).invoke("Hello.").response_metadata


def test_n_answers_come_from_generate_and_cannot_be_streamed(llm: LLM) -> None:
    model = ChatPaged(llm=llm, n=3)
    (generations,) = model.generate([[HumanMessage("Hello.")]]).generations
    assert [generation.text for generation in generations] == ["You said: Hello."] * 3
    assert model.invoke("Hello.").content == "You said: Hello."
    with pytest.raises(ValueError, match="n=3"):
        list(model.stream("Hello."))


# Messages.


def test_a_final_ai_message_is_continued(llm: LLM) -> None:
    messages = [HumanMessage("Who?"), AIMessage("According to")]
    model = ChatPaged(llm=llm)
    continued = "<|im_start|>user\nWho?<|im_end|>\n<|im_start|>assistant\nAccording to"
    closed = f"{continued}<|im_end|>\n<|im_start|>assistant\n"
    num_tokens = {text: len(llm.tokenizer.encode(text, add_special_tokens=False)) for text in (continued, closed)}
    assert model.get_num_tokens_from_messages(messages) == num_tokens[continued]
    assert model.invoke(messages).usage_metadata["input_tokens"] == num_tokens[continued]
    answer = model.invoke(messages, continue_final_message=False)
    assert answer.usage_metadata["input_tokens"] == num_tokens[closed]


@pytest.mark.parametrize(
    "message",
    [
        HumanMessage([{"type": "text", "text": "Hel"}, "lo", {"type": "text", "text": "."}]),
        HumanMessage(content_blocks=[{"type": "text", "text": "Hello."}]),
    ],
)
def test_text_parts_are_joined(llm: LLM, message: BaseMessage) -> None:
    assert ChatPaged(llm=llm).invoke([message]).content == "You said: Hello."


def test_reasoning_in_the_history_is_left_out(llm: LLM) -> None:
    plain = AIMessage("Blue.")
    reasoned = AIMessage([{"type": "reasoning", "reasoning": "A colour..."}, {"type": "text", "text": "Blue."}])
    model = ChatPaged(llm=llm)
    counts = [
        model.get_num_tokens_from_messages([HumanMessage("Hi."), answer, HumanMessage("Why?")])
        for answer in (plain, reasoned)
    ]
    assert counts[0] == counts[1]


def test_a_tool_history_reaches_the_template_with_arguments_as_a_mapping(llm: LLM) -> None:
    template = (
        "{% for m in messages %}{{ m.role }}:{{ m.content }}"
        "{% for call in m.tool_calls or [] %}{% for key, value in call.function.arguments.items() %}"
        "{{ key }}={{ value }};{% endfor %}{% endfor %}|{% endfor %}user\nHello.<|im_end|>"
    )
    call = {"name": "add", "args": {"a": 1, "b": "zwei"}, "id": "1", "type": "tool_call"}
    messages = [
        SystemMessage("Sys"),
        HumanMessage("Add."),
        AIMessage("", tool_calls=[call]),
        ToolMessage([{"type": "text", "text": "3"}], tool_call_id="1"),
    ]
    model = ChatPaged(llm=llm, chat_template=template)
    rendered = "system:Sys|user:Add.|assistant:a=1;b=zwei;|tool:3|user\nHello.<|im_end|>"
    expected = len(llm.tokenizer.encode(rendered, add_special_tokens=False))
    assert model.get_num_tokens_from_messages(messages) == expected
    assert model.invoke(messages).content == "You said: Hello."


@pytest.mark.parametrize(
    "question",
    [
        "lone surrogate \ud83d",
        [HumanMessage([{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}])],
        [HumanMessage([{"type": "audio", "base64": "AAAA", "mime_type": "audio/wav"}])],
        [],
    ],
)
def test_what_no_text_model_can_read_is_a_value_error_on_every_path(llm: LLM, question: Any) -> None:
    model = ChatPaged(llm=llm)
    with pytest.raises(ValueError, match=r"surrogate|reads text only|at least one message"):
        model.invoke(question)
    with pytest.raises(ValueError, match=r"surrogate|reads text only|at least one message"):
        list(model.stream(question))
    with pytest.raises(ValueError, match=r"surrogate|reads text only|at least one message"):
        asyncio.run(within_deadline(model.ainvoke(question)))
    assert num_finished(llm) == 0


def test_a_template_that_refuses_the_messages_is_a_value_error(llm: LLM) -> None:
    model = ChatPaged(llm=llm, chat_template="{{ raise_exception('no system messages') }}")
    with pytest.raises(ValueError, match="no system messages"):
        model.invoke([SystemMessage("Be kind."), HumanMessage("Hello.")])


# Tokens.


def test_token_counts_are_those_of_the_model(llm: LLM) -> None:
    model = ChatPaged(llm=llm)
    assert model.get_token_ids("Hé") == list("Hé".encode())
    assert model.get_num_tokens("Hé") == 3
    messages = [SystemMessage("Be kind."), HumanMessage("Hello."), AIMessage("Hi."), HumanMessage("Why?")]
    usage = model.invoke(messages).usage_metadata
    assert usage is not None
    assert model.get_num_tokens_from_messages(messages) == usage["input_tokens"]


def test_messages_can_be_trimmed_by_the_models_own_count(llm: LLM) -> None:
    model = ChatPaged(llm=llm)
    messages = [HumanMessage("x" * 100), HumanMessage("y" * 10), HumanMessage("z" * 10)]
    kept = trim_messages(messages, max_tokens=80, token_counter=model, strategy="last")
    assert kept == messages[1:]
