"""The fused decoder and the linear layers: another way to compute the same, on the same weights."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from helpers_models import make_model, save_model
from paged_backend import LLM, SamplingParams
from paged_backend.model.decoder import FusedDecoder
from paged_backend.model.linear import FastLinear, Linear, speed_up_linears

PROMPTS = [list(range(40, 75)), [7], list(range(3, 20)) * 2]
GREEDY = SamplingParams(temperature=0, max_tokens=14, ignore_eos=True)
OPTIONS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama with biases": {"attention_bias": True, "mlp_bias": True},
    "llama with tied embeddings": {"tie_word_embeddings": True},
    "llama with wide heads": {"head_dim": 32},
    "llama with scaled positions": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
    "mistral": {},
    "qwen2": {},
    "qwen3": {},
}


@pytest.mark.parametrize("case", OPTIONS)
def test_the_fused_decoder_gives_the_tokens_of_generate(case: str, tmp_path: Path) -> None:
    model = make_model(case.split()[0], **OPTIONS[case])
    with LLM(save_model(tmp_path, model=model), dtype="float32", kv_cache_memory="4MiB", block_size=4) as llm:
        outputs = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY)]
    for prompt, token_ids in zip(PROMPTS, outputs, strict=True):
        right = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=14,
            do_sample=False,
            eos_token_id=None,
        )
        assert token_ids == right[0, len(prompt) :].tolist()


def test_models_built_like_llama_run_fused_and_others_do_not() -> None:
    for architecture in ("llama", "mistral", "qwen2", "qwen3"):
        assert FusedDecoder.can_run(make_model(architecture))
    for architecture in ("gemma2", "phi3", "gpt2", "gpt_neox", "gpt_oss"):
        assert not FusedDecoder.can_run(make_model(architecture))
    assert not FusedDecoder.can_run(make_model("llama").half())


def test_a_fused_decoder_that_is_wrong_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = make_model("llama")
    folder = save_model(tmp_path, model=model)
    with LLM(folder, dtype="float32", kv_cache_memory="4MiB") as llm:
        right = llm.generate(PROMPTS, GREEDY)
    monkeypatch.setattr("paged_backend.model.decoder.rotary", lambda *args: None)
    with caplog.at_level(logging.WARNING), LLM(folder, dtype="float32", kv_cache_memory="4MiB") as llm:
        outputs = llm.generate(PROMPTS, GREEDY)
    assert "not using the fused decoder" in caplog.text
    assert [output.outputs[0].token_ids for output in outputs] == [output.outputs[0].token_ids for output in right]


def test_merged_layers_are_held_once() -> None:
    layers = [nn.Linear(16, n, dtype=torch.bfloat16).requires_grad_(False) for n in (24, 8, 8)]
    x = torch.randn(5, 16, dtype=torch.bfloat16)
    expected = torch.cat([layer(x) for layer in layers], dim=1)
    merged = Linear.merged(layers)
    torch.testing.assert_close(merged(x), expected, rtol=0.02, atol=0.02)
    torch.testing.assert_close(torch.cat([layer(x) for layer in layers], dim=1), expected)
    assert len({layer.weight.untyped_storage().data_ptr() for layer in layers}) == 1


def test_sped_up_layers_share_their_parameters_and_see_them_change() -> None:
    model = make_model("qwen2").to(torch.bfloat16)
    parameters = {id(parameter) for parameter in model.parameters()}
    token_ids = torch.arange(30)[None]
    with torch.inference_mode():
        expected = model(token_ids).logits.float()
        speed_up_linears(model)
        assert any(isinstance(module, FastLinear) for module in model.modules())
        assert {id(parameter) for parameter in model.parameters()} == parameters
        torch.testing.assert_close(model(token_ids).logits.float(), expected, rtol=0.1, atol=0.3)
        model.lm_head.weight.zero_()
        assert not model(token_ids).logits.any()
