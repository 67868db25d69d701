"""What the model gets to see."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llama_index.core import PromptTemplate
from llama_index.core.base.llms.types import (
    CacheControl,
    CachePoint,
    ChatMessage,
    ImageBlock,
    TextBlock,
    ThinkingBlock,
    ToolCallBlock,
)

from helpers_llama_index import (
    Recorder,
    in_loop,
    make_paged,
    rendered,
)
from helpers_models import CHAT_TEMPLATE
from paged_backend import LLM, InvalidRequestError

# What is asked.


def test_formatted_text_goes_to_the_model_as_it_is(llm: LLM, runner: Recorder) -> None:
    make_paged(llm, system_prompt="Be kind.").complete("Once upon", formatted=True)
    assert runner.prompts == ["Once upon"]


def test_a_completion_is_asked_as_a_users_message_after_the_system_prompt(llm: LLM, runner: Recorder) -> None:
    make_paged(llm, system_prompt="Be kind.").complete("Hi.")
    assert runner.prompts == [rendered(("system", "Be kind."), ("user", "Hi."))]


def test_completion_to_prompt_and_messages_to_prompt_replace_the_template(llm: LLM, runner: Recorder) -> None:
    model = make_paged(
        llm,
        completion_to_prompt=lambda prompt: f"Q: {prompt} A:",
        messages_to_prompt=lambda messages: "|".join(message.content or "" for message in messages),
    )
    model.complete("Hi.")
    model.chat([ChatMessage("One."), ChatMessage("Two.")])
    list(model.stream_complete("Hi."))
    in_loop(model.achat([ChatMessage("One.")]))
    assert runner.prompts == ["Q: Hi. A:", "One.|Two.", "Q: Hi. A:", "One."]


def test_a_model_without_chats_completes_what_it_is_given(llm: LLM, runner: Recorder) -> None:
    model = make_paged(llm, is_chat_model=False, system_prompt="Be kind.")
    model.complete("Once upon")
    model.predict(PromptTemplate("Once {x}"), x="upon")
    assert runner.prompts == ["Be kind.\n\nOnce upon"] * 2


def test_the_query_wrapper_of_older_code_still_counts(llm: LLM, runner: Recorder) -> None:
    make_paged(llm, query_wrapper_prompt=PromptTemplate("Q: {query_str}")).complete("Hi.")
    assert runner.prompts == [rendered(("user", "Q: Hi."))]


def test_predict_adds_the_system_prompt_once_and_parses_the_output(llm: LLM, runner: Recorder) -> None:
    class Shouting:
        def parse(self, output: str) -> str:
            return output.upper()

        def format(self, query: str) -> str:
            return f"{query} Loud!"

        def format_messages(self, messages: list[ChatMessage]) -> list[ChatMessage]:
            return [ChatMessage(role=message.role, content=self.format(message.content or "")) for message in messages]

    model = make_paged(llm, "Red", system_prompt="Be kind.")
    assert model.predict(PromptTemplate("Name a {x}."), x="colour") == "Red"
    model.output_parser = Shouting()  # type: ignore[assignment]
    assert model.predict(PromptTemplate("Name a {x}."), x="colour") == "RED"
    assert in_loop(model.apredict(PromptTemplate("Name a {x}."), x="colour")) == "RED"
    plain = rendered(("system", "Be kind."), ("user", "Name a colour."))
    loud = rendered(("system", "Be kind."), ("user", "Name a colour. Loud!"))
    assert runner.prompts == [plain, loud, loud]


def test_a_final_message_of_the_assistant_is_continued(llm: LLM, runner: Recorder) -> None:
    messages = [ChatMessage("Who?"), ChatMessage(role="assistant", content="According to")]
    make_paged(llm).chat(messages)
    make_paged(llm).chat(messages, continue_final_message=False)
    continued = "<|im_start|>user\nWho?<|im_end|>\n<|im_start|>assistant\nAccording to"
    assert runner.prompts == [continued, f"{continued}<|im_end|>\n<|im_start|>assistant\n"]


def test_a_template_of_the_callers_and_its_variables_are_used(llm: LLM, runner: Recorder) -> None:
    model = make_paged(llm, chat_template="{{ mood }}: {{ messages[0].content }}", chat_template_kwargs={"mood": "sad"})
    model.chat([ChatMessage("Hi.")])
    model.chat([ChatMessage("Hi.")], chat_template_kwargs={"mood": "gay"})
    model.complete("Hi.", chat_template=CHAT_TEMPLATE)
    assert runner.prompts == ["sad: Hi.", "gay: Hi.", rendered(("user", "Hi."))]


@pytest.mark.parametrize(
    ("role", "expected"), [("chatbot", "assistant"), ("model", "assistant"), ("developer", "system")]
)
def test_roles_that_templates_do_not_know_are_translated(llm: LLM, runner: Recorder, role: str, expected: str) -> None:
    make_paged(llm).chat([ChatMessage(role=role, content="Hi."), ChatMessage("Why?")])
    assert runner.prompts == [rendered((expected, "Hi."), ("user", "Why?"))]


def test_blocks_of_text_are_joined_and_past_reasoning_is_left_out(llm: LLM, runner: Recorder) -> None:
    cache_point = CachePoint(cache_control=CacheControl(type="ephemeral"))
    answer = ChatMessage(role="assistant", blocks=[ThinkingBlock(content="Hm."), TextBlock(text="Yes."), cache_point])
    question = ChatMessage(blocks=[TextBlock(text="One."), TextBlock(text="Two.")])
    make_paged(llm).chat([question, answer, ChatMessage("Why?")])
    assert question.content == "One.\nTwo."
    assert runner.prompts == [rendered(("user", "One.\nTwo."), ("assistant", "Yes."), ("user", "Why?"))]


@pytest.mark.parametrize("messages", [[], [ChatMessage(blocks=[TextBlock(text="See"), ImageBlock(image=b"png")])]])
def test_what_no_text_model_can_read_is_refused(llm: LLM, messages: list[ChatMessage]) -> None:
    with pytest.raises(InvalidRequestError, match=r"reads text only|at least one message"):
        make_paged(llm).chat(messages)


TOOL_TEMPLATE = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }}{{ m.tool_call_id }}"
    "{% for call in m.tool_calls or [] %}{{ call.function.name }}("
    "{% for key, value in call.function.arguments.items() %}{{ key }}={{ value }};{% endfor %})"
    "{% endfor %}|{% endfor %}"
)


def legacy_call(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"id": "1", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}


@pytest.mark.parametrize(
    "call",
    [
        ChatMessage(
            role="assistant",
            blocks=[ToolCallBlock(tool_call_id="1", tool_name="add", tool_kwargs={"a": 1, "b": "zwei"})],
        ),
        ChatMessage(
            role="assistant",
            blocks=[ToolCallBlock(tool_call_id="1", tool_name="add", tool_kwargs='{"a": 1, "b": "zwei"}')],
        ),
        ChatMessage(role="assistant", additional_kwargs={"tool_calls": [legacy_call("add", {"a": 1, "b": "zwei"})]}),
    ],
)
def test_a_tool_history_reaches_the_template(llm: LLM, runner: Recorder, call: ChatMessage) -> None:
    result = ChatMessage(role="tool", content="3", additional_kwargs={"tool_call_id": "1"})
    make_paged(llm, chat_template=TOOL_TEMPLATE).chat([ChatMessage("Add."), call, result])
    assert runner.prompts == ["user:Add.|assistant:add(a=1;b=zwei;)|tool:31|"]
