"""Greedy float32 output equals transformers' `generate`, token for token, whatever the engine does to get there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from helpers_models import ARCHITECTURES, VOCAB_SIZE, crowded, make_model
from paged_backend import LLM, ModelError, RequestOutput, SamplingParams

NUM_NEW = 14
LENGTHS = (5, 17, 1, 40)
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_NEW, ignore_eos=True)

SETTINGS: dict[str, dict[str, Any]] = {
    "roomy": {},
    "chunked": {"max_num_batched_tokens": 5},
    "large blocks": {"block_size": 32},
    "no prefix cache": {"enable_prefix_caching": False},
}


def random_prompts(*lengths: int, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, VOCAB_SIZE, (length,), generator=generator).tolist() for length in lengths]


def make_llm(model: PreTrainedModel, **settings: Any) -> LLM:
    return LLM(model, **{"block_size": 4, "kv_cache_memory": "16MiB"} | settings)


def expected(model: PreTrainedModel, prompts: list[list[int]]) -> list[list[int]]:
    return [generated(model, prompt) for prompt in prompts]


@torch.inference_mode()
def generated(model: PreTrainedModel, prompt: list[int]) -> list[int]:
    output = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=NUM_NEW,
        min_new_tokens=NUM_NEW,
        do_sample=False,
        eos_token_id=None,
    )
    return output[0, len(prompt) :].tolist()


def token_ids(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_setting_gives_the_tokens_of_generate(architecture: str) -> None:
    model = make_model(architecture)
    prompts = random_prompts(*LENGTHS)
    right = expected(model, prompts)
    crowd = {"preempted": crowded(architecture, 15, max(LENGTHS) + NUM_NEW)}
    for name, settings in (SETTINGS | crowd).items():
        with make_llm(model, **settings) as llm:
            assert token_ids(llm.generate(prompts, GREEDY)) == right, name
            if name == "roomy":
                assert [token_ids(llm.generate(prompt, GREEDY))[0] for prompt in prompts] == right, "alone"
            stats = llm.stats()
        assert stats.num_free_blocks == stats.num_blocks, name
        assert (stats.num_preemptions > 0) == (name == "preempted"), name


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_shared_prefix_is_computed_once_and_changes_nothing(architecture: str) -> None:
    model = make_model(architecture)
    (head,) = random_prompts(64, seed=1)
    prompts = [head + tail for tail in random_prompts(1, 16, 17, seed=2)]
    right = expected(model, prompts)
    with make_llm(model, max_num_batched_tokens=72) as llm:
        together = llm.generate(prompts, GREEDY)
        after = llm.generate(prompts, GREEDY)
        stats = llm.stats()

    assert token_ids(together) == right
    assert token_ids(after) == right
    assert [output.num_cached_tokens for output in together] == [0, 64, 64]
    num_prompt_tokens = sum(map(len, prompts))
    num_cached = sum(output.num_cached_tokens for output in together + after)
    assert stats.num_computed_tokens == 2 * (num_prompt_tokens + len(prompts) * (NUM_NEW - 1)) - num_cached


@pytest.mark.parametrize("architecture", ["llama", "mistral", "gpt_oss"])
def test_greedy_samples_of_one_prompt_are_all_the_same_as_generate(architecture: str) -> None:
    model = make_model(architecture)
    prompts = random_prompts(18, 7)
    right = expected(model, prompts)
    for settings in ({}, {"num_gpu_blocks_override": 30}, {"max_num_seqs": 3}):
        with make_llm(model, **settings) as llm:
            outputs = llm.generate(prompts, GREEDY.replace(n=4))
            stats = llm.stats()
        assert [[sample.token_ids for sample in output.outputs] for output in outputs] == [[ids] * 4 for ids in right]
        assert stats.num_free_blocks == stats.num_blocks
    assert stats.num_computed_tokens < 4 * sum(map(len, prompts)) + 8 * NUM_NEW


@pytest.mark.parametrize("length", [15, 16, 17, 31, 32, 33, 48])
def test_a_prompt_that_is_wholly_cached_still_gets_its_logits(length: int) -> None:
    model = make_model("llama")
    (prompt, longer, shorter) = random_prompts(length, length + 1, 16)
    right = expected(model, [prompt, longer, shorter])
    with make_llm(model, block_size=16) as llm:
        for _ in range(3):
            (output,) = llm.generate([prompt], GREEDY)
            assert output.outputs[0].token_ids == right[0]
            assert output.num_cached_tokens <= length - 1
        assert token_ids(llm.generate([prompt, longer, shorter], GREEDY)) == right
        assert llm.generate([prompt], GREEDY.replace(max_tokens=1))[0].outputs[0].token_ids == right[0][:1]


def test_the_model_passed_is_not_changed_and_its_weights_are_shared() -> None:
    model = make_model("llama")
    before = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    implementation = model.config._attn_implementation
    (prompt,) = random_prompts(9)
    right = generated(model, prompt)
    with make_llm(model) as llm:
        assert llm.generate([prompt], GREEDY)[0].outputs[0].token_ids == right
        assert generated(model, prompt) == right
        assert model.config._attn_implementation == implementation
        assert {name: parameter.data_ptr() for name, parameter in model.named_parameters()} == before
        with torch.no_grad():
            model.lm_head.weight.neg_()
        assert llm.generate([prompt], GREEDY)[0].outputs[0].token_ids == generated(model, prompt) != right


def test_a_model_that_the_packed_run_gets_wrong_is_refused() -> None:
    model = make_model("llama")
    attention = model.model.layers[1].self_attn
    forward = attention.forward

    def looks_at_the_pack(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return forward(hidden_states + hidden_states.cumsum(dim=1), *args, **kwargs)

    attention.forward = looks_at_the_pack
    with pytest.raises(ModelError, match="standard deviations"):
        make_llm(model)
