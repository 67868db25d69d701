"""`LLM` on real transformers models: what its users were promised, beyond greedy tokens (see test_greedy.py)."""

from __future__ import annotations

import gc
import json
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers import wait_until
from helpers_models import BOS, EOS, IM_END, VOCAB_SIZE, make_model, make_tokenizer, save_model
from paged_backend import (
    LLM,
    ConfigError,
    EngineDeadError,
    InvalidRequestError,
    RequestOutput,
    RequestOutputKind,
    SamplingParams,
)

PROMPT = list(b"Paris Paris Paris Paris")
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def model() -> Any:
    return make_model("llama")


@pytest.fixture(scope="module")
def llm(model: Any) -> Iterator[LLM]:
    with LLM(model, make_tokenizer(), kv_cache_memory="16MiB", max_logprobs=-1, max_num_batched_tokens=40) as llm:
        yield llm


def solo(llm: LLM, prompt: Any, params: SamplingParams) -> RequestOutput:
    (output,) = llm.generate(prompt, params)
    return output


@torch.inference_mode()
def log_probabilities(model: Any, token_ids: list[int]) -> torch.Tensor:
    """Row i: of what follows token i."""
    return model(torch.tensor([token_ids])).logits[0].log_softmax(-1)


# --- log-probabilities ---


@pytest.mark.parametrize("length", [1, 16, 17, 32, 33, 70])
def test_prompt_logprobs_are_the_models_whatever_is_cached_or_chunked(llm: LLM, model: Any, length: int) -> None:
    prompt = (list(range(256)) * 2)[length : 2 * length]
    right = log_probabilities(model, prompt)
    params = SamplingParams(max_tokens=1, prompt_logprobs=1)
    for _ in range(2):
        entries = solo(llm, prompt, params).prompt_logprobs
        assert entries is not None and len(entries) == length and entries[0] is None
        for position, entry in enumerate(entries[1:], start=1):
            assert entry is not None
            expected = right[position - 1]
            assert entry[prompt[position]].logprob == pytest.approx(float(expected[prompt[position]]), abs=1e-3)
            best = int(expected.argmax())
            assert entry[best].rank == 1 and entry[best].logprob == pytest.approx(float(expected[best]), abs=1e-3)


def test_logprobs_are_taken_before_penalties_and_temperature(llm: LLM, model: Any) -> None:
    params = SamplingParams(max_tokens=8, logprobs=3, temperature=0.7, seed=3, repetition_penalty=1.8, ignore_eos=True)
    (sample,) = solo(llm, PROMPT, params).outputs
    right = log_probabilities(model, PROMPT + sample.token_ids)[len(PROMPT) - 1 :]
    assert sample.logprobs is not None and len(sample.logprobs) == len(sample.token_ids) == 8
    for entry, token_id, expected in zip(sample.logprobs, sample.token_ids, right, strict=False):
        assert next(iter(entry)) == token_id
        assert entry[token_id].logprob == pytest.approx(float(expected[token_id]), abs=1e-3)
        assert {int(i) for i in expected.topk(3).indices} <= set(entry)
    assert sample.cumulative_logprob == pytest.approx(
        sum(e[i].logprob for e, i in zip(sample.logprobs, sample.token_ids, strict=True))
    )


def test_max_tokens_0_scores_the_prompt(llm: LLM) -> None:
    output = solo(llm, PROMPT, SamplingParams(max_tokens=0, prompt_logprobs=0))
    assert output.outputs[0].token_ids == [] and output.outputs[0].finish_reason == "length"
    assert output.prompt_logprobs is not None and len(output.prompt_logprobs) == len(PROMPT)


# --- sampling ---


@pytest.mark.parametrize("settings", [{}, {"max_num_batched_tokens": 7}])
def test_the_repetition_penalty_is_that_of_generate(model: Any, settings: dict[str, Any]) -> None:
    right = model.generate(
        torch.tensor([PROMPT]),
        attention_mask=torch.ones(1, len(PROMPT), dtype=torch.long),
        max_new_tokens=12,
        do_sample=False,
        repetition_penalty=1.5,
        eos_token_id=None,
    )[0, len(PROMPT) :].tolist()
    with LLM(model, kv_cache_memory="4MiB", **settings) as llm:
        for _ in range(2):  # the second time with a cached prefix
            assert solo(llm, PROMPT, GREEDY.replace(repetition_penalty=1.5)).outputs[0].token_ids == right


