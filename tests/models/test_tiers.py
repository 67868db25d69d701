"""What the engine promises holds for every tier: greedy equality, forks, preemption, pooling; and what a tier lacks."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from _pytest.mark import ParameterSet
from transformers import PreTrainedModel

from helpers_architectures import VOCAB_SIZE, make_tiny
from helpers_models import make_model
from paged_backend import LLM, BeamSearchParams, ConfigError, ModelError, SamplingParams, check_model
from paged_backend.model.model_call import ModelCall
from paged_backend.model.ways import Tier

NUM_NEW = 14
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_NEW, ignore_eos=True)
LENGTHS = (5, 17, 1, 40)
OF_TIER = {
    "lfm2": Tier.STATEFUL,
    "mamba": Tier.STATEFUL,
    "bloom": Tier.GATHERED,
    "minimax": Tier.OWN_CACHE,
}
SHARING = "gemma4_text"
KEEPS_STATE = ("lfm2", "mamba", "minimax")


SETTINGS: dict[str, dict[str, Any]] = {
    "roomy": {},
    "chunked": {"max_num_batched_tokens": 5},
    "preempted": {"num_gpu_blocks_override": 15},
}


def slow(architecture: str) -> ParameterSet:
    return pytest.param(architecture, marks=pytest.mark.slow)


def make_llm(model: PreTrainedModel, **settings: Any) -> LLM:
    return LLM(model, **{"block_size": 4, "kv_cache_memory": "16MiB"} | settings)


def random_prompts(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, VOCAB_SIZE - 8, (length,), generator=generator).tolist() for length in lengths]


@torch.inference_mode()
def greedy(model: PreTrainedModel, prompt: list[int], num_new: int = NUM_NEW) -> list[int]:
    """By plain forwards of the whole sequence, which no cache can be wrong in."""
    token_ids = list(prompt)
    for _ in range(num_new):
        token_ids.append(int(ModelCall(model).plain(torch.tensor(token_ids))[-1].argmax()))
    return token_ids[len(prompt) :]


@pytest.mark.parametrize("architecture", OF_TIER)
def test_the_self_check_finds_the_tier(architecture: str) -> None:
    verdict = check_model(make_tiny(architecture), block_size=4, kv_cache_memory="1MiB")
    assert verdict.way.tier is OF_TIER[architecture]
    assert verdict.keeps_state == (architecture in KEEPS_STATE)
    assert 0 <= verdict.difference < 1e-3
    assert verdict.bytes_per_old_token * verdict.num_tokens + verdict.bytes_per_sequence <= 2**20


@pytest.mark.parametrize("architecture", ["lfm2", "bloom", "minimax", *map(slow, ("mamba", SHARING))])
def test_every_setting_gives_the_greedy_tokens(architecture: str) -> None:
    model = make_tiny(architecture)
    prompts = random_prompts(*LENGTHS)
    right = [greedy(model, prompt) for prompt in prompts]
    for name, settings in SETTINGS.items():
        with make_llm(model, **settings) as llm:
            outputs = [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY)]
            stats = llm.stats()
        assert outputs == right, name
        assert stats.num_free_blocks == stats.num_blocks, name
        assert (stats.num_preemptions > 0) == (name == "preempted"), name


@pytest.mark.parametrize("architecture", ["lfm2", "bloom", "minimax", *map(slow, ("mamba", SHARING))])
def test_samples_and_beams_fork_with_all_that_their_parent_has(architecture: str) -> None:
    model = make_tiny(architecture)
    (prompt,) = random_prompts(18)
    right = greedy(model, prompt)
    with make_llm(model) as llm:
        (output,) = llm.generate([prompt], GREEDY.replace(n=3))
        (varied,) = llm.generate([prompt], SamplingParams(n=3, temperature=2.0, seed=1, max_tokens=NUM_NEW))
        (alone,) = llm.generate([prompt], SamplingParams(n=1, temperature=2.0, seed=1, max_tokens=NUM_NEW))
        (beams,) = llm.beam_search([prompt], BeamSearchParams(beam_width=3, max_tokens=NUM_NEW))
    assert [sample.token_ids for sample in output.outputs] == [right] * 3
    assert varied.outputs[0].token_ids == alone.outputs[0].token_ids
    assert len({tuple(sample.token_ids) for sample in varied.outputs}) == 3
    assert len({tuple(beam.token_ids) for beam in beams.outputs}) == 3


@pytest.mark.parametrize("architecture", ["lfm2", *map(slow, ("mamba", "qwen3_next", "recurrent_gemma"))])
def test_sequences_that_were_computed_together_part_and_meet_others(architecture: str) -> None:
    model = make_tiny(architecture)
    prompts = random_prompts(6, 6, 6, 9, 6)
    nums_new = (3, NUM_NEW, 5, 8, 1)
    with make_llm(model, max_num_seqs=6) as llm:
        params = [GREEDY.replace(max_tokens=num_new, n=2) for num_new in nums_new]
        outputs = llm.generate(prompts, params)
    for prompt, num_new, output in zip(prompts, nums_new, outputs, strict=True):
        assert [sample.token_ids for sample in output.outputs] == [greedy(model, prompt, num_new)] * 2


@pytest.mark.parametrize("architecture", ["bloom", slow(SHARING)])
def test_what_is_all_in_pages_is_shared(architecture: str) -> None:
    model = make_tiny(architecture)
    (prompt,) = random_prompts(22)
    with make_llm(model) as llm:
        first, again = (llm.generate([prompt], GREEDY)[0] for _ in range(2))
    assert first.outputs[0].token_ids == again.outputs[0].token_ids == greedy(model, prompt)
    assert again.num_cached_tokens == 20


@pytest.mark.parametrize("architecture", ["lfm2", *map(slow, ("mamba", "minimax"))])
def test_a_model_with_state_shares_no_prefixes_and_makes_no_guesses(
    architecture: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = make_tiny(architecture)
    prompt = random_prompts(6)[0] * 4
    with (
        caplog.at_level(logging.INFO, "paged_backend"),
        make_llm(model, speculative_config={"method": "ngram", "num_speculative_tokens": 3}) as llm,
    ):
        outputs = [llm.generate([prompt], GREEDY)[0] for _ in range(2)]
    assert [output.outputs[0].token_ids for output in outputs] == [greedy(model, prompt)] * 2
    assert [output.num_cached_tokens for output in outputs] == [0, 0]
    assert "no prefix caching" in caplog.text
    assert "no speculation" in caplog.text


@pytest.mark.parametrize("architecture", ["lfm2", "bloom", "minimax"])
@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_embeddings_are_the_models_hidden_states(architecture: str, pooling: str) -> None:
    model = make_tiny(architecture)
    prompts = random_prompts(19, 4)
    with make_llm(model, max_num_batched_tokens=8) as llm:
        outputs = llm.embed(prompts, pooling=pooling, normalize=False)
    for prompt, output in zip(prompts, outputs, strict=True):
        with torch.inference_mode():
            hidden = model.base_model(torch.tensor([prompt])).last_hidden_state[0]
        expected = hidden[-1] if pooling == "last" else hidden.mean(dim=0)
        torch.testing.assert_close(torch.tensor(output.outputs.embedding), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("architecture", [SHARING, "gemma3n_text"])
def test_layers_that_share_keys_and_values_take_nothing(architecture: str) -> None:
    model: Any = make_tiny(architecture)
    config, memory = model.config, 2**20
    verdict = check_model(model, block_size=4, kv_cache_memory=memory)
    kinds = dict(verdict.layers)
    num_stored = config.num_hidden_layers - config.num_kv_shared_layers
    assert kinds.pop("another layer's keys and values") == config.num_kv_shared_layers == 2
    assert sum(kinds.values()) == num_stored == 4
    sizes = [layer.self_attn.k_proj.out_features for layer in model.model.layers[:num_stored]]
    assert verdict.bytes_per_token == sum(2 * size * 4 for size in sizes)
    num_blocks = memory // (verdict.bytes_per_token // len(verdict.layout.reaches) * 4)
    assert verdict.num_tokens == verdict.layout.num_tokens(num_blocks, verdict.max_model_len)


def test_states_have_room_or_are_refused() -> None:
    model = make_tiny("mamba2")
    verdict = check_model(model, kv_cache_memory="1MiB")
    most = 2**19 // verdict.bytes_per_sequence
    assert verdict.max_num_seqs == most < 256
    with make_llm(model, kv_cache_memory="1MiB") as llm:
        outputs = llm.generate(random_prompts(*[3] * (most + 5)), GREEDY)
        assert len(outputs) == most + 5
    with pytest.raises(ConfigError, match="kv_cache_memory"):
        check_model(model, kv_cache_memory=verdict.bytes_per_sequence)


def test_a_model_that_no_way_gets_right_is_refused_with_what_was_tried() -> None:
    with pytest.raises(ModelError, match=r"packed: .*mask.*own cache: "):
        check_model(make_tiny("doge"))


def test_blocks_behind_the_windows_of_all_layers_make_room() -> None:
    model = make_model("gemma3_text", num_hidden_layers=3, layer_types=["sliding_attention"] * 3)
    prompts = random_prompts(8, 8, 8)
    right = [greedy(model, prompt, 40) for prompt in prompts]
    # Room for one sequence of 48 tokens, or for three with the windows' 8 tokens each.
    with make_llm(model, num_gpu_blocks_override=13) as llm:
        outputs = llm.generate(prompts, GREEDY.replace(max_tokens=40))
        stats = llm.stats()
    assert [output.outputs[0].token_ids for output in outputs] == right
    assert stats.num_preemptions == 0
    assert stats.num_free_blocks == stats.num_blocks
