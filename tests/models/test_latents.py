"""Multi-head latent attention: pages hold each latent once, and nobody sees it from the tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from _pytest.mark import ParameterSet
from transformers import GenerationConfig, PreTrainedModel

from helpers_architectures import VOCAB_SIZE, make_tiny
from helpers_models import prompt_logprobs
from paged_backend import LLM, BeamSearchParams, SamplingParams, check_model

NUM_NEW, BLOCK = 14, 4
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_NEW, ignore_eos=True)
CROWDED: dict[str, dict[str, Any]] = {
    "chunked": {"max_num_batched_tokens": 5},
    "preempted": {"num_gpu_blocks_override": 15},
    "swapped": {"num_gpu_blocks_override": 15, "swap_space": 0.01, "enable_prefix_caching": False},
    "blocks that no four tokens fill": {"block_size": 3, "num_gpu_blocks_override": 20},
    "the definition": {"attention_backend": "torch"},
}
EVERYDAY = "deepseek_v3"
ARCHITECTURES: list[str | ParameterSet] = [
    EVERYDAY,
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("deepseek_v2", "minicpm3", "glm4_moe_lite")),
]


def make_llm(model: PreTrainedModel, **settings: Any) -> LLM:
    return LLM(model, **{"block_size": BLOCK, "kv_cache_memory": "16MiB"} | settings)


def random_prompts(*lengths: int, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCAB_SIZE - 8, (length,), generator=generator).tolist() for length in lengths]


@torch.inference_mode()
def generate(model: PreTrainedModel, prompt: list[int]) -> list[int]:
    """By transformers, which no token stops."""
    config = GenerationConfig(max_new_tokens=NUM_NEW, do_sample=False, eos_token_id=-1, pad_token_id=0)
    return model.generate(torch.tensor([prompt]), generation_config=config)[0, len(prompt) :].tolist()


def numbers_per_token(model: PreTrainedModel) -> int:
    """The least that there can be: a latent and its rotary part in each layer."""
    config: Any = model.config
    return config.num_hidden_layers * (config.kv_lora_rank + config.qk_rope_head_dim)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_token_takes_one_latent_per_layer_and_as_many_fit(architecture: str) -> None:
    model, memory = make_tiny(architecture), 2**20
    verdict = check_model(model, block_size=BLOCK, kv_cache_memory=memory)
    assert verdict.bytes_per_token == numbers_per_token(model) * 4
    assert verdict.num_tokens == memory // (verdict.bytes_per_token * BLOCK) * BLOCK


def test_with_adapters_keys_are_expanded_since_an_adapter_may_change_how() -> None:
    verdict = check_model(make_tiny(EVERYDAY), kv_cache_memory="1MiB", enable_lora=True)
    assert verdict.layers == {"full, 4 x 24": 4}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_whatever_the_engine_does_the_tokens_are_those_of_generate(architecture: str) -> None:
    model = make_tiny(architecture)
    (head,) = random_prompts(21, seed=1)
    prompts = [*random_prompts(5, 17, 1, 40), [*head, 5], [*head, 6, 7]]
    right = [generate(model, prompt) for prompt in prompts]
    with make_llm(model) as llm:
        assert [llm.generate([prompt], GREEDY)[0].outputs[0].token_ids for prompt in prompts] == right
        together = llm.generate(prompts, GREEDY.replace(n=2))
        assert [[sample.token_ids for sample in output.outputs] for output in together] == [[x, x] for x in right]
        assert together[5].num_cached_tokens >= 20
    for name, settings in CROWDED.items():
        with make_llm(model, **settings) as llm:
            assert [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY)] == right, name
            stats = llm.stats()
        assert (stats.num_preemptions > 0) >= (name in ("preempted", "swapped")), name
        assert (stats.num_swaps > 0) == (name == "swapped"), name


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
def test_samples_and_beams_that_fork_are_the_same_in_a_crowded_cache(kv_cache_dtype: str) -> None:
    """Blocks that they share are copied before one of them writes."""
    model, prompts = make_tiny(EVERYDAY), random_prompts(9, 14)
    samples = SamplingParams(n=3, temperature=1.0, seed=1, max_tokens=NUM_NEW, ignore_eos=True)
    beams = BeamSearchParams(beam_width=3, max_tokens=8)
    found, num_preemptions = [], []
    for settings in ({}, {"num_gpu_blocks_override": 19}):
        with make_llm(model, kv_cache_dtype=kv_cache_dtype, **settings) as llm:
            outputs = [*llm.generate(prompts, samples), *llm.beam_search(prompts, beams)]
            found.append([[one.token_ids for one in output.outputs] for output in outputs])
            num_preemptions.append(llm.stats().num_preemptions)
    assert found[0] == found[1]
    assert all(len(set(map(tuple, of_prompt))) == 3 for of_prompt in found[0])
    assert num_preemptions[0] == 0 < num_preemptions[1]


def test_integers_have_one_scale_per_latent_and_give_the_same_tokens_whatever_the_engine_does() -> None:
    model, prompts = make_tiny(EVERYDAY), random_prompts(5, 17, 1, 40)
    verdict = check_model(model, kv_cache_dtype="int8", kv_cache_memory="1MiB")
    assert verdict.bytes_per_token == numbers_per_token(model) + 2 * model.config.num_hidden_layers
    with make_llm(model, kv_cache_dtype="int8") as llm:
        expected = [llm.generate([prompt], GREEDY)[0].outputs[0].token_ids for prompt in prompts]
    for name, settings in CROWDED.items():
        with make_llm(model, kv_cache_dtype="int8", **settings) as llm:
            assert [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY)] == expected, name


def test_log_probabilities_of_integers_are_nearly_those_of_the_latents() -> None:
    model = make_tiny(EVERYDAY)
    (prompt,) = random_prompts(120)
    read = []
    for kv_cache_dtype in ("auto", "int8"):
        with make_llm(model, kv_cache_dtype=kv_cache_dtype) as llm:
            read.append(prompt_logprobs(llm, prompt))
    difference = (read[0] - read[1]).abs()
    assert 0 < difference.mean() < 0.05 * read[0].std()