def test_each_row_of_a_batch_is_sampled_by_its_own_settings(llm: LLM) -> None:
    params = [
        GREEDY,
        GREEDY.replace(temperature=1.0, seed=1, max_tokens=5),
        GREEDY.replace(temperature=1.0, top_k=1),
        GREEDY.replace(logit_bias={70: 100}, max_tokens=3),
        GREEDY.replace(repetition_penalty=1.3, max_tokens=9),
        GREEDY.replace(min_tokens=4, ignore_eos=False, stop_token_ids=[70], logit_bias={70: 50}),
        GREEDY.replace(temperature=1.3, top_p=0.9, min_p=0.05, presence_penalty=1.0, seed=5),
        GREEDY.replace(temperature=1.0, seed=9, n=3, max_tokens=6),
    ]
    together = llm.generate([PROMPT] * len(params), params)
    alone = [solo(llm, PROMPT, one) for one in params]
    for batched, single in zip(together, alone, strict=True):
        assert [sample.token_ids for sample in batched.outputs] == [sample.token_ids for sample in single.outputs]
    assert together[2].outputs[0].token_ids == together[0].outputs[0].token_ids
    assert together[3].outputs[0].token_ids == [70, 70, 70]


def test_samples_differ_and_a_seed_repeats_them(llm: LLM) -> None:
    for seed in (None, 0, 7):
        params = SamplingParams(n=4, temperature=1.0, max_tokens=20, seed=seed, ignore_eos=True)
        first, second = ([sample.token_ids for sample in solo(llm, PROMPT, params).outputs] for _ in range(2))
        assert len({tuple(ids) for ids in first}) == 4
        assert (first == second) == (seed is not None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_settings_that_leave_one_token_are_greedy(dtype: torch.dtype) -> None:
    with LLM(make_model("llama").to(dtype), kv_cache_memory="4MiB") as llm:
        greedy = solo(llm, PROMPT, GREEDY).outputs[0].token_ids
        for narrow in (
            {"temperature": 1e-6},
            {"top_p": 1e-8},
            {"top_k": 1},
            {"min_p": 1.0},
            {"top_p": 1e-3, "top_k": 300},
        ):
            params = SamplingParams(**{"temperature": 1.0, "seed": 1, "max_tokens": 12, "ignore_eos": True} | narrow)
            assert solo(llm, PROMPT, params).outputs[0].token_ids == greedy, narrow


def test_bad_words_are_in_no_output(llm: LLM) -> None:
    free = solo(llm, "the word", GREEDY).outputs[0]
    word = free.text.strip()[:2]
    assert word
    banned = solo(llm, "the word", GREEDY.replace(bad_words=[word])).outputs[0]
    assert word not in banned.text


# --- text ---


def test_streams_joined_are_the_whole_text_and_its_ids(llm: LLM) -> None:
    params = GREEDY.replace(max_tokens=40, temperature=1.0, seed=4)
    whole = solo(llm, "Hello", params).outputs[0]
    pieces = [piece.outputs[0] for piece in llm.stream("Hello", params)]
    assert "".join(piece.text for piece in pieces) == whole.text
    assert [token_id for piece in pieces for token_id in piece.token_ids] == whole.token_ids
    assert [piece.finish_reason for piece in pieces][-1] == whole.finish_reason == "length"
    cumulative = list(llm.stream("Hello", params.replace(output_kind=RequestOutputKind.CUMULATIVE)))
    assert cumulative[-1].outputs[0].text == whole.text


def test_a_text_prompt_is_tokenised_once_and_a_chat_as_its_template_says(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    assert solo(llm, "Hello", GREEDY).prompt_token_ids == tokenizer("Hello")["input_ids"]
    messages = [{"role": "user", "content": "Hello"}]
    (output,) = llm.chat(messages, GREEDY)
    assert output.prompt_token_ids == tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=False
    )
    assert output.prompt == tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)


def test_a_model_without_chat_template_completes_and_says_what_a_chat_needs(model: Any) -> None:
    with LLM(model, make_tokenizer(chat_template=None), kv_cache_memory="4MiB") as llm:
        assert len(solo(llm, "Hello", GREEDY).outputs[0].token_ids) == 12
        with pytest.raises(InvalidRequestError, match="chat_template="):
            llm.chat([{"role": "user", "content": "Hello"}])
        template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
        assert llm.chat([{"role": "user", "content": "Hello"}], GREEDY, chat_template=template)[0].prompt == "Hello"


