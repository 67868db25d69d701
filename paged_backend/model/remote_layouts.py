"""Families whose own code came with their checkpoints, loaded without it: their weights, renamed and split, fit classes
of transformers that compute the same.

    Qwen 1                      -> Qwen2
    Baichuan, Baichuan 2 (7B)   -> Llama
    InternLM 2                  -> Llama
    ChatGLM 2 and 3, GLM-4-9B   -> GLM

What a family offers beyond its class's arithmetic is switched off by its limits (see `_qwen`), or refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig

from paged_backend.errors import ModelError

Settings = Mapping[str, Any]
Split = Callable[[Tensor], dict[str, Tensor]]
"""A tensor of the checkpoint as those of the class, by what takes the place of the name's end."""


class Layout(NamedTuple):
    """How a checkpoint becomes one of a class that transformers has."""

    config: PreTrainedConfig
    renames: tuple[tuple[str, str], ...]
    """Regular expressions, and what takes the place of the part of a name that matches; tried in order, all of them."""
    splits: dict[str, Split] = {}  # noqa: RUF012
    """By the end of a name, once it is renamed."""
    dropped: tuple[str, ...] = ()
    """Ends of names of what the class computes itself."""

    def convert(self, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        for original in tensors:
            if original.endswith(self.dropped):
                continue
            name = original
            for pattern, replacement in self.renames:
                name = re.sub(pattern, replacement, name)
            end = next((end for end in self.splits if name.endswith(end)), None)
            if end is None:
                yield name, tensors[original]
                continue
            for new_end, part in self.splits[end](tensors[original]).items():
                yield name.removesuffix(end) + new_end, part.contiguous()


def layout_of(settings: Settings, name: str) -> Layout | None:
    """For the `config.json` of a checkpoint; None if it is of none of the families. Raises ModelError for members that
    no class computes right."""
    make = _FAMILIES.get(str(settings.get("model_type")))
    return None if make is None else make(settings, name)


def _qwen(settings: Settings, name: str) -> Layout:
    """Beyond `seq_length`, Qwen scales positions and queries by the length of the text; up to it, it does neither."""
    heads, head_size = settings["num_attention_heads"], settings["kv_channels"]
    _require(settings, name, {"rotary_pct": 1.0, "no_bias": True, "scale_attn_weights": True})
    config = _config(
        "qwen2",
        settings,
        vocab_size=settings["vocab_size"],
        hidden_size=settings["hidden_size"],
        intermediate_size=settings["intermediate_size"] // 2,
        num_hidden_layers=settings["num_hidden_layers"],
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=head_size,
        max_position_embeddings=settings["seq_length"],
        rms_norm_eps=settings["layer_norm_epsilon"],
        rope_parameters={"rope_type": "default", "rope_theta": float(settings.get("rotary_emb_base", 10000))},
        tie_word_embeddings=settings.get("tie_word_embeddings", False),
    )
    renames = (
        (r"^transformer\.wte\.", "model.embed_tokens."),
        (r"^transformer\.ln_f\.", "model.norm."),
        (r"^transformer\.h\.", "model.layers."),
        (r"\.ln_1\.", ".input_layernorm."),
        (r"\.ln_2\.", ".post_attention_layernorm."),
        (r"\.attn\.c_proj\.", ".self_attn.o_proj."),
        (r"\.attn\.c_attn\.", ".self_attn.qkv."),
        (r"\.mlp\.w1\.", ".mlp.up_proj."),
        (r"\.mlp\.w2\.", ".mlp.gate_proj."),
        (r"\.mlp\.c_proj\.", ".mlp.down_proj."),
    )
    sizes = [heads * head_size] * 3
    return Layout(
        config, renames, _qkv_splits("qkv", sizes), ("rotary_emb.inv_freq", ".attn.masked_bias", ".attn.bias")
    )


def _baichuan(settings: Settings, name: str) -> Layout:
    if "max_position_embeddings" not in settings:  # the 13B models, which have `model_max_length` only
        raise ModelError(
            f"model={name!r} is a Baichuan with ALiBi (13B), which no class of transformers computes; the 7B models "
            "can be served"
        )
    is_second = settings["vocab_size"] == _BAICHUAN2_VOCABULARY
    config = _config("llama", settings, **_like_llama(settings))
    splits = _qkv_splits("W_pack", [settings["hidden_size"]] * 3)
    if is_second:  # its head normalises its rows at each call
        splits["lm_head.weight"] = lambda weight: {
            "lm_head.weight": torch.nn.functional.normalize(weight.float(), dim=1).to(weight.dtype)
        }
    return Layout(config, (), splits, ("rotary_emb.inv_freq",))


def _internlm2(settings: Settings, name: str) -> Layout:
    heads, kv_heads = settings["num_attention_heads"], settings["num_key_value_heads"]
    config = _config(
        "llama",
        settings,
        **_like_llama(settings),
        attention_bias=settings.get("bias", False),
    )
    renames = (
        (r"^output\.", "lm_head."),
        (r"\.tok_embeddings\.", ".embed_tokens."),
        (r"\.attention\.wo\.", ".self_attn.o_proj."),
        (r"\.attention\.wqkv\.", ".self_attn.wqkv."),
        (r"\.attention_norm\.", ".input_layernorm."),
        (r"\.ffn_norm\.", ".post_attention_layernorm."),
        (r"\.feed_forward\.w1\.", ".mlp.gate_proj."),
        (r"\.feed_forward\.w2\.", ".mlp.down_proj."),
        (r"\.feed_forward\.w3\.", ".mlp.up_proj."),
    )

    def split(end: str) -> Split:
        """Each key head's queries are followed by its key and its value."""

        def parts(tensor: Tensor) -> dict[str, Tensor]:
            groups = tensor.view(kv_heads, heads // kv_heads + 2, -1, *tensor.shape[1:])
            query, key, value = groups[:, :-2], groups[:, -2], groups[:, -1]
            shape = (-1, *tensor.shape[1:])
            return {
                f"q_proj.{end}": query.reshape(shape),
                f"k_proj.{end}": key.reshape(shape),
                f"v_proj.{end}": value.reshape(shape),
            }

        return parts

    return Layout(config, renames, {f"wqkv.{end}": split(end) for end in ("weight", "bias")}, ("rotary_emb.inv_freq",))


def _chatglm(settings: Settings, name: str) -> Layout:
    if "num_layers" not in settings or settings.get("position_encoding_2d"):
        raise ModelError(
            f"model={name!r} is a first-generation ChatGLM, whose positions and mask no class of transformers has; "
            "ChatGLM2, ChatGLM3 and GLM-4 can be served"
        )
    _require(
        settings,
        name,
        {
            "rmsnorm": True,
            "post_layer_norm": True,
            "apply_residual_connection_post_layernorm": False,
            "add_bias_linear": False,
            "original_rope": True,
        },
    )
    heads, head_size = settings["num_attention_heads"], settings["kv_channels"]
    kv_heads = settings["multi_query_group_num"] if settings.get("multi_query_attention") else heads
    config = _config(
        "glm",
        settings,
        vocab_size=settings.get("padded_vocab_size", settings.get("vocab_size")),
        hidden_size=settings["hidden_size"],
        intermediate_size=settings["ffn_hidden_size"],
        num_hidden_layers=settings["num_layers"],
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_size,
        max_position_embeddings=settings["seq_length"],
        rms_norm_eps=settings["layernorm_epsilon"],
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10000.0 * settings.get("rope_ratio", 1),
            "partial_rotary_factor": 0.5,
        },
        attention_bias=settings.get("add_qkv_bias", False),
        tie_word_embeddings=settings.get("tie_word_embeddings", False),
        pad_token_id=settings.get("pad_token_id"),  # else the class takes its own family's
    )
    config.eos_token_id = settings.get("eos_token_id")
    renames = (
        (r"^transformer\.embedding\.word_embeddings\.", "model.embed_tokens."),
        (r"^transformer\.encoder\.final_layernorm\.", "model.norm."),
        (r"^transformer\.encoder\.layers\.", "model.layers."),
        (r"^transformer\.output_layer\.", "lm_head."),
        (r"\.self_attention\.dense\.", ".self_attn.o_proj."),
        (r"\.self_attention\.query_key_value\.", ".self_attn.qkv."),
        (r"\.mlp\.dense_h_to_4h\.", ".mlp.gate_up_proj."),
        (r"\.mlp\.dense_4h_to_h\.", ".mlp.down_proj."),
    )
    sizes = [heads * head_size, kv_heads * head_size, kv_heads * head_size]
    return Layout(config, renames, _qkv_splits("qkv", sizes), ("rotary_pos_emb.inv_freq",))


_BAICHUAN2_VOCABULARY = 125_696
_FAMILIES: dict[str, Callable[[Settings, str], Layout]] = {
    "qwen": _qwen,
    "baichuan": _baichuan,
    "internlm2": _internlm2,
    "chatglm": _chatglm,
}


def _config(model_type: str, settings: Settings, **own: Any) -> PreTrainedConfig:
    """The class's config, with what all configs have in common."""
    common = ("bos_token_id", "eos_token_id", "pad_token_id", "quantization_config")
    kept = {name: settings[name] for name in common if settings.get(name) is not None and name not in own}
    dtype = settings.get("torch_dtype", settings.get("dtype"))
    architecture = {"qwen2": "Qwen2ForCausalLM", "llama": "LlamaForCausalLM", "glm": "GlmForCausalLM"}[model_type]
    config: PreTrainedConfig = AutoConfig.for_model(
        model_type, architectures=[architecture], **({"dtype": dtype} if dtype else {}), **kept, **own
    )
    return config


def _like_llama(settings: Settings) -> dict[str, Any]:
    """What is called the same in Llama's config."""
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "hidden_act")
    same = {name: settings[name] for name in (*names, "max_position_embeddings", "rms_norm_eps")}
    rope = settings.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    return same | {
        "num_key_value_heads": settings.get("num_key_value_heads", settings["num_attention_heads"]),
        "tie_word_embeddings": settings.get("tie_word_embeddings", False),
        "rope_parameters": {
            "rope_type": kind,
            "rope_theta": float(settings.get("rope_theta", 10000)),
            **{name: value for name, value in rope.items() if name not in ("type", "rope_type")},
        },
    }


def _qkv_splits(name: str, sizes: list[int]) -> dict[str, Split]:
    """For a layer of queries, keys and values, one below the other."""

    def split(end: str) -> Split:
        names = [f"{part}_proj.{end}" for part in "qkv"]
        return lambda tensor: dict(zip(names, torch.split(tensor, sizes), strict=True))

    return {f"{name}.{end}": split(end) for end in ("weight", "bias")}


def _require(settings: Settings, name: str, wanted: Settings) -> None:
    for key, value in wanted.items():
        if settings.get(key, value) != value:
            raise ModelError(
                f"model={name!r} has {key}={settings[key]!r} in its config, and only {key}={value!r} can be served "
                "without its own code"
            )
