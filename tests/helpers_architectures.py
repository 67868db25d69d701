"""A tiny random model of every causal-LM architecture that transformers knows.

Each config is the architecture's own default with its sizes made small: a table of field names and sizes that fits most
of them, and `_OVERRIDES` where the default is special, or would leave out what makes the architecture interesting.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

VOCAB_SIZE = 128
WINDOW = 8
NUM_LAYERS = 4

ARCHITECTURES: tuple[str, ...] = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)

_SIZES: dict[float, str] = {
    64: """hidden_size d_model n_embd dim emb_dim word_embed_proj_dim embedding_size embedding_dim attention_hidden_size
        lru_width decoder_hidden_size d_inner shared_intermediate_size""",
    128: """intermediate_size ffn_dim n_inner decoder_ffn_dim encoder_ffn_dim dff dim_ff d_ff ffn_hidden_size
        dense_intermediate_size intermediate_size_mlp prefix_dense_intermediate_size block_ffn_dim feed_forward_size
        mlp_hidden_size vocab_size vocab_size_per_layer_input decoder_vocab_size output_vocab_size
        unpadded_vocab_size""",
    512: """max_position_embeddings n_positions n_ctx max_seq_len model_max_length max_target_positions
        seq_length""",
    32: """expert_ffn_hidden_size moe_intermediate_size shared_expert_intermediate_size
        moe_shared_expert_intermediate_size kv_lora_rank index_n_heads""",
    24: "q_lora_rank qk_head_dim",
    16: """head_dim attention_head_dim global_head_dim swa_head_dim kv_channels d_kv dim_head attention_head_size
        qk_nope_head_dim v_head_dim index_head_dim o_lora_rank linear_head_dim mamba_d_head mamba_head_dim mamba_headdim
        per_layer_input_dim hidden_size_per_layer_input""",
    WINDOW: """sliding_window sliding_window_size attention_window_size attention_chunk_size window_size local_attention
        qk_rope_head_dim index_topk linear_key_head_dim linear_value_head_dim mamba_d_state mamba_n_heads
        mamba_chunk_size state_size ssm_state_size mamba_num_heads chunk_size n_mamba_heads rotary_dim laurel_rank""",
    NUM_LAYERS: """num_hidden_layers n_layer n_layers num_layers decoder_layers num_decoder_layers num_blocks
        num_attention_heads n_head n_heads num_heads decoder_attention_heads encoder_attention_heads
        num_decoder_attention_heads num_encoder_attention_heads attention_heads swa_num_attention_heads num_experts
        n_routed_experts num_local_experts moe_num_experts linear_num_value_heads linear_num_heads time_step_rank
        mamba_dt_rank""",
    2: """encoder_layers num_encoder_layers num_key_value_heads num_kv_heads num_query_groups swa_num_key_value_heads
        num_experts_per_tok moe_topk top_k_experts moe_k num_experts_per_token linear_num_key_heads type_vocab_size""",
    1: """n_group topk_group num_expert_group n_shared_experts num_shared_experts moe_num_shared_experts
        first_k_dense_replace num_dense_layers initializer_factor""",
    0.15: "initializer_range init_std",  # large enough for logits that differ
    0: """attention_dropout dropout activation_dropout hidden_dropout resid_pdrop embd_pdrop attn_pdrop
        hidden_dropout_prob attention_probs_dropout_prob decoder_layerdrop encoder_layerdrop layerdrop
        router_jitter_noise input_jitter_noise classifier_dropout emb_pdrop dropout_p embed_dropout resid_dropout
        residual_dropout embedding_dropout""",
}
_SIZE_OF = {name: size for size, names in _SIZES.items() for name in names.split()}
_STAYS_NONE = {"sliding_window", "q_lora_rank", "attention_chunk_size", "first_k_dense_replace", "head_dim", "n_inner"}
_STAYS_NONE |= {"index_topk"} | set(_SIZES[0].split())
_PER_LAYER = {
    "layer_types",
    "mlp_layer_types",
    "layers_block_type",
    "block_types",
    "no_rope_layers",
    "attn_layer_types",
    "indexer_types",
    "num_attention_heads_per_layer",
    "activation_sparsity_pattern",
    "hybrid_layer_pattern",
}
_TOKEN_IDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}

_DECODER: dict[str, Any] = {"is_decoder": True}
_DECODER_HALF: dict[str, Any] = {"is_decoder": True, "is_encoder_decoder": False}
_MLA: dict[str, Any] = {"head_dim": 8, "num_key_value_heads": 4}
_SLIDING_LATE: dict[str, Any] = {"use_sliding_window": True, "max_window_layers": 2, "layer_types": None}
_SLIDING_FULL: dict[str, Any] = {"layer_types": ["sliding_attention", "full_attention"] * 2, "head_dim": 16}
_SHARED_KV: dict[str, Any] = {
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "num_kv_shared_layers": 2,
}
_CONV_FULL: dict[str, Any] = {"layer_types": ["conv", "full_attention"] * 2}
_ZAMBA: dict[str, Any] = dict.fromkeys(("attention_hidden_size", "attention_head_dim", "head_dim")) | {
    "num_key_value_heads": 4
}
_ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}
_SMALL_TRANSFORMER: dict[str, Any] = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 64}


def _each(names: str, fields: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return dict.fromkeys(names.split(), fields)


_OVERRIDES: dict[str, dict[str, Any]] = {
    **_each(
        """bart mbart blenderbot blenderbot-small bigbird_pegasus marian pegasus plbart mvp trocr whisper xglm
        prophetnet""",
        _DECODER_HALF,
    ),
    **_each(
        """bert bert-generation big_bird camembert data2vec-text electra ernie megatron-bert rembert roberta
        roberta-prelayernorm roc_bert roformer xlm-roberta xlm-roberta-xl git""",
        _DECODER,
    ),
    **_each(
        """axk1 axk2 bailing_hybrid deepseek_v2 deepseek_v3 deepseek_v32 glm4_moe_lite glm_moe_dsa kimi_linear minicpm3
        youtu sarvam_mla hy_v4""",
        _MLA,
    ),
    **_each("qwen2 qwen3 qwen2_moe qwen3_moe dots1", _SLIDING_LATE | {"sliding_window": WINDOW}),
    **_each("phi3 mixtral starcoder2 phi4_multimodal minimax", {"sliding_window": WINDOW}),
    **_each("mellum laguna ministral", _SLIDING_FULL | {"sliding_window": WINDOW}),
    **_each("hunyuan_v1_dense hunyuan_v1_moe", {"head_dim": 16}),
    **_each("gemma4_text gemma4_unified_text", _SHARED_KV),
    "gemma3n_text": _SHARED_KV
    | {"intermediate_size": [128] * 6, "activation_sparsity_pattern": [0.95, 0.95, 0.0, 0.0, 0.0, 0.0]},
    "smollm3": _SLIDING_LATE | {"sliding_window": WINDOW, "no_rope_layers": [1, 1, 1, 0]},
    "lfm2": _CONV_FULL,
    "lfm2_moe": _CONV_FULL | {"head_dim": 16},
    "bamba": {"attn_layer_indices": [1, 3]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False},
    "mamba2": {"expand": 2, "num_heads": 8, "head_dim": 16, "n_groups": 2},
    "falcon_h1": {"mamba_d_ssm": 128, "mamba_expand": 2},
    "zamba": _ZAMBA,
    "zamba2": _ZAMBA
    | {
        "num_hidden_layers": 6,
        "layers_block_type": ["mamba", "hybrid", "mamba", "mamba", "hybrid", "mamba"],
        "adapter_rank": 8,
        "mamba_ngroups": 1,
        "mamba_expand": 2,
        "use_shared_attention_adapter": True,
    },
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 16},
    "longcat_flash": _MLA | {"num_layers": 2, "zero_expert_num": 2},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "xmod": _DECODER | {"default_language": "en_XX"},
    "xlstm": {"hidden_size": 128, "embedding_dim": 128},  # heads are rounded up to multiples of 64 in all
    "doge": {"keep_window_size": 4},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 10000.0},
        "ffn_config": {"hidden_size": 64, "ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "cohere_compass_text": _SLIDING_FULL
    | {"rope_parameters": dict.fromkeys(("sliding_attention", "full_attention"), _ROPE | {"mrope_section": [4, 2, 2]})},
    "dots3_note_text": {
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "swa_num_attention_heads": 4,
        "shared_experts_intermediate_size": 32,
        "swa_num_key_value_heads": 4,
        "swa_head_dim": 24,
        "swa_qk_nope_head_dim": 16,
        "swa_qk_rope_head_dim": 8,
        "swa_v_head_dim": 16,
        "swa_q_lora_rank": 24,
        "swa_kv_lora_rank": 32,
    },
    "qwen4_exp_text": {
        "indexer_n_heads": 32,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 8,
        "indexer_compress_ratio": 4,
        "layer_types": ["linear_attention", "indexed_attention"] * 2,
        "hc_count": 2,
        "hc_lowrank": 16,
    },
    "minimax_m3_vl_text": {
        "layer_types": ["full_attention", "minimax_m3_sparse"] * 2,
        "index_block_size": 4,
        "index_topk_blocks": 2,
        "index_local_blocks": 1,
        "index_n_heads": 2,
    },
    "reformer": {
        "is_decoder": True,
        "axial_pos_shape": [16, 32],
        "axial_pos_embds_dim": [32, 32],
        "attn_layers": ["local", "lsh"] * 2,
        "num_buckets": 4,
        "lsh_attn_chunk_length": 8,
        "local_attn_chunk_length": 8,
    },
    **_each("gemma4_assistant gemma4_unified_assistant", {"hidden_size_per_layer_input": 0}),
    "blt": {
        "vocab_size": 260,
        "encoder_hash_byte_group_vocab": 500,
        "patcher_config": _SMALL_TRANSFORMER | {"vocab_size": 260, "num_hidden_layers": 2},
        "encoder_config": _SMALL_TRANSFORMER
        | {"vocab_size": 260, "num_hidden_layers": 1, "hidden_size_global": 64, "cross_attn_k": 1},
        "decoder_config": _SMALL_TRANSFORMER
        | {"vocab_size": 260, "num_hidden_layers": 1, "hidden_size_global": 64, "cross_attn_k": 1},
        "global_config": _SMALL_TRANSFORMER | {"num_hidden_layers": 2},
    },
}
_MOST_PARAMETERS = 40_000_000


def make_tiny(architecture: str, *, seed: int = 0) -> PreTrainedModel:
    """A random float32 model in evaluation mode. Raises whatever a config or model that cannot be built raises."""
    model_class = getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[architecture])
    config = _tiny_config(architecture)
    expected = model_class.config_class
    if not isinstance(config, expected) and isinstance(getattr(config, "text_config", None), expected):
        config = config.text_config
    with torch.device("meta"):
        num_parameters = sum(p.numel() for p in model_class._from_config(copy.deepcopy(config)).parameters())
    if num_parameters > _MOST_PARAMETERS:
        raise ValueError(f"the tiny config of {architecture} still has {num_parameters} parameters")
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model: PreTrainedModel = model_class._from_config(config)
    return model.float().eval().requires_grad_(False)


def _tiny_config(architecture: str) -> PreTrainedConfig:
    config_class = CONFIG_MAPPING[architecture]
    return config_class(**_tiny_fields(architecture, config_class()))


def _tiny_fields(architecture: str, default: PreTrainedConfig) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for name, value in default.to_dict().items():
        if name in _PER_LAYER and isinstance(value, list) and value:
            fields[name] = _some_of_each(value)
        elif name in _SIZE_OF and (isinstance(value, (int, float)) or (value is None and name not in _STAYS_NONE)):
            fields[name] = float(_SIZE_OF[name]) if isinstance(value, float) else _SIZE_OF[name]
        elif name.endswith(("token_id", "token_index")) and _is_too_large(value):
            fields[name] = _TOKEN_IDS.get(name, VOCAB_SIZE - 3)
    if hasattr(default, "tie_word_embeddings"):
        fields["tie_word_embeddings"] = False
    for name, value in vars(default).items():
        if isinstance(value, PreTrainedConfig):
            fields[name] = type(value)(**_tiny_fields(value.model_type, value))
    for name, value in _OVERRIDES.get(architecture, {}).items():
        if value is None:
            fields.pop(name, None)
        else:
            fields[name] = value
    return fields


def _is_too_large(token_ids: Any) -> bool:
    many = token_ids if isinstance(token_ids, list) else [token_ids]
    return any(isinstance(token_id, int) and token_id >= VOCAB_SIZE for token_id in many)


def _some_of_each(values: list[Any]) -> list[Any]:
    """NUM_LAYERS entries, every kind among them."""
    kinds = list(dict.fromkeys(values))
    some = [values[i % len(values)] for i in range(NUM_LAYERS)]
    for position, kind in enumerate(kind for kind in kinds if kind not in some):
        some[NUM_LAYERS - 1 - position] = kind
    return some