def test_without_a_tokenizer_ids_work_and_text_says_why_not(model: Any) -> None:
    with LLM(model, kv_cache_memory="4MiB") as llm:
        output = solo(llm, PROMPT, GREEDY)
        assert len(output.outputs[0].token_ids) == 12 and output.outputs[0].text == ""
        for call in (lambda: llm.generate("text"), lambda: llm.generate(PROMPT, GREEDY.replace(stop="x"))):
            with pytest.raises(InvalidRequestError, match="tokenizer"):
                call()


def test_prompts_come_as_text_ids_or_vllms_mappings(llm: LLM) -> None:
    ids = make_tokenizer()("Hello")["input_ids"]
    outputs = llm.generate(["Hello", ids, {"prompt": "Hello"}, {"prompt_token_ids": ids}], GREEDY)
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 1
    assert llm.generate([], GREEDY) == []


# --- ends, limits, defaults ---


def test_every_end_token_of_the_model_ends_an_answer_unless_ignored(tmp_path: Path) -> None:
    folder = save_model(tmp_path, model=make_model("llama"), generation_config={"eos_token_id": [IM_END, EOS]})
    with LLM(folder, kv_cache_memory="4MiB") as llm:
        for end in (IM_END, EOS):
            forced = GREEDY.replace(logit_bias={end: 100}, ignore_eos=False)
            (sample,) = solo(llm, "Hello", forced).outputs
            assert (sample.token_ids, sample.text, sample.finish_reason, sample.stop_reason) == (
                [end],
                "",
                "stop",
                None,
            )
            assert len(solo(llm, "Hello", forced.replace(ignore_eos=True)).outputs[0].token_ids) == 12
            (sample,) = solo(llm, "Hello", forced.replace(ignore_eos=True, stop_token_ids=[end])).outputs
            assert (sample.token_ids, sample.finish_reason, sample.stop_reason) == ([end], "stop", end)
            early = solo(llm, "Hello", forced.replace(min_tokens=5)).outputs[0].token_ids
            assert not {IM_END, EOS} & set(early[:5])


def test_a_prompt_may_fill_the_context_but_for_one_token(model: Any) -> None:
    with LLM(model, max_model_len=32, kv_cache_memory="4MiB") as llm:
        for max_tokens in (10, None):
            for length, num_tokens in ((22, 10), (30, 2), (31, 1)):
                (sample,) = solo(llm, [5] * length, GREEDY.replace(max_tokens=max_tokens)).outputs
                assert len(sample.token_ids) == num_tokens and sample.finish_reason == "length"
            for length in (32, 33):
                with pytest.raises(InvalidRequestError, match=r"max_model_len=32.*shorten"):
                    llm.generate([5] * length, GREEDY.replace(max_tokens=max_tokens))
        assert len(solo(llm, [5], GREEDY).outputs[0].token_ids) == 12


def test_what_cannot_be_served_is_refused_before_anything_is_queued(llm: LLM) -> None:
    before = llm.stats()
    for bad, match in (
        ({"logit_bias": {VOCAB_SIZE: 1}}, f"logit_bias.*{VOCAB_SIZE}"),
        ({"stop_token_ids": [VOCAB_SIZE]}, "stop_token_ids"),
        ({"allowed_token_ids": [2**40]}, "allowed_token_ids"),
    ):
        params = [GREEDY, SamplingParams(**bad)]
        with pytest.raises(InvalidRequestError, match=match):
            llm.generate([PROMPT, PROMPT], params)
    for prompt in ([], [VOCAB_SIZE], [-1], ["x", [1, "2"]]):
        with pytest.raises(InvalidRequestError):
            llm.generate([PROMPT, prompt], GREEDY)
    assert llm.stats().num_computed_tokens == before.num_computed_tokens
    assert llm.stats().num_waiting == 0


def test_the_models_recommendations_count_until_something_else_is_said(tmp_path: Path) -> None:
    recommended = {"temperature": 0.2, "top_p": 0.9, "repetition_penalty": 1.1, "max_new_tokens": 7, "do_sample": True}
    folder = save_model(tmp_path, model=make_model("llama"), generation_config=recommended)
    with LLM(folder, kv_cache_memory="4MiB") as llm:
        params = llm.get_default_sampling_params()
        assert (params.temperature, params.top_p, params.repetition_penalty, params.max_tokens) == (0.2, 0.9, 1.1, 7)
        assert llm.get_default_chat_params().max_tokens == 7
        changed = llm.get_default_sampling_params(temperature=0, repetition_penalty=1.0)
        assert (changed.temperature, changed.repetition_penalty, changed.max_tokens) == (0.0, 1.0, 7)
        assert len(llm.generate("Hello")[0].outputs[0].token_ids) <= 7
    with LLM(folder, kv_cache_memory="4MiB", generation_config="none") as llm:
        assert llm.get_default_sampling_params() == SamplingParams()
        assert llm.get_default_chat_params().max_tokens is None


