"""Adapters by the frameworks' own calls."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from langchain_core.caches import InMemoryCache
from llama_index.core.base.llms.types import ChatMessage

import transformers_paged
from helpers_langchain import num_finished
from helpers_lora import greedy, merged, save_adapter
from helpers_models import make_model, make_tokenizer
from langchain_paged import ChatPaged, PagedEmbeddings, PagedLLM
from llama_index.embeddings.paged import PagedEmbedding
from llama_index.llms.paged import Paged
from paged_backend import LLM, LoRARequest, SamplingParams

CHAT = [{"role": "user", "content": "hello"}]
OPTIONS: dict[str, Any] = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}
MODEL = make_model("llama")


@pytest.fixture(scope="module")
def request_(tmp_path_factory: pytest.TempPathFactory) -> LoRARequest:
    return LoRARequest("one", save_adapter(tmp_path_factory.mktemp("adapter"), MODEL))


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(MODEL, make_tokenizer(), kv_cache_memory="4MiB", enable_lora=True) as llm:
        yield llm


def text_of(llm: LLM, adapter: LoRARequest | None, prompt: Any = CHAT) -> str:
    call = llm.generate if isinstance(prompt, str) else llm.chat
    (output,) = call(prompt, SamplingParams(**OPTIONS), lora_request=adapter)
    return output.outputs[0].text


def _text(answer: Any) -> str:
    return answer if isinstance(answer, str) else answer.content


def test_langchain_takes_an_adapter_for_one_call_or_for_all(llm: LLM, request_: LoRARequest) -> None:
    plain, right = text_of(llm, None), text_of(llm, request_)
    chat = ChatPaged(llm=llm, **OPTIONS)
    assert chat.invoke("hello").content == plain != right
    assert chat.invoke("hello", lora_request=request_).content == right
    assert ChatPaged(llm=llm, lora_request=request_, **OPTIONS).invoke("hello").content == right
    assert PagedLLM(llm=llm, lora_request=request_, **OPTIONS).invoke("ab") == text_of(llm, request_, "ab")
    with_adapter = PagedEmbeddings(llm=llm, lora_request=request_).embed_query("ab")
    assert with_adapter != PagedEmbeddings(llm=llm).embed_query("ab")


@pytest.mark.parametrize("adapter", [ChatPaged, PagedLLM])
def test_an_llm_cache_answers_only_for_the_same_adapter(llm: LLM, request_: LoRARequest, adapter: Any) -> None:
    cache = InMemoryCache()
    plain, other = (adapter(llm=llm, cache=cache, **OPTIONS | more) for more in ({}, {"lora_request": request_}))
    plain.invoke("ab")
    before = num_finished(llm)
    answer = other.invoke("ab")
    assert num_finished(llm) == before + 1
    answers = [other.invoke("ab"), plain.invoke("ab", lora_request=request_), plain.invoke("ab")]
    assert [_text(one) == _text(answer) for one in answers] == [True, True, False]
    assert num_finished(llm) == before + 1


def test_llama_index_takes_an_adapter_for_one_call_or_for_all(llm: LLM, request_: LoRARequest) -> None:
    plain, right = text_of(llm, None), text_of(llm, request_)
    model, chat = Paged(llm=llm, **OPTIONS), [ChatMessage(role="user", content="hello")]
    assert model.chat(chat).message.content == plain != right
    assert model.chat(chat, lora_request=request_).message.content == right
    assert Paged(llm=llm, lora_request=request_, **OPTIONS).chat(chat).message.content == right
    with_adapter = PagedEmbedding(llm=llm, lora_request=request_).get_text_embedding("ab")
    assert with_adapter != PagedEmbedding(llm=llm).get_text_embedding("ab")


def test_generate_takes_an_adapter(request_: LoRARequest) -> None:
    model, prompt = make_model("llama"), list(range(40, 60))
    right = greedy(merged(MODEL, Path(request_.lora_path)), prompt, 8)
    with transformers_paged.enable(model, enable_lora=True, kv_cache_memory="4MiB", on_unsupported="error"):
        settings: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
        output = model.generate(torch.tensor([prompt]), lora_request=request_, **settings)
        beams = model.generate(torch.tensor([prompt]), lora_request=request_, num_beams=2, **settings)
    assert output[0, len(prompt) :].tolist() == right
    wanted = merged(MODEL, Path(request_.lora_path)).generate(torch.tensor([prompt]), num_beams=2, **settings)
    assert beams.tolist() == wanted.tolist()
