"""Inputs and uses that once went wrong; each test states what is right."""

from __future__ import annotations

import asyncio
import gc
import logging
import math
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from langchain_core.caches import InMemoryCache
from transformers import AutoModelForCausalLM

from helpers import (
    WAIT_SECONDS,
    FakeRunner,
    byte_fallback_tokenizer,
    in_threads,
    make_engine,
    make_llm,
    make_request,
    text_decoder,
    wait_until,
)
from helpers_models import MAX_POSITIONS, make_model, make_tokenizer, save_model
from langchain_paged import ChatPaged
from paged_backend import (
    LLM,
    ConfigError,
    EngineConfig,
    EngineError,
    InvalidRequestError,
    RequestOutput,
    SamplingParams,
)
from paged_backend.chat.tokenizer import Tokenizer

HUGE = 10**400  # JSON may hold it, a float may not


@pytest.mark.parametrize(
    "field, value",
    [
        ("temperature", HUGE),
        ("top_p", HUGE),
        ("min_p", HUGE),
        ("repetition_penalty", HUGE),
        ("presence_penalty", -HUGE),
        ("frequency_penalty", HUGE),
        ("logit_bias", {5: HUGE}),
        ("logit_bias", {math.inf: 1}),
        ("logit_bias", {1.7: 1}),
        ("logit_bias", {True: 1}),
    ],
)
def test_a_number_no_float_or_id_can_be_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError, match=field):
        SamplingParams(**{field: value})


def test_a_timeout_no_float_can_be_is_refused_by_name() -> None:
    with make_llm() as llm, pytest.raises(InvalidRequestError, match="timeout"):
        llm.generate([[1]], SamplingParams(max_tokens=1), timeout=HUGE)


@pytest.mark.parametrize("field, value", [("gpu_memory_utilization", HUGE), ("kv_cache_memory", "9" * 400)])
def test_an_engine_setting_no_float_can_be_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=field):
        EngineConfig(**{field: value})


def test_an_llm_cache_tells_two_loaded_models_apart() -> None:
    cache = InMemoryCache()
    with LLM(make_model(seed=0), make_tokenizer(), kv_cache_memory="4MiB") as one:
        ChatPaged(llm=one, temperature=0, max_tokens=5, cache=cache).invoke("Hi")
    with LLM(make_model(seed=1), make_tokenizer(), kv_cache_memory="4MiB") as other:
        right = ChatPaged(llm=other, temperature=0, max_tokens=5).invoke("Hi").content
        assert ChatPaged(llm=other, temperature=0, max_tokens=5, cache=cache).invoke("Hi").content == right


def test_generate_and_stream_write_a_cut_character_alike() -> None:
    engine = make_engine(text_decoder(byte_fallback_tokenizer(" a")))
    forced = list("🙂🙂".encode())[:7]
    whole, streamed = (
        engine.run(make_request(extra_args={"forced": forced}, max_tokens=7, final_only=final_only))[0].text
        for final_only in (True, False)
    )
    assert whole == streamed


def test_a_text_is_tokenised_as_it_is_by_a_tokenizer_that_adds_nothing() -> None:
    hf = make_tokenizer()
    assert Tokenizer(hf).encode("<|bos|><|bos|>a") == hf("<|bos|><|bos|>a")["input_ids"]


def test_a_failed_call_changes_no_later_result() -> None:
    def answer(*, after_failure: bool) -> list[int]:
        with make_llm(seed=5) as llm:
            if after_failure:
                with pytest.raises(InvalidRequestError):
                    llm.generate([[1], [10**9]])
            return llm.generate([[1]])[0].outputs[0].token_ids

    assert answer(after_failure=True) == answer(after_failure=False)


@pytest.mark.parametrize("num_readers", [2, 3])
def test_all_readers_of_one_handle_get_the_whole_result(num_readers: int) -> None:
    with make_llm() as llm:
        handle = llm.submit([1, 2, 3], SamplingParams(max_tokens=50))
        results = in_threads(*[lambda: handle.result(timeout=WAIT_SECONDS)] * num_readers)
    assert len({tuple(result.outputs[0].token_ids) for result in results}) == 1

    async def both() -> list[RequestOutput]:
        with make_llm() as llm:
            handle = llm.submit([1, 2, 3], SamplingParams(max_tokens=50))
            return await asyncio.wait_for(asyncio.gather(handle.aresult(), handle.aresult()), WAIT_SECONDS)

    assert len({tuple(result.outputs[0].token_ids) for result in asyncio.run(both())}) == 1


