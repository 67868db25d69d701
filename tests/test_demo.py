"""The demo model, SmolLM2-135M-Instruct: a real model gives the tokens of `generate`, and text people can read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from paged_backend import LLM, EngineConfig, SamplingParams
from paged_backend.model.demo import demo_folder

QUESTIONS = (
    "What is the capital of France?",
    "Write one sentence about the sea.",
    "Count from one to ten.",
    "Explain in a few words why the sky is blue, and why it is red in the evening, when the sun is low.",
)
CONVERSATIONS = [[{"role": "user", "content": question}] for question in QUESTIONS]
NUM_NEW = 24
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_NEW, min_tokens=NUM_NEW)


@pytest.fixture(scope="module")
def right() -> list[list[int]]:
    """What transformers generates in float32."""
    folder = demo_folder(EngineConfig().cache_folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return [_generated(model, tokenizer, conversation) for conversation in CONVERSATIONS]


@torch.inference_mode()
def _generated(model: Any, tokenizer: Any, conversation: list[dict[str, str]]) -> list[int]:
    inputs = tokenizer.apply_chat_template(conversation, add_generation_prompt=True, return_tensors="pt")
    output = model.generate(**inputs, max_new_tokens=NUM_NEW, min_new_tokens=NUM_NEW, do_sample=False)
    return output[0, inputs["input_ids"].shape[1] :].tolist()


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, id="roomy"),
        pytest.param({"max_num_batched_tokens": 5}, id="chunked", marks=pytest.mark.slow),
        pytest.param({"num_gpu_blocks_override": 12}, id="preempted", marks=pytest.mark.slow),
    ],
)
def test_greedy_answers_in_float32_are_those_of_generate(right: list[list[int]], settings: dict[str, Any]) -> None:
    with LLM("demo", dtype="float32", **{"kv_cache_memory": "256MiB"} | settings) as llm:
        assert [output.outputs[0].token_ids for output in llm.chat(CONVERSATIONS, GREEDY)] == right
        assert llm.chat(CONVERSATIONS[0], GREEDY)[0].outputs[0].token_ids == right[0]
        stats = llm.stats()
    assert (stats.num_preemptions > 0) == ("num_gpu_blocks_override" in settings)
    assert stats.num_free_blocks == stats.num_blocks


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("demo", kv_cache_memory="256MiB") as llm:
        yield llm


def test_a_chat_ends_where_the_model_ends_it(llm: LLM) -> None:
    (output,) = llm.chat([{"role": "user", "content": "Say hello."}], llm.get_default_chat_params(temperature=0))
    (answer,) = output.outputs
    assert answer.finish_reason == "stop" and answer.token_ids[-1] == 2
    assert answer.text and "<|im_end|>" not in answer.text


def test_an_answer_may_be_begun_by_the_user(llm: LLM) -> None:
    messages = [*CONVERSATIONS[0], {"role": "assistant", "content": "The capital of France is"}]
    (output,) = llm.chat(messages, GREEDY.replace(max_tokens=4, min_tokens=0), continue_final_message=True)
    assert output.prompt is not None and output.prompt.endswith("The capital of France is")
    assert output.outputs[0].text.startswith(" Paris")


def test_conversations_with_one_system_prompt_compute_it_once(llm: LLM) -> None:
    system = {"role": "system", "content": "You answer politely and in one short sentence. " * 12}
    conversations = [[system, *conversation] for conversation in CONVERSATIONS]
    outputs = llm.chat(conversations, GREEDY)
    first, *others = (output.num_cached_tokens for output in outputs)
    assert first == 0 and min(others) >= 112
