"""Checkpoints that somebody else has quantised: each holds what a dense model, which the test knows, holds."""

from __future__ import annotations

import json
import logging
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from helpers_models import make_model, save_model
from helpers_packed import GROUP, awq, gptq, random_layer
from paged_backend import LLM, ConfigError, ModelError, SamplingParams
from paged_backend.config import EngineConfig
from paged_backend.model.linear import PackedLinear
from paged_backend.model.loader import load
from paged_backend.model.package_weights import unpack

WIDE = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 32}  # so that layers are large enough for our kernels


def save_packed(
    folder: Path, settings: dict[str, Any], make: Any, *, shape: Mapping[str, Any] | None = None, **options: Any
) -> dict[str, Tensor]:
    """Replace the linear layers of a checkpoint by packed ones; the dense weights by name."""
    save_model(
        folder, model=make_model("llama", **(shape or {})), config={"quantization_config": settings, "dtype": "float16"}
    )
    state = load_file(folder / "model.safetensors")
    dense = dict(state)
    for seed, name in enumerate(sorted(state)):
        if name.endswith("_proj.weight"):
            tensors, dense[name] = make(tuple(state.pop(name).shape), seed, **options)
            state |= {name.removesuffix("weight") + part: tensor for part, tensor in tensors.items()}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    return dense


def assert_holds(folder: Path, dense: dict[str, Tensor]) -> None:
    """The model that is loaded has these weights, and runs on its own code as on the fused decoder."""
    loaded = load(folder, None, EngineConfig(device="cpu", dtype="float32", quantization="unpacked"))
    state = loaded.model.state_dict()
    assert state.keys() == dense.keys()
    for name, tensor in dense.items():
        torch.testing.assert_close(state[name], tensor, rtol=1e-6, atol=1e-6)


def assert_keeps(
    folder: Path, dense: dict[str, Tensor], *, bits: int, step: float = 0, shape: Mapping[str, Any] = WIDE
) -> None:
    """The large layers are packed, with numbers of so many bits. None is further from its weight than so many steps of
    8 bits, of the largest of 32 neighbours; logits are those of the weights, but for the rounding of inputs."""
    loaded = load(folder, None, EngineConfig(device="cpu", dtype="float32")).model
    packed = {name: module for name, module in loaded.named_modules() if isinstance(module, PackedLinear)}
    assert len(packed) >= 3
    for name, layer in packed.items():
        right = dense[f"{name}.weight"].float()
        assert layer.packed.bits == bits
        most = right.view(-1, 32).abs().amax(1, keepdim=True) / 127
        assert ((layer.weight - right).view(-1, 32).abs() <= most * step + 1e-6).all()
    model = make_model("llama", **shape)
    model.load_state_dict(dense)
    token_ids = torch.arange(40, 60)[None]
    logits, expected = loaded(token_ids).logits, model(token_ids).logits
    assert (logits - expected).norm() < 0.05 * expected.norm()


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("version", [1, 2])
def test_gptq_is_unpacked(
    tmp_path: Path, bits: int, act_order: bool, version: int, caplog: pytest.LogCaptureFixture
) -> None:
    settings = {"quant_method": "gptq", "bits": bits, "group_size": GROUP, "desc_act": act_order, "sym": False}
    settings |= {"checkpoint_format": "gptq_v2"} if version == 2 else {}
    dense = save_packed(tmp_path, settings, gptq, bits=bits, act_order=act_order, version=version)
    with caplog.at_level(logging.INFO):
        assert_holds(tmp_path, dense)
    assert "quantised by gptq, are unpacked to torch.float32" in caplog.text