def test_a_prompts_own_salt_counts_and_its_unknown_keys_are_refused() -> None:
    prompt = list(range(40))
    with make_llm() as llm:
        cached = [
            llm.generate({"prompt_token_ids": prompt, "cache_salt": salt}, **options)[0].num_cached_tokens
            for salt, options in (("a", {}), ("b", {}), ("a", {"cache_salt": "b"}), (None, {"cache_salt": "b"}))
        ]
        assert [number > 0 for number in cached] == [False, False, True, True]
        with pytest.raises(InvalidRequestError, match="cache_salt"):
            llm.generate({"prompt_token_ids": prompt, "cache_slat": "a"})
        with pytest.raises(InvalidRequestError, match="priority"):
            llm.generate(prompt, priorty=1)
        with pytest.raises(InvalidRequestError, match="must be a LoRARequest"):
            llm.generate(prompt, lora_request="x")
        assert llm.generate(prompt, lora_request=None)


def test_ids_from_numpy_are_ids() -> None:
    with make_llm() as llm:
        right = llm.generate([1, 2, 3])[0].prompt_token_ids
        for ids in (np.array([1, 2, 3]), list(np.array([1, 2, 3])), [np.array([1, 2, 3])]):
            outputs = llm.generate(ids)
            assert [output.prompt_token_ids for output in outputs] == [right]


def test_a_batch_mate_cannot_choose_the_frequencies_of_longrope(tmp_path: Path) -> None:
    factors = {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 64, **factors}
    folder = save_model(tmp_path, config={"rope_parameters": rope})
    long, short = list(range(3, 90)), list(range(90, 110))
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    with LLM(folder, kv_cache_memory="4MiB") as llm:
        assert llm.max_model_len == 64
    with LLM(folder, kv_cache_memory="4MiB", max_model_len=128) as llm:
        alone = [llm.generate([prompt], params)[0].outputs[0].token_ids for prompt in (long, short)]
        together = [output.outputs[0].token_ids for output in llm.generate([long, short], params)]
    assert together == alone
    model = AutoModelForCausalLM.from_pretrained(folder)
    right = model.generate(torch.tensor([long]), max_new_tokens=8, do_sample=False, eos_token_id=None)
    assert together[0] == right[0, len(long) :].tolist()
    with pytest.raises(ConfigError, match=str(MAX_POSITIONS)):
        LLM(folder, kv_cache_memory="4MiB", max_model_len=MAX_POSITIONS + 1)


@pytest.mark.parametrize("settings", [{"max_model_len": 2}, {"block_size": 1, "num_gpu_blocks_override": 2}])
def test_the_smallest_engines_work(settings: dict[str, Any]) -> None:
    with LLM(make_model(), **{"kv_cache_memory": "1MiB"} | settings) as llm:
        assert len(llm.generate([5], SamplingParams(max_tokens=9))[0].outputs[0].token_ids) == 1


def test_an_error_that_is_kept_does_not_keep_the_engine(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "paged_backend")  # pytest would keep the traceback of a record
    runner = FakeRunner()
    runner.on_step = fail
    gone = weakref.ref(runner)
    llm = make_llm(runner=runner)
    with pytest.raises(EngineError) as caught:
        llm.generate([1, 2, 3])
    llm.close()
    del llm, runner

    def is_gone() -> bool:
        gc.collect()
        return gone() is None

    wait_until(is_gone)
    assert isinstance(caught.value.__cause__, ValueError)


def fail(output: object) -> None:
    raise ValueError("planted")


def test_waste_counts_a_shared_block_once() -> None:
    with make_llm() as llm:
        llm.generate(list(range(5)), SamplingParams(n=50, max_tokens=2))
        assert 0 < llm.stats().kv_waste_ratio < 1
