"""`quantization`: an engine on rounded weights computes what a model with those weights would."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import BertConfig, BertModel
from transformers.pytorch_utils import Conv1D

from helpers_models import make_model, make_tokenizer, save_model
from paged_backend import LLM, EngineConfig, SamplingParams
from paged_backend.errors import ConfigError
from paged_backend.model.decoder import FusedDecoder
from paged_backend.model.linear import FastLinear, Linear, PackedLinear
from paged_backend.model.loader import load
from paged_backend.model.quantize import quantize_linears
from paged_kernels import reference

PROMPTS = [list(range(40, 75)), [7, 9], list(range(3, 20)) * 2]
GREEDY = SamplingParams(temperature=0, max_tokens=14, ignore_eos=True)
WIDE = {"head_dim": 32}  # so that all products are large enough to be quantised
OPTIONS: dict[str, dict[str, Any]] = {
    "llama": WIDE,
    "llama with biases": {"attention_bias": True, "mlp_bias": True} | WIDE,
    "llama with tied embeddings": {"tie_word_embeddings": True} | WIDE,
    "llama with products too small to be quantised": {},
    "qwen3": WIDE,
    "gemma2": {},
    "gpt2": {},
    "phi3": {},
}


class Defined(nn.Module):
    """A linear layer on rounded weights, as `reference` defines it."""

    def __init__(self, layer: PackedLinear) -> None:
        super().__init__()
        self.packed, self.bias = layer.packed, layer.bias

    def forward(self, x: Tensor) -> Tensor:
        y = reference.packed_linear(x.reshape(-1, x.shape[-1]), self.packed, self.bias)
        return y.view(*x.shape[:-1], -1)


class Failing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise ValueError("not today")


def defined(folder: Path, quantization: str) -> Any:
    model = loaded(folder, quantization, "float32")
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, PackedLinear):
                setattr(parent, name, Defined(child))
    return model


def loaded(folder: Path, quantization: str, dtype: str = "bfloat16") -> Any:
    return load(folder, None, EngineConfig(device="cpu", dtype=dtype, quantization=quantization)).model


def make_llm(model: Any, **options: Any) -> LLM:
    return LLM(model, **{"dtype": "float32", "kv_cache_memory": "4MiB", "block_size": 4} | options)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("case", OPTIONS)
def test_an_engine_gives_the_log_probabilities_of_the_definition(case: str, quantization: str, tmp_path: Path) -> None:
    folder = save_model(tmp_path, model=make_model(case.split()[0], **OPTIONS[case]))
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    with make_llm(folder, quantization=quantization) as llm:
        outputs = llm.generate(PROMPTS, params)
    right = defined(folder, quantization)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        logprobs = right(torch.tensor([prompt])).logits[0].log_softmax(-1)
        assert output.prompt_logprobs is not None
        actual = [entry[token].logprob for entry, token in zip(output.prompt_logprobs[1:], prompt[1:], strict=True)]
        expected = logprobs[torch.arange(len(prompt) - 1), prompt[1:]]
        # An input that lies between two whole numbers may go either way, when its sum is taken in another order.
        torch.testing.assert_close(torch.tensor(actual), expected, rtol=0, atol=0.15)


def test_it_makes_a_difference(tmp_path: Path) -> None:
    folder = save_model(tmp_path)
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=5)
    logprobs = []
    for quantization in (None, "int8", "int4"):
        with make_llm(folder, quantization=quantization) as llm:
            logprobs.append(llm.generate(PROMPTS[0], params)[0].outputs[0].logprobs)
    assert logprobs[0] != logprobs[1] != logprobs[2]


@pytest.mark.parametrize("architecture", ["llama", "gemma2"])
def test_an_output_does_not_depend_on_its_batch_mates(architecture: str, tmp_path: Path) -> None:
    with make_llm(save_model(tmp_path, model=make_model(architecture)), quantization="int8", max_num_seqs=8) as llm:
        together = llm.generate(PROMPTS * 2, GREEDY)
        for prompt, output in zip(PROMPTS, together, strict=False):
            assert llm.generate(prompt, GREEDY)[0].outputs[0].token_ids == output.outputs[0].token_ids


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_no_linear_layer_keeps_its_weights(architecture: str, tmp_path: Path) -> None:
    model = loaded(save_model(tmp_path, model=make_model(architecture, tie_word_embeddings=True, head_dim=32)), "int8")
    linears = [module for module in model.modules() if isinstance(module, (nn.Linear, Conv1D, FastLinear))]
    assert not linears
    matrices = [name for name, parameter in model.named_parameters() if parameter.dim() == 2]
    assert all("embed" in name or name.startswith("transformer.w") for name in matrices)


def test_models_built_like_llama_stay_fused_and_hold_merged_weights_once(tmp_path: Path) -> None:
    model = loaded(save_model(tmp_path, model=make_model(head_dim=32)), "int4")
    assert FusedDecoder.can_run(model)
    layer = model.model.layers[0].self_attn
    parts = [layer.q_proj, layer.k_proj, layer.v_proj]
    x = torch.randn(5, 64)
    expected = torch.cat([part(x) for part in parts], dim=1)
    merged = Linear.merged(parts)
    assert torch.equal(merged(x), expected)
    assert torch.equal(torch.cat([part(x) for part in parts], dim=1), expected)
    assert len({part.packed.values.untyped_storage().data_ptr() for part in parts}) == 1


def test_layers_know_what_their_inputs_are_like_and_readers_of_the_same_input_agree(tmp_path: Path) -> None:
    model = make_model(head_dim=32)
    model.model.layers[0].input_layernorm.weight.data[5] = 30
    layer = loaded(save_model(tmp_path, model=model), "int8").model.layers[0]
    factors = layer.self_attn.q_proj.packed.input_factors
    assert factors.argmin() == 5
    assert factors[5] < 0.5 * factors.median()
    for other in (layer.self_attn.k_proj, layer.self_attn.v_proj):
        assert torch.equal(other.packed.input_factors, factors)
    assert torch.equal(layer.mlp.gate_proj.packed.input_factors, layer.mlp.up_proj.packed.input_factors)


def test_the_layer_before_the_logits_has_8_bits(tmp_path: Path) -> None:
    model = loaded(save_model(tmp_path, model=make_model()), "int4")
    assert model.lm_head.packed.bits == 8
    assert model.model.layers[0].mlp.down_proj.packed.bits == 4


def test_a_model_that_fails_alone_is_quantised_without_a_look_at_its_inputs() -> None:
    model = make_model()
    model.model.layers[1].mlp.act_fn = Failing()
    quantize_linears(model, "int8", "it")
    assert model.model.layers[0].mlp.down_proj.packed.input_factors is not None
    assert model.model.layers[1].mlp.down_proj.packed.input_factors is None
    assert type(model.lm_head) is PackedLinear


def test_code_that_reads_weights_gets_the_rounded_ones(tmp_path: Path) -> None:
    model = make_model()
    layer = loaded(save_model(tmp_path, model=model), "int8").model.layers[0].mlp.down_proj
    assert isinstance(layer, PackedLinear)
    original = model.model.layers[0].mlp.down_proj.weight
    assert layer.weight.dtype == torch.bfloat16
    torch.testing.assert_close(layer.weight.float(), original, rtol=0.02, atol=0.01)


def test_a_model_that_was_passed_is_refused_and_not_touched() -> None:
    model = make_model()
    with pytest.raises(ConfigError, match=r"quantization='int8' would change the LlamaForCausalLM that was passed"):
        make_llm(model, tokenizer=make_tokenizer(), quantization="int8")
    assert type(model.lm_head) is nn.Linear


@pytest.mark.parametrize("quantization", ["int3", "INT8", 8, True, "awq"])
def test_what_there_is_not_is_refused(quantization: Any) -> None:
    with pytest.raises(ConfigError, match=r"quantization=.* is not available; available: None, 'int8', 'int4'"):
        EngineConfig(quantization=quantization)


def test_encoders_are_refused(tmp_path: Path) -> None:
    config = BertConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64)
    BertModel(config).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="is an encoder"):
        load(tmp_path, None, EngineConfig(device="cpu", quantization="int8"))