@pytest.mark.parametrize(
    ("bits", "act_order", "is_symmetric", "kept_bits", "step"),
    [(4, False, True, 4, 0), (4, False, False, 8, 0), (8, False, True, 8, 0), (8, False, False, 8, 0.51),
     (4, True, True, 8, 0.51), (4, True, False, 8, 0.51), (8, True, True, 8, 0.51), (8, True, False, 8, 0.51),
     (2, False, False, 4, 0), (2, True, False, 8, 0.51)],
)  # fmt: skip
def test_gptq_is_kept_packed(
    tmp_path: Path,
    bits: int,
    act_order: bool,
    is_symmetric: bool,
    kept_bits: int,
    step: float,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As it is if its numbers, less their zeros, fit in 8 bits; else rounded again to 8."""
    settings = {"quant_method": "gptq", "bits": bits, "group_size": GROUP, "desc_act": act_order, "sym": is_symmetric}
    options = {"bits": bits, "act_order": act_order, "version": 1, "is_symmetric": is_symmetric}
    dense = save_packed(tmp_path, settings, gptq, shape=WIDE, **options)
    with caplog.at_level(logging.INFO):
        assert_keeps(tmp_path, dense, bits=kept_bits, step=step)
    assert "quantised by gptq, are kept packed" in caplog.text


@pytest.mark.parametrize("group", [16, 64, 128, -1])
def test_groups_of_any_size_are_kept_packed(group: int, tmp_path: Path) -> None:
    """-1: one scale for all inputs of an output."""
    shape = WIDE | {"hidden_size": 128}
    settings = {"quant_method": "gptq", "bits": 4, "group_size": group, "desc_act": False, "sym": True}
    options = {"bits": 4, "act_order": False, "version": 1, "is_symmetric": True, "group": group}
    dense = save_packed(tmp_path / "gptq", settings, gptq, shape=shape, **options)
    assert_keeps(tmp_path / "gptq", dense, bits=4, shape=shape)
    settings = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "GEMM"}
    dense = save_packed(tmp_path / "awq", settings, awq, shape=shape, group=group)
    assert_keeps(tmp_path / "awq", dense, bits=8, shape=shape)


def test_awq_is_unpacked(tmp_path: Path) -> None:
    settings = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
    assert_holds(tmp_path, save_packed(tmp_path, settings, awq))


def test_an_unpacked_model_generates_what_the_dense_one_does(tmp_path: Path) -> None:
    settings = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
    dense = make_model("llama")
    dense.load_state_dict(save_packed(tmp_path, settings, awq))
    params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
    with LLM(tmp_path, dtype="float32", kv_cache_memory="4MiB", quantization="unpacked") as llm:
        (output,) = llm.generate(list(range(40, 60)), params)
    right = dense.generate(torch.arange(40, 60)[None], max_new_tokens=10, do_sample=False, eos_token_id=None)
    assert output.outputs[0].token_ids == right[0, 20:].tolist()


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"quant_method": "gptq", "bits": 3}, "GPTQ with 3 bits.*available: 2, 4, 8 bits"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "'marlin'"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "'gemv'.*'gemm'"),
        ({"quant_method": "vptq"}, "cannot be loaded.*can be loaded: GGUF"),
        ({"quant_method": "never heard of"}, "lacks weights.*can be loaded: GGUF"),
    ],
)
def test_what_cannot_be_unpacked_is_refused_and_alternatives_are_named(
    tmp_path: Path, settings: dict[str, Any], match: str
) -> None:
    save_packed(tmp_path, settings, gptq, bits=4, act_order=False, version=1)
    with pytest.raises(ModelError, match=match):
        load(tmp_path, None, EngineConfig(device="cpu"))


def test_a_bias_that_has_no_place_is_not_dropped_unless_it_is_zero(tmp_path: Path) -> None:
    save_packed(tmp_path, {"quant_method": "gptq", "bits": 4}, gptq, bits=4, act_order=False, version=1)
    state = load_file(tmp_path / "model.safetensors")
    state["model.layers.0.mlp.up_proj.bias"] += 1
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"no place for.*layers\.0\.mlp\.up_proj\.bias"):
        load(tmp_path, None, EngineConfig(device="cpu"))


# --- sharded and pickled files ---


def test_files_in_parts_are_read_together(tmp_path: Path) -> None:
    settings = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
    dense = save_packed(tmp_path, settings, awq)
    state = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    names = sorted(state)
    weight_map = {name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(names)}
    for part in set(weight_map.values()):
        save_file({name: state[name] for name in names if weight_map[name] == part}, tmp_path / part)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    assert_holds(tmp_path, dense)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ModelError, match=r"lacks model-00002-of-00002\.safetensors"):
        load(tmp_path, None, EngineConfig(device="cpu"))


@pytest.mark.parametrize("is_packed", [True, False])
def test_pickled_weights_run_no_code(tmp_path: Path, is_packed: bool) -> None:
    settings = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
    dense = save_packed(tmp_path, settings, awq) if is_packed else load_file(save_model(tmp_path) / "model.safetensors")
    state = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    torch.save(state, tmp_path / "pytorch_model.bin")
    assert_holds(tmp_path, dense)
    torch.save(state | {"more": Path()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"cannot be .*more than tensors.*pathlib.*save it as safetensors") as caught:
        load(tmp_path, None, EngineConfig(device="cpu"))
    assert "weights_only" not in str(caught.value)


def test_block_wise_fp8_is_unpacked_by_transformers(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    settings = {"quant_method": "fp8", "weight_block_size": [16, 16], "activation_scheme": "dynamic"}
    save_model(tmp_path, model=make_model("llama"), config={"quantization_config": settings, "dtype": "bfloat16"})
    state = load_file(tmp_path / "model.safetensors")
    dense = dict(state)
    for name in sorted(state):
        if name.endswith("_proj.weight"):
            scale = torch.rand(state[name].shape[0] // 16, state[name].shape[1] // 16) + 0.5
            state[name] = state[name].to(torch.float8_e4m3fn)
            state[f"{name}_scale_inv"] = scale
            dense[name] = state[name].float() * scale.repeat_interleave(16, 0).repeat_interleave(16, 1)
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    loaded = load(tmp_path, None, EngineConfig(device="cpu", dtype="float32"))
    for name, tensor in loaded.model.state_dict().items():
        torch.testing.assert_close(tensor.float(), dense[name].float(), rtol=1e-2, atol=1e-3)


# --- what transformers loads ---


def bitsandbytes_config(bits: int) -> Any:
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(load_in_8bit=bits == 8, load_in_4bit=bits == 4)


def torchao_config() -> Any:
    from torchao.quantization import Int8WeightOnlyConfig
    from transformers import TorchAoConfig

    return TorchAoConfig(Int8WeightOnlyConfig())


def save_compressed(folder: Path, shape: Mapping[str, Any]) -> tuple[Any, dict[str, Tensor]]:
    """In the form that LLM Compressor writes for 4 bits; the dense model, and the tensors of its linear layers."""
    compressors = pytest.importorskip("compressed_tensors.compressors")
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP}
    settings = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }
    model = make_model("llama", **shape)
    save_model(folder, model=model, config={"quantization_config": settings, "dtype": "float32"})
    state = load_file(folder / "model.safetensors")
    dense = dict(state)
    for seed, name in enumerate(sorted(state)):
        if name.endswith("_proj.weight"):
            integers, _, scales, groups = random_layer(tuple(state.pop(name).shape), 4, seed)
            integers, scales = integers - 8, scales.float().T.contiguous()
            dense[name] = integers * scales[:, groups]
            state[f"{name}_packed"] = compressors.pack_to_int32(integers.to(torch.int8), 4)
            state[f"{name}_scale"] = scales
            state[f"{name}_shape"] = torch.tensor(integers.shape)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    model.load_state_dict(dense)
    return model, dense


def save_by_package(
    folder: Path, package: str, shape: Mapping[str, Any] | None = None
) -> tuple[Any, dict[str, Tensor]]:
    """A checkpoint as a package writes it; a model that computes with the same weights, and these, unpacked."""
    if package == "compressed_tensors":
        return save_compressed(folder, shape or {})
    pytest.importorskip(package.partition(" ")[0])
    make = {"bitsandbytes 8": lambda: bitsandbytes_config(8), "bitsandbytes 4": lambda: bitsandbytes_config(4)}
    with tempfile.TemporaryDirectory() as plain:
        save_model(Path(plain), model=make_model("llama", **(shape or {})))
        model = AutoModelForCausalLM.from_pretrained(
            plain, quantization_config=make.get(package, torchao_config)(), device_map="cpu", dtype=torch.float32
        )
    model.save_pretrained(folder)
    dense = {}
    for name, module in model.named_modules():
        if name.endswith("_proj"):
            dense[f"{name}.weight"] = module(torch.eye(module.in_features)).T.float()
    return model, dense


PACKAGES = ("bitsandbytes 8", "bitsandbytes 4", "torchao", "compressed_tensors")


@pytest.mark.filterwarnings("ignore")  # these packages warn of much
@pytest.mark.parametrize("package", PACKAGES)
def test_packages_of_transformers_are_served(package: str, tmp_path: Path) -> None:
    model, _ = save_by_package(tmp_path, package)
    prompt = list(range(40, 60))
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    with LLM(tmp_path, dtype="float32", kv_cache_memory="4MiB") as llm:
        (output,) = llm.generate(prompt, params)
    right = model.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False, eos_token_id=None)
    assert output.outputs[0].token_ids == right[0, len(prompt) :].tolist()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("package", PACKAGES)
def test_what_a_package_has_packed_is_unpacked_if_asked_for(
    package: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _, dense = save_by_package(tmp_path, package)
    with caplog.at_level(logging.INFO):
        loaded = load(tmp_path, None, EngineConfig(device="cpu", dtype="float32", quantization="unpacked"))
    assert "is unpacked to torch.float32" in caplog.text
    assert not loaded.is_quantized
    layers = {name: module for name, module in loaded.model.named_modules() if name.endswith("_proj")}
    assert {f"{name}.weight" for name in layers} <= dense.keys()
    for name, layer in layers.items():
        assert type(layer) is torch.nn.Linear and type(layer.weight) is torch.nn.Parameter
        torch.testing.assert_close(layer.weight.detach(), dense[f"{name}.weight"], rtol=0.01, atol=1e-3)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("package", PACKAGES)
def test_what_a_package_has_packed_is_rounded_anew_if_asked_for(package: str, tmp_path: Path) -> None:
    _, dense = save_by_package(tmp_path, package, WIDE)
    model = load(tmp_path, None, EngineConfig(device="cpu", dtype="float32", quantization="int8")).model
    layers = {name: module for name, module in model.named_modules() if name.endswith("_proj")}
    for name, layer in layers.items():
        assert isinstance(layer, PackedLinear) and layer.packed.bits == 8
        right = dense[f"{name}.weight"]
        assert (layer.weight - right).norm() < 0.02 * right.norm()


def test_what_cannot_be_unpacked_is_not_served_packed_instead() -> None:
    from transformers import EetqConfig
    from transformers.quantizers.quantizer_eetq import EetqHfQuantizer

    model = make_model("llama")
    model.hf_quantizer = EetqHfQuantizer(EetqConfig())
    with pytest.raises(ConfigError, match=r"quantization='unpacked'.*quantised by eetq.*leave it at None"):
        unpack(model, "eetq", "unpacked", "some model")


@pytest.mark.filterwarnings("ignore")
def test_a_packed_model_that_was_passed_is_not_changed(tmp_path: Path) -> None:
    model, _ = save_by_package(tmp_path, "torchao")
    with pytest.raises(ConfigError, match=r"quantization='unpacked' would change the LlamaForCausalLM"):
        load(model, None, EngineConfig(device="cpu", quantization="unpacked"))