def test_a_passed_tokenizer_may_be_used_by_others_at_the_same_time(model: Any) -> None:
    tokenizer = make_tokenizer()
    with LLM(model, tokenizer, kv_cache_memory="4MiB") as llm:
        right = llm.generate("ab", GREEDY)[0]
        tokenizer(["a", "a b c"], padding="max_length", max_length=40)
        assert llm.generate("ab", GREEDY)[0].prompt_token_ids == right.prompt_token_ids
        assert tokenizer.backend_tokenizer.padding is not None  # nor have we switched off what others use
        assert llm.get_tokenizer() is tokenizer


# --- memory and life ---


def test_a_reset_prefix_cache_is_empty(llm: LLM) -> None:
    prompt = list(range(100, 150))
    solo(llm, prompt, GREEDY)
    assert solo(llm, prompt, GREEDY).num_cached_tokens == 48
    llm.reset_prefix_cache()
    assert solo(llm, prompt, GREEDY).num_cached_tokens == 0


def test_what_was_begun_before_a_reset_is_not_shared_after_it(llm: LLM) -> None:
    prompt = list(range(200, 250))
    endless = SamplingParams(temperature=0, max_tokens=300, ignore_eos=True)
    with llm.stream(prompt, endless) as running:
        next(running)
        llm.reset_prefix_cache()
        for _ in range(20):  # it fills blocks of its output
            next(running)
        assert solo(llm, prompt, GREEDY).num_cached_tokens == 0
    assert solo(llm, prompt, GREEDY).num_cached_tokens == 48  # of the second one's


def test_the_cache_takes_no_more_than_asked_and_says_when_that_is_impossible(model: Any) -> None:
    with LLM(model, kv_cache_memory="1MiB", block_size=8) as llm:
        stats = llm.stats()
        num_bytes = stats.num_blocks * 8 * 3 * 2 * 2 * 16 * 4  # blocks, slots, layers, K and V, heads, size, float32
        assert 0.9 * 2**20 < num_bytes <= 2**20
    with pytest.raises(ConfigError, match=r"does not fit in the .* GiB .* free"):
        LLM(model, kv_cache_memory=2**60, max_num_seqs=2**50)
    with pytest.raises(ConfigError, match="at least 2"):
        LLM(model, kv_cache_memory=1000)


def test_closing_gives_the_model_back(model: Any) -> None:
    own = make_model("llama")
    gone = weakref.ref(own.model.layers[0])
    llm = LLM(own, kv_cache_memory="4MiB")
    solo(llm, PROMPT, GREEDY)
    del own
    llm.close()
    llm.close()

    def is_gone() -> bool:
        gc.collect()
        return gone() is None

    wait_until(is_gone)
    with pytest.raises(EngineDeadError, match="closed"):
        llm.generate(PROMPT)
    with LLM(model, kv_cache_memory="4MiB") as second:
        solo(second, PROMPT, GREEDY)


def test_shared_engines_are_made_once_however_many_ask(tmp_path: Path) -> None:
    folder = save_model(tmp_path, model=make_model("llama"))
    found: list[LLM] = []
    threads = [
        threading.Thread(target=lambda: found.append(LLM.shared(folder, kv_cache_memory="4MiB"))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(found) == 4 and len(set(map(id, found))) == 1
    assert LLM.shared(str(folder), kv_cache_memory="4MiB") is found[0]
    other = LLM.shared(folder, kv_cache_memory="4MiB", seed=1)
    assert other is not found[0]
    found[0].close()
    again = LLM.shared(folder, kv_cache_memory="4MiB")
    assert again is not found[0] and not again.is_closed
    again.close()
    other.close()


def test_a_request_that_fails_to_load_leaves_a_clear_error_and_no_thread(tmp_path: Path) -> None:
    before = threading.active_count()
    with pytest.raises(ConfigError, match="max_model_len"):
        LLM(make_model("llama"), max_model_len=10**6)
    wait_until(lambda: threading.active_count() <= before)


def test_outputs_are_plain_data(llm: LLM) -> None:
    (sample,) = solo(llm, "Hello", GREEDY.replace(logprobs=0)).outputs
    assert json.loads(json.dumps([sample.text, sample.token_ids, sample.finish_reason]))
    assert BOS not in sample.token_ids or sample.text is not None
