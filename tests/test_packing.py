"""A model that the engine loads has its bfloat16 weights packed, where that is faster, and still only once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from helpers_architectures import make_tiny
from helpers_models import ARCHITECTURES, make_model, save_model
from paged_backend import LLM, EngineConfig, SamplingParams
from paged_backend.model.decoder import FusedDecoder
from paged_backend.model.linear import PackedLinear
from paged_backend.model.loader import load
from paged_backend.model.packing import PackedEmbedding, pack_linears, unpack_what_was_read

WIDE = {"head_dim": 32}  # so that all products are large enough to be packed
TIED = {"tie_word_embeddings": True}
PROMPTS = [list(range(40, 75)), [7, 9], list(range(3, 20)) * 2]
GREEDY = SamplingParams(temperature=0, max_tokens=14, ignore_eos=True)


@pytest.fixture(autouse=True)
def faster_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if this CPU's products were: the kernel is right on all of them."""
    monkeypatch.setattr("paged_backend.model.packing.packs_bfloat16", lambda: True)


def loaded(folder: Path, dtype: str = "bfloat16") -> Any:
    return load(folder, None, EngineConfig(device="cpu", dtype=dtype)).model


def packed(folder: Path) -> Any:
    model = loaded(folder)
    pack_linears(model, alike=FusedDecoder.can_run(model))
    return model


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "gemma3_text", "phi3", "qwen3", "gpt_neox"])
@pytest.mark.parametrize("tied", [True, False])
@torch.inference_mode()
def test_a_packed_model_computes_the_same_and_holds_every_weight_once(
    architecture: str, tied: bool, tmp_path: Path
) -> None:
    folder = save_model(tmp_path, model=make_model(architecture, tie_word_embeddings=tied, head_dim=32))
    plain, model = loaded(folder), packed(folder)
    token_ids = torch.tensor([PROMPTS[0]])
    torch.testing.assert_close(model(token_ids).logits, plain(token_ids).logits, rtol=0.1, atol=0.3)
    assert not [module for module in model.modules() if type(module) is nn.Linear]
    matrices = [parameter for parameter in model.parameters() if parameter.dim() == 2]
    assert len(matrices) == (0 if tied else 1)  # the embedding's own
    assert model.dtype == torch.bfloat16 and model.device.type == "cpu"


@torch.inference_mode()
def test_embeddings_take_their_rows_from_the_packed_weights(tmp_path: Path) -> None:
    folder = save_model(tmp_path, model=make_model("gemma3_text", **TIED))  # whose embeddings are multiplied by a scale
    plain, model = loaded(folder).get_input_embeddings(), packed(folder).get_input_embeddings()
    token_ids = torch.tensor([[0, 5, 99], [5, 5, 1]])
    assert isinstance(model, PackedEmbedding)
    assert torch.equal(model(token_ids), plain(token_ids))
    assert torch.equal(model.weight, plain.weight)
    assert torch.equal(model(token_ids[:, :0]), plain(token_ids[:, :0]))


def test_models_built_like_llama_stay_fused(tmp_path: Path) -> None:
    model = packed(save_model(tmp_path, model=make_model(**TIED | WIDE)))
    assert FusedDecoder.can_run(model)
    FusedDecoder(model)
    layer = model.model.layers[0].self_attn
    parts = [layer.q_proj, layer.k_proj, layer.v_proj]
    assert len({part.packed.values.untyped_storage().data_ptr() for part in parts}) == 1


def test_layers_that_are_merged_are_packed_all_or_none(tmp_path: Path) -> None:
    model = packed(save_model(tmp_path, model=make_model("llama", head_dim=8)))  # k_proj has 16 columns
    layer = model.model.layers[0]
    assert type(layer.self_attn.q_proj) is type(layer.self_attn.k_proj) is type(layer.self_attn.o_proj) is nn.Linear
    assert type(layer.mlp.gate_proj) is type(layer.mlp.up_proj) is PackedLinear
    assert FusedDecoder.can_run(model)


def test_where_nothing_is_merged_a_narrow_layer_keeps_no_other_from_being_packed(tmp_path: Path) -> None:
    model = packed(save_model(tmp_path, model=make_model("gemma2", head_dim=8)))
    attention = model.model.layers[0].self_attn
    assert type(attention.k_proj) is nn.Linear
    assert type(attention.o_proj) is PackedLinear


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_weights_that_are_not_bfloat16_stay(dtype: str, tmp_path: Path) -> None:
    model = loaded(save_model(tmp_path, model=make_model(**WIDE)), dtype)
    before = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    pack_linears(model)
    assert {name: parameter.data_ptr() for name, parameter in model.named_parameters()} == before


@torch.inference_mode()
def test_layers_whose_weights_are_read_are_plain_again(tmp_path: Path) -> None:
    folder = save_model(tmp_path, model=make_model("llama", **TIED | WIDE))
    plain, model = loaded(folder), packed(folder)
    assert model.lm_head.weight.dtype == torch.bfloat16
    unpack_what_was_read(model)
    assert type(model.lm_head) is nn.Linear and type(model.model.embed_tokens) is nn.Embedding
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert torch.equal(model.lm_head.weight, plain.lm_head.weight)
    assert isinstance(model.model.layers[0].mlp.up_proj, PackedLinear)


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "gpt_neox", "bloom", "mamba2", "qwen3_next"])
def test_an_engine_on_packed_weights_gives_each_sequence_its_own_text(architecture: str, tmp_path: Path) -> None:
    model = make_model(architecture) if architecture in ARCHITECTURES else make_tiny(architecture)
    folder = save_model(tmp_path, model=model)
    with LLM(folder, dtype="bfloat16", kv_cache_memory="4MiB", max_num_seqs=8) as llm:
        together = llm.generate(PROMPTS * 2, GREEDY)
        for prompt, output in zip(PROMPTS, together, strict=False):
            assert llm.generate(prompt, GREEDY)[0].outputs[0].token_ids == output.outputs[0].token_ids


def test_a_model_that_was_passed_is_not_touched() -> None:
    model = make_model(**WIDE | TIED).bfloat16()
    parameters = {name: id(parameter) for name, parameter in model.named_parameters()}
    with LLM(model, kv_cache_memory="4MiB") as llm:
        llm.generate(PROMPTS, GREEDY)
    assert {name: id(parameter) for name, parameter in model.named_parameters()} == parameters
