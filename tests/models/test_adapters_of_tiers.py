"""LoRA for models that cannot take packs: an adapter gives what merged weights would give, in every tier."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from _pytest.mark import ParameterSet
from transformers import PreTrainedModel

from helpers_architectures import VOCAB_SIZE, make_tiny
from helpers_lora import merged, save_adapter
from paged_backend import LLM, InvalidRequestError, LoRARequest, SamplingParams, check_model
from paged_backend.model.model_call import ModelCall
from paged_backend.model.ways import Tier

NUM_NEW = 10
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_NEW, ignore_eos=True)
LENGTHS = (5, 17, 33)


def slow(architecture: str) -> ParameterSet:
    return pytest.param(architecture, marks=pytest.mark.slow)


ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj", "out_proj")
TARGETS: dict[str, tuple[str, ...]] = {
    "lfm2": ("conv.in_proj", "conv.out_proj", "feed_forward.w1", *ATTENTION),
    "bloom": ("query_key_value", "dense_4h_to_h", "lm_head"),
    "minimax": (*ATTENTION, "output_gate", "lm_head"),
    "mamba": ("in_proj", "x_proj", "out_proj"),
    "mamba2": ("in_proj", "out_proj", "lm_head"),
    "qwen3_next": ("in_proj_qkvz", "shared_expert.up_proj", *ATTENTION),
    "kimi_linear": ("kv_b_proj", *ATTENTION),
    "falcon": ("query_key_value", "dense"),
}
TIERS = {
    "lfm2": Tier.STATEFUL,
    "bloom": Tier.GATHERED,
    "minimax": Tier.OWN_CACHE,
    "mamba": Tier.STATEFUL,
    "mamba2": Tier.STATEFUL,
    "qwen3_next": Tier.STATEFUL,
    "kimi_linear": Tier.STATEFUL,
    "falcon": Tier.GATHERED,
}
EVERYDAY = ("lfm2", "bloom", "minimax", "kimi_linear")
SETTINGS: dict[str, dict[str, Any]] = {
    "roomy": {},
    "chunked": {"max_num_batched_tokens": 7},
    "preempted": {"num_gpu_blocks_override": 14},
}


def make_llm(model: PreTrainedModel, **settings: Any) -> LLM:
    return LLM(model, **{"block_size": 4, "kv_cache_memory": "16MiB", "enable_lora": True} | settings)


def random_prompts(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, VOCAB_SIZE - 8, (length,), generator=generator).tolist() for length in lengths]


@torch.inference_mode()
def greedy(model: PreTrainedModel, prompt: list[int]) -> list[int]:
    """By plain forwards of the whole sequence, which no cache can be wrong in."""
    token_ids = list(prompt)
    for _ in range(NUM_NEW):
        token_ids.append(int(ModelCall(model).plain(torch.tensor(token_ids))[-1].argmax()))
    return token_ids[len(prompt) :]


@pytest.mark.parametrize("architecture", [*EVERYDAY, *(slow(name) for name in TARGETS if name not in EVERYDAY)])
def test_requests_with_several_adapters_and_none_get_what_merged_weights_give(
    architecture: str, tmp_path: Path
) -> None:
    model = make_tiny(architecture)
    assert check_model(model, enable_lora=True, block_size=4, kv_cache_memory="16MiB").way.tier is TIERS[architecture]
    models: list[PreTrainedModel] = [model]
    requests: list[LoRARequest | None] = [None]
    for seed in (1, 2):
        folder = save_adapter(tmp_path / str(seed), model, targets=TARGETS[architecture], seed=seed, rank=2 * seed)
        models.append(merged(model, folder))
        requests.append(LoRARequest(f"number {seed}", folder))
    wanted = [(prompt, number) for prompt in random_prompts(*LENGTHS) for number in range(3)]
    right = [greedy(models[number], prompt) for prompt, number in wanted]
    assert right[0] != right[1] != right[2]
    for name, settings in SETTINGS.items():
        with make_llm(model, **settings) as llm:
            outputs = llm.generate(
                [prompt for prompt, _ in wanted], GREEDY, lora_request=[requests[number] for _, number in wanted]
            )
            stats = llm.stats()
        assert [output.outputs[0].token_ids for output in outputs] == right, name
        assert (stats.num_preemptions > 0) == (name == "preempted"), name


@pytest.mark.parametrize("architecture", ["lfm2", "bloom"])
def test_vectors_have_their_adapters_too(architecture: str, tmp_path: Path) -> None:
    model = make_tiny(architecture)
    folder = save_adapter(tmp_path, model, targets=TARGETS[architecture])
    request = LoRARequest("one", folder)
    prompts = random_prompts(19, 4, 11)
    with make_llm(model, max_num_batched_tokens=8) as llm:
        outputs = llm.embed(prompts, pooling="mean", normalize=False, lora_request=[request, None, request])
    for prompt, output, computing in zip(prompts, outputs, [merged(model, folder), model] * 2, strict=False):
        with torch.inference_mode():
            right = computing.base_model(torch.tensor([prompt])).last_hidden_state[0].mean(dim=0)
        torch.testing.assert_close(torch.tensor(output.outputs.embedding), right, rtol=1e-3, atol=1e-3)


def test_prefixes_of_gathered_pages_are_shared_within_an_adapter_only(tmp_path: Path) -> None:
    model = make_tiny("bloom")
    request = LoRARequest("one", save_adapter(tmp_path, model, targets=TARGETS["bloom"]))
    (prompt,) = random_prompts(22)
    with make_llm(model) as llm:
        cached = [
            llm.generate([prompt], GREEDY, lora_request=lora)[0].num_cached_tokens for lora in (None, request) * 2
        ]
    assert cached == [0, 0, 20, 20]


def test_layers_whose_weights_the_model_reads_by_itself_are_refused_with_a_way_out(tmp_path: Path) -> None:
    """Adding to their outputs would change nothing, without anybody noticing."""
    model = make_tiny("mamba")
    folder = save_adapter(tmp_path, model, targets=("in_proj", "dt_proj"))
    with make_llm(model) as llm, pytest.raises(InvalidRequestError, match=r"dt_proj'.*merge_and_unload"):
        llm.add_lora(LoRARequest("one", folder))
