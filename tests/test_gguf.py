"""GGUF files: every type of packed weights, whole and in parts."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type

from paged_backend import LLM, SamplingParams
from paged_backend.config import EngineConfig
from paged_backend.errors import ModelError
from paged_backend.model.linear import PackedLinear
from paged_backend.model.loader import load

NUM_LAYERS, HIDDEN, VOCAB = 4, 256, 64
SHAPES = {
    "attn_q": (HIDDEN, HIDDEN),
    "attn_k": (HIDDEN // 2, HIDDEN),
    "attn_v": (HIDDEN // 2, HIDDEN),
    "attn_output": (HIDDEN, HIDDEN),
    "ffn_gate": (HIDDEN, HIDDEN),
    "ffn_up": (HIDDEN, HIDDEN),
    "ffn_down": (HIDDEN, HIDDEN),
}
PLAIN = (Type.BF16, Type.F16, Type.F32)
PACKED_TYPES = (
    *(Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1, Type.Q8_0, Type.Q2_K, Type.Q3_K, Type.Q4_K, Type.Q5_K, Type.Q6_K),
    *(Type.IQ1_S, Type.IQ1_M, Type.IQ2_XXS, Type.IQ2_XS, Type.IQ2_S, Type.IQ3_XXS, Type.IQ3_S, Type.IQ4_NL),
    *(Type.IQ4_XS, Type.TQ1_0, Type.TQ2_0, Type.MXFP4, Type.NVFP4, *PLAIN),
)


def packed(shape: tuple[int, int], kind: Type, seed: int) -> np.ndarray:
    """Random blocks. No pair of such bytes is a large or infinite scale."""
    block, size = gguf.GGML_QUANT_SIZES[kind]
    values = np.random.default_rng(seed).integers(0x10, 0x2C, (shape[0], shape[1] // block * size), np.uint8)
    return values.view({Type.F16: np.float16, Type.F32: np.float32}.get(kind, np.uint8))


def tensors_of_all_types() -> dict[str, tuple[np.ndarray, Type]]:
    names = [f"blk.{layer}.{name}.weight" for layer in range(NUM_LAYERS) for name in SHAPES]
    kinds = [PACKED_TYPES[i % len(PACKED_TYPES)] for i in range(len(names))]
    return {
        name: (packed(SHAPES[name.split(".")[2]], kind, seed), kind)
        for seed, (name, kind) in enumerate(zip(names, kinds, strict=True))
    }


def write(path: Path, tensors: dict[str, tuple[np.ndarray, Type]], *, per_part: int = 0) -> Path:
    """A tiny Llama with these weights; in parts of so many tensors, if that is given."""
    writer = gguf.GGUFWriter(path, "llama", split_max_tensors=per_part)
    writer.add_name("tiny")
    writer.add_block_count(NUM_LAYERS)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(HIDDEN)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_context_length(64)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(VOCAB)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["a", "b", "ab", *(f"<{i}>" for i in range(3, VOCAB))])
    writer.add_token_merges(["a b"])
    rng = np.random.default_rng(0)
    writer.add_tensor("token_embd.weight", rng.normal(size=(VOCAB, HIDDEN)).astype(np.float32))
    writer.add_tensor("output.weight", rng.normal(size=(VOCAB, HIDDEN)).astype(np.float32))
    for name in ["output_norm", *(f"blk.{i}.{norm}" for i in range(NUM_LAYERS) for norm in ("attn_norm", "ffn_norm"))]:
        writer.add_tensor(f"{name}.weight", np.ones(HIDDEN, np.float32))
    for name, (data, kind) in tensors.items():
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def unpacked(tensors: dict[str, tuple[np.ndarray, Type]]) -> dict[str, tuple[np.ndarray, Type]]:
    return {name: (gguf.dequantize(data, kind), Type.F32) for name, (data, kind) in tensors.items()}


def state_of(path: Path, folder: Path) -> dict[str, torch.Tensor]:
    return model_of(path, folder, quantization="unpacked").state_dict()


def model_of(path: Path, folder: Path, *, quantization: str | None = None, dtype: str = "float32") -> Any:
    config = EngineConfig(device="cpu", dtype=dtype, cache_dir=str(folder), quantization=quantization)
    return load(path, None, config).model


def quantized(kind: Type) -> dict[str, tuple[np.ndarray, Type]]:
    """Random weights, rounded as the gguf package does; random blocks of types that it cannot write."""
    rng = np.random.default_rng(0)
    names = [f"blk.{layer}.{name}.weight" for layer in range(NUM_LAYERS) for name in SHAPES]
    tensors = {}
    for seed, name in enumerate(names):
        shape = SHAPES[name.split(".")[2]]
        weight = rng.normal(size=shape).astype(np.float32) / 16
        try:
            tensors[name] = (gguf.quantize(weight, kind), kind)
        except NotImplementedError:
            tensors[name] = (packed(shape, kind, seed), kind)
    return tensors


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.isfinite(tensor).all(), name
        assert torch.equal(tensor, other[name]), name


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """The weights of all types, unpacked by the gguf package."""
    folder = tmp_path_factory.mktemp("plain")
    return state_of(write(folder / "plain.gguf", unpacked(tensors_of_all_types())), folder)


def test_every_type_is_unpacked_and_said_to_be(
    plain: dict[str, torch.Tensor], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        state = state_of(write(tmp_path / "packed.gguf", tensors_of_all_types()), tmp_path)
    assert_same(state, plain)
    (line,) = [record.message for record in caplog.records if "unpacked to float32" in record.message]
    assert all(kind.name in line for kind in PACKED_TYPES[:-3])


@pytest.mark.parametrize("kind", [kind for kind in PACKED_TYPES if kind not in PLAIN], ids=lambda kind: kind.name)
def test_linear_layers_stay_packed_and_hold_what_the_file_does(
    kind: Type, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Q4_0 and Q8_0 to the last bit, whatever the type of the engine, and all others but for rounding to 8 bits."""
    path = write(tmp_path / "packed.gguf", quantized(kind))
    dense = model_of(path, tmp_path, quantization="unpacked")
    bits = 4 if kind is Type.Q4_0 else 8
    step = 0 if kind in (Type.Q4_0, Type.Q8_0) else 1 / 254  # of the largest weight among 32 neighbours
    for dtype in ("float32", "bfloat16"):
        with caplog.at_level(logging.INFO):
            model = model_of(path, tmp_path, dtype=dtype)
        assert f"kept packed: 2 million numbers of {bits} bits" in caplog.text
        for name, right in dense.named_modules():
            if isinstance(right, torch.nn.Linear) and name != "lm_head":
                layer = model.get_submodule(name)
                assert isinstance(layer, PackedLinear) and layer.packed.bits == bits
                most = right.weight.view(-1, 32).abs().amax(1, keepdim=True)
                difference = layer.packed.unpack().float() - right.weight
                assert (difference.view(-1, 32).abs() <= most * step * 1.01).all()
                x = torch.randn(5, layer.in_features, generator=torch.Generator().manual_seed(1))
                y, expected = layer(x.to(model.dtype)).float(), right(x)
                assert (y - expected).norm() < 0.02 * expected.norm()
        assert isinstance(model.lm_head, torch.nn.Linear)  # which is not packed in the file


