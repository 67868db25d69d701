"""Families whose code came with their checkpoints: tiny ones in the original layout give what that code computes.

What it computes is stated here in plain torch, on the original names and shapes of the weights.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import normalize, silu

from helpers_packed import GROUP, gptq
from paged_backend import LLM, ModelError, SamplingParams
from paged_backend.config import EngineConfig
from paged_backend.model.loader import load

HIDDEN, HEADS, KV_HEADS, HEAD, INNER, LAYERS, VOCAB = 64, 4, 2, 16, 96, 2, 80
IDS = [(7 * i) % VOCAB for i in range(23)]
Weights = dict[str, Tensor]


class Family(NamedTuple):
    """`logits` is what the original code computes: of ids, weights and `config.json`."""

    settings: dict[str, Any]
    shapes: dict[str, tuple[int, ...]]
    logits: Callable[[Weights, dict[str, Any]], Tensor]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight


def rotate_halves(x: Tensor, base: float = 10000.0) -> Tensor:
    """[T, H, D]: the first half of each head is turned with the second."""
    half = x.shape[-1] // 2
    angles = torch.arange(len(x))[:, None] * base ** (-torch.arange(half) / half)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def rotate_pairs(x: Tensor, base: float) -> Tensor:
    """[T, H, D]: in the first half of each head, neighbours are turned; the second half stays."""
    num_pairs = x.shape[-1] // 4
    angles = torch.arange(len(x))[:, None] * base ** (-torch.arange(num_pairs) / num_pairs)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    turned, rest = x[..., : 2 * num_pairs], x[..., 2 * num_pairs :]
    even, odd = turned[..., 0::2], turned[..., 1::2]
    turned = torch.stack([even * cos - odd * sin, odd * cos + even * sin], dim=-1).flatten(-2)
    return torch.cat([turned, rest], dim=-1)


def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """[T, H, D] each, with fewer heads in key and value, which several query heads share -> [T, H * D]."""
    repeats = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    scores = torch.einsum("qhd,khd->hqk", query, key) / query.shape[-1] ** 0.5
    scores = scores.masked_fill(torch.ones_like(scores[0]).triu(1).bool(), float("-inf"))
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), value).flatten(1)


def qwen_logits(w: Weights, settings: dict[str, Any]) -> Tensor:
    eps = settings["layer_norm_epsilon"]
    x = w["transformer.wte.weight"][IDS]
    for layer in range(LAYERS):
        p = f"transformer.h.{layer}."
        y = rms_norm(x, w[f"{p}ln_1.weight"], eps)
        qkv = (y @ w[f"{p}attn.c_attn.weight"].T + w[f"{p}attn.c_attn.bias"]).view(len(IDS), 3, HEADS, HEAD)
        query, key, value = qkv.unbind(1)
        x = x + attend(rotate_halves(query), rotate_halves(key), value) @ w[f"{p}attn.c_proj.weight"].T
        y = rms_norm(x, w[f"{p}ln_2.weight"], eps)
        x = x + (y @ w[f"{p}mlp.w1.weight"].T * silu(y @ w[f"{p}mlp.w2.weight"].T)) @ w[f"{p}mlp.c_proj.weight"].T
    return rms_norm(x, w["transformer.ln_f.weight"], eps) @ w["lm_head.weight"].T


def baichuan_logits(w: Weights, settings: dict[str, Any]) -> Tensor:
    eps = settings["rms_norm_eps"]
    x = w["model.embed_tokens.weight"][IDS]
    for layer in range(LAYERS):
        p = f"model.layers.{layer}."
        y = rms_norm(x, w[f"{p}input_layernorm.weight"], eps)
        query, key, value = (y @ w[f"{p}self_attn.W_pack.weight"].T).view(len(IDS), 3, HEADS, HEAD).unbind(1)
        x = x + attend(rotate_halves(query), rotate_halves(key), value) @ w[f"{p}self_attn.o_proj.weight"].T
        y = rms_norm(x, w[f"{p}post_attention_layernorm.weight"], eps)
        gated = silu(y @ w[f"{p}mlp.gate_proj.weight"].T) * (y @ w[f"{p}mlp.up_proj.weight"].T)
        x = x + gated @ w[f"{p}mlp.down_proj.weight"].T
    head = w["lm_head.weight"]
    return rms_norm(x, w["model.norm.weight"], eps) @ (normalize(head) if len(head) == 125696 else head).T


def internlm2_logits(w: Weights, settings: dict[str, Any]) -> Tensor:
    eps, base = settings["rms_norm_eps"], settings["rope_theta"]
    x = w["model.tok_embeddings.weight"][IDS]
    for layer in range(LAYERS):
        p = f"model.layers.{layer}."
        y = rms_norm(x, w[f"{p}attention_norm.weight"], eps)
        groups = (y @ w[f"{p}attention.wqkv.weight"].T).view(len(IDS), KV_HEADS, HEADS // KV_HEADS + 2, HEAD)
        query, key, value = groups[:, :, :-2].flatten(1, 2), groups[:, :, -2], groups[:, :, -1]
        attended = attend(rotate_halves(query, base), rotate_halves(key, base), value)
        x = x + attended @ w[f"{p}attention.wo.weight"].T
        y = rms_norm(x, w[f"{p}ffn_norm.weight"], eps)
        gated = silu(y @ w[f"{p}feed_forward.w1.weight"].T) * (y @ w[f"{p}feed_forward.w3.weight"].T)
        x = x + gated @ w[f"{p}feed_forward.w2.weight"].T
    return rms_norm(x, w["model.norm.weight"], eps) @ w["output.weight"].T


def chatglm_logits(w: Weights, settings: dict[str, Any]) -> Tensor:
    eps, base = settings["layernorm_epsilon"], 10000.0 * settings.get("rope_ratio", 1)
    x = w["transformer.embedding.word_embeddings.weight"][IDS]
    for layer in range(LAYERS):
        p = f"transformer.encoder.layers.{layer}."
        y = rms_norm(x, w[f"{p}input_layernorm.weight"], eps)
        qkv = y @ w[f"{p}self_attention.query_key_value.weight"].T + w[f"{p}self_attention.query_key_value.bias"]
        heads = qkv.view(len(IDS), HEADS + 2 * KV_HEADS, HEAD)
        query, key, value = heads.split([HEADS, KV_HEADS, KV_HEADS], 1)
        attended = attend(rotate_pairs(query, base), rotate_pairs(key, base), value)
        x = x + attended @ w[f"{p}self_attention.dense.weight"].T
        y = rms_norm(x, w[f"{p}post_attention_layernorm.weight"], eps)
        gate, up = (y @ w[f"{p}mlp.dense_h_to_4h.weight"].T).chunk(2, -1)
        x = x + (silu(gate) * up) @ w[f"{p}mlp.dense_4h_to_h.weight"].T
    return rms_norm(x, w["transformer.encoder.final_layernorm.weight"], eps) @ w["transformer.output_layer.weight"].T


def in_layers(prefix: str, shapes: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    return {f"{prefix}.{layer}.{name}": shape for layer in range(LAYERS) for name, shape in shapes.items()}


ALL_QKV, GROUPED_QKV = 3 * HEADS * HEAD, (HEADS + 2 * KV_HEADS) * HEAD
MLP = {"mlp.gate_proj.weight": (INNER, HIDDEN), "mlp.up_proj.weight": (INNER, HIDDEN)}
QWEN = Family(
    {
        "model_type": "qwen",
        "architectures": ["QWenLMHeadModel"],
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": 2 * INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "kv_channels": HEAD,
        "seq_length": 64,
        "layer_norm_epsilon": 1e-6,
        "rotary_emb_base": 10000,
        "rotary_pct": 1.0,
        "no_bias": True,
        "use_dynamic_ntk": True,
        "use_logn_attn": True,
        "tie_word_embeddings": False,
    },
    {
        "transformer.wte.weight": (VOCAB, HIDDEN),
        "transformer.ln_f.weight": (HIDDEN,),
        "lm_head.weight": (VOCAB, HIDDEN),
        **in_layers(
            "transformer.h",
            {
                "ln_1.weight": (HIDDEN,),
                "attn.c_attn.weight": (ALL_QKV, HIDDEN),
                "attn.c_attn.bias": (ALL_QKV,),
                "attn.c_proj.weight": (HIDDEN, HIDDEN),
                "ln_2.weight": (HIDDEN,),
                "mlp.w1.weight": (INNER, HIDDEN),
                "mlp.w2.weight": (INNER, HIDDEN),
                "mlp.c_proj.weight": (HIDDEN, INNER),
            },
        ),
    },
    qwen_logits,
)
BAICHUAN = Family(
    {
        "model_type": "baichuan",
        "architectures": ["BaiChuanForCausalLM"],
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "hidden_act": "silu",
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
    },
    {
        "model.embed_tokens.weight": (VOCAB, HIDDEN),
        "model.norm.weight": (HIDDEN,),
        "lm_head.weight": (VOCAB, HIDDEN),
        **in_layers(
            "model.layers",
            {
                "input_layernorm.weight": (HIDDEN,),
                "self_attn.W_pack.weight": (ALL_QKV, HIDDEN),
                "self_attn.o_proj.weight": (HIDDEN, HIDDEN),
                "self_attn.rotary_emb.inv_freq": (HEAD // 2,),
                "post_attention_layernorm.weight": (HIDDEN,),
                "mlp.down_proj.weight": (HIDDEN, INNER),
                **MLP,
            },
        ),
    },
    baichuan_logits,
)
BAICHUAN2 = Family(
    BAICHUAN.settings | {"vocab_size": 125696},
    BAICHUAN.shapes | {"model.embed_tokens.weight": (125696, HIDDEN), "lm_head.weight": (125696, HIDDEN)},
    baichuan_logits,
)
INTERNLM2 = Family(
    BAICHUAN.settings
    | {
        "model_type": "internlm2",
        "architectures": ["InternLM2ForCausalLM"],
        "num_key_value_heads": KV_HEADS,
        "bias": False,
        "rope_theta": 1000000,
        "rope_scaling": {"type": "dynamic", "factor": 2.0},
    },
    {
        "model.tok_embeddings.weight": (VOCAB, HIDDEN),
        "model.norm.weight": (HIDDEN,),
        "output.weight": (VOCAB, HIDDEN),
        **in_layers(
            "model.layers",
            {
                "attention_norm.weight": (HIDDEN,),
                "attention.wqkv.weight": (GROUPED_QKV, HIDDEN),
                "attention.wo.weight": (HIDDEN, HIDDEN),
                "ffn_norm.weight": (HIDDEN,),
                "feed_forward.w1.weight": (INNER, HIDDEN),
                "feed_forward.w2.weight": (HIDDEN, INNER),
                "feed_forward.w3.weight": (INNER, HIDDEN),
            },
        ),
    },
    internlm2_logits,
)
CHATGLM = Family(
    {
        "model_type": "chatglm",
        "architectures": ["ChatGLMModel"],
        "padded_vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "ffn_hidden_size": INNER,
        "num_layers": LAYERS,
        "num_attention_heads": HEADS,
        "kv_channels": HEAD,
        "multi_query_attention": True,
        "multi_query_group_num": KV_HEADS,
        "seq_length": 64,
        "layernorm_epsilon": 1e-5,
        "rmsnorm": True,
        "post_layer_norm": True,
        "add_bias_linear": False,
        "add_qkv_bias": True,
        "original_rope": True,
        "rope_ratio": 50,
        "eos_token_id": 2,
    },
    {
        "transformer.embedding.word_embeddings.weight": (VOCAB, HIDDEN),
        "transformer.rotary_pos_emb.inv_freq": (HEAD // 4,),
        "transformer.encoder.final_layernorm.weight": (HIDDEN,),
        "transformer.output_layer.weight": (VOCAB, HIDDEN),
        **in_layers(
            "transformer.encoder.layers",
            {
                "input_layernorm.weight": (HIDDEN,),
                "self_attention.query_key_value.weight": (GROUPED_QKV, HIDDEN),
                "self_attention.query_key_value.bias": (GROUPED_QKV,),
                "self_attention.dense.weight": (HIDDEN, HIDDEN),
                "post_attention_layernorm.weight": (HIDDEN,),
                "mlp.dense_h_to_4h.weight": (2 * INNER, HIDDEN),
                "mlp.dense_4h_to_h.weight": (HIDDEN, INNER),
            },
        ),
    },
    chatglm_logits,
)
FAMILIES = {
    "qwen": QWEN,
    "baichuan": BAICHUAN,
    "baichuan2": BAICHUAN2,
    "internlm2": INTERNLM2,
    "chatglm": CHATGLM,
}


def random_weights(family: Family) -> Weights:
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(shape, generator=generator) * 0.15 + (1.0 if len(shape) == 1 and "norm" in name else 0.0)
        for name, shape in family.shapes.items()
    }


def save(folder: Path, settings: dict[str, Any], weights: Weights) -> Path:
    """As the hub has it: the config names code, which is not there."""
    code = {"AutoConfig": "configuration.Config", "AutoModelForCausalLM": "modeling.Model"}
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(settings | {"auto_map": code, "torch_dtype": "float32"}))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("name", FAMILIES)
def test_its_logits_are_those_of_its_own_code(name: str, tmp_path: Path) -> None:
    family, weights = FAMILIES[name], random_weights(FAMILIES[name])
    model = load(save(tmp_path, family.settings, weights), None, EngineConfig(device="cpu", dtype="float32")).model
    actual = model(torch.tensor([IDS])).logits[0]
    torch.testing.assert_close(actual, family.logits(weights, family.settings), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["qwen", "chatglm"])
def test_it_is_served(name: str, tmp_path: Path) -> None:
    family, weights = FAMILIES[name], random_weights(FAMILIES[name])
    right = family.logits(weights, family.settings).argmax(-1).tolist()
    with LLM(save(tmp_path, family.settings, weights), dtype="float32", kv_cache_memory="4MiB") as llm:
        (output,) = llm.generate(IDS, SamplingParams(temperature=0, max_tokens=1, ignore_eos=True))
        assert llm.max_model_len == 64
    assert output.outputs[0].token_ids == right[-1:]


@pytest.mark.parametrize(("quantization", "tolerance"), [("unpacked", 1e-3), (None, 0.05)])  # 8-bit inputs
def test_a_member_may_be_quantised(quantization: str | None, tolerance: float, tmp_path: Path) -> None:
    weights = random_weights(QWEN)
    stored = dict(weights)
    for seed, name in enumerate(sorted(weights)):
        if name.endswith(("attn.c_attn.weight", "c_proj.weight", "w1.weight", "w2.weight")):
            layer = name.removesuffix("weight")
            shape = (int(weights[name].shape[0]), int(weights[name].shape[1]))
            packed, weights[name] = gptq(shape, seed, bits=4, act_order=False, version=1)
            packed.pop("bias")
            del stored[name]
            stored |= {layer + part: tensor for part, tensor in packed.items()}
    settings = QWEN.settings | {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": GROUP}}
    config = EngineConfig(device="cpu", dtype="float32", quantization=quantization)
    model = load(save(tmp_path, settings, stored), None, config).model
    actual = model(torch.tensor([IDS])).logits[0]
    torch.testing.assert_close(actual, qwen_logits(weights, settings), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("family", "changed", "match"),
    [
        (BAICHUAN, {"max_position_embeddings": None, "model_max_length": 4096}, "ALiBi"),
        (CHATGLM, {"num_layers": None, "position_encoding_2d": True}, "first-generation"),
        (QWEN, {"rotary_pct": 0.5}, r"rotary_pct=0\.5"),
        (CHATGLM, {"rmsnorm": False}, "rmsnorm=False"),
    ],
)
def test_members_that_no_class_computes_are_refused(
    family: Family, changed: dict[str, Any], match: str, tmp_path: Path
) -> None:
    settings = {key: value for key, value in (family.settings | changed).items() if value is not None}
    with pytest.raises(ModelError, match=match):
        load(save(tmp_path, settings, {}), None, EngineConfig(device="cpu"))


def test_other_code_runs_only_when_asked_for(tmp_path: Path) -> None:
    folder = save(tmp_path, {"model_type": "unheard-of"}, {})
    (folder / "configuration.py").write_text("raise SystemExit('code was run')")
    with pytest.raises(ModelError, match="trust_remote_code"):
        load(folder, None, EngineConfig(device="cpu"))


# --- tokenizers ---


def save_tiktoken(folder: Path) -> None:
    """Qwen 1's vocabulary file: every byte, and one merge."""
    tokens = [*(bytes([byte]) for byte in range(256)), b"ab"]
    lines = [f"{base64.b64encode(token).decode()} {rank}" for rank, token in enumerate(tokens)]
    (folder / "qwen.tiktoken").write_text("\n".join(lines))
    settings = {"tokenizer_class": "QWenTokenizer", "auto_map": {"AutoTokenizer": ["tokenization.Tokenizer", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def test_qwens_tokenizer_is_made_of_its_vocabulary(tmp_path: Path) -> None:
    family = QWEN._replace(
        settings=QWEN.settings | {"vocab_size": 512},
        shapes=QWEN.shapes | {"transformer.wte.weight": (512, HIDDEN), "lm_head.weight": (512, HIDDEN)},
    )
    folder = save(tmp_path, family.settings, random_weights(family))
    save_tiktoken(folder)
    chat = {"chat_format": "chatml", "eos_token_id": 257, "pad_token_id": 257}
    (folder / "generation_config.json").write_text(json.dumps(chat))
    with LLM(folder, kv_cache_memory="4MiB") as llm:
        tokenizer = llm.tokenizer
        assert tokenizer.encode("ab c") == [256, 32, 99]
        assert tokenizer.encode("<|endoftext|><|im_start|>a<|im_end|>") == [257, 258, 97, 259]
        assert tokenizer.decode([256, 32, 99, 259]) == "ab c"
        rendered = tokenizer.decode(llm.encode_chat([{"role": "user", "content": "ab"}]), skip_special_tokens=False)
        (output,) = llm.generate("ab", SamplingParams(max_tokens=3, logit_bias={259: 100.0}))
    assert rendered == (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\nab<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert output.outputs[0].finish_reason == "stop"


def test_a_tokenizer_that_is_code_is_refused_with_the_ways_out(tmp_path: Path) -> None:
    folder = save(tmp_path, CHATGLM.settings, random_weights(CHATGLM))
    settings = {"tokenizer_class": "ChatGLMTokenizer", "auto_map": {"AutoTokenizer": ["tokenization.Tokenizer", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "tokenizer.model").write_bytes(b"")
    with pytest.raises(ModelError, match=r"trust_remote_code=True.*tokenizer="):
        load(folder, None, EngineConfig(device="cpu"))