@pytest.mark.parametrize("quantization", [None, "unpacked"])
def test_conversion_prints_nothing_where_nobody_watches(
    quantization: str | None, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model_of(write(tmp_path / "packed.gguf", quantized(Type.Q8_0)), tmp_path, quantization=quantization)
    assert "".join(capfd.readouterr()) == ""


def test_what_is_not_packed_is_in_the_type_of_the_engine(tmp_path: Path) -> None:
    path = write(tmp_path / "packed.gguf", quantized(Type.Q8_0))
    config = EngineConfig(device="cpu", dtype="bfloat16", cache_dir=str(tmp_path))
    assert {parameter.dtype for parameter in load(path, None, config).model.parameters()} == {torch.bfloat16}


def test_what_stays_packed_is_served_as_it_computes(tmp_path: Path) -> None:
    path = write(tmp_path / "packed.gguf", quantized(Type.Q8_0))
    model = model_of(path, tmp_path)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    with LLM(path, dtype="float32", kv_cache_memory="4MiB", cache_dir=str(tmp_path)) as llm:
        (output,) = llm.generate(list(range(3, 20)), params)
    right = model.generate(torch.arange(3, 20)[None], max_new_tokens=8, do_sample=False, eos_token_id=None)
    assert output.outputs[0].token_ids == right[0, 17:].tolist()


def test_a_model_in_parts_is_joined_whichever_part_is_named(plain: dict[str, torch.Tensor], tmp_path: Path) -> None:
    write(tmp_path / "tiny.gguf", tensors_of_all_types(), per_part=12)
    parts = sorted(tmp_path.glob("*.gguf"))
    assert [part.name for part in parts] == [f"tiny-{number:05}-of-00004.gguf" for number in range(1, 5)]
    assert_same(state_of(parts[2], tmp_path), plain)
    made = list((tmp_path / "models").iterdir())
    assert_same(state_of(parts[0], tmp_path), plain)
    assert list((tmp_path / "models").iterdir()) == made  # of which nothing is left but the folder
    parts[1].unlink()
    with pytest.raises(ModelError, match=r"tiny-00002-of-00004\.gguf is not beside it"):
        state_of(parts[0], tmp_path)


def test_a_type_that_nobody_can_unpack_is_named(tmp_path: Path) -> None:
    tensors: dict[str, Any] = tensors_of_all_types()
    name = next(iter(tensors))
    tensors[name] = (packed(SHAPES["attn_q"], Type.Q1_0, 0), Type.Q1_0)
    with pytest.raises(ModelError, match=r"type Q1_0.*Q8_0"):
        state_of(write(tmp_path / "odd.gguf", tensors), tmp_path)
