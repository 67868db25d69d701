"""Tiny random models of the architectures we promise, and a tokenizer that needs no download."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from paged_backend import LLM, SamplingParams
from paged_backend.engine.kv_layout import EVERYTHING, KVLayout, Reach

SPECIAL_TOKENS = ("<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>")
BOS, EOS, IM_START, IM_END = range(256, 260)
VOCAB_SIZE = 272  # 256 bytes, the special tokens, and room to 16
MAX_POSITIONS = 512
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": MAX_POSITIONS,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": EOS,
    "initializer_range": 0.15,  # large enough for greedy outputs that vary
    "tie_word_embeddings": False,
}
_GROUPED: dict[str, Any] = _COMMON | {"num_key_value_heads": 2, "head_dim": 16}
_WINDOW: dict[str, Any] = _GROUPED | {"sliding_window": 8}
_ALTERNATING: dict[str, Any] = _WINDOW | {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": MAX_POSITIONS // 4,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
_NO_DROPOUT = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": _GROUPED,
    "qwen2": _GROUPED,
    "qwen3": _GROUPED,
    "mistral": _WINDOW,
    "gemma2": _ALTERNATING | {"query_pre_attn_scalar": 16, "attn_logit_softcapping": 5.0},
    "gemma3_text": _ALTERNATING | {"query_pre_attn_scalar": 16},
    "gpt2": _COMMON | _NO_DROPOUT,
    "gpt_neox": _COMMON | {"initializer_range": 0.3},
    "phi3": _GROUPED,
    "gpt_oss": _ALTERNATING | {"num_local_experts": 4, "num_experts_per_tok": 2, "rope_parameters": _YARN},
}


MIXED = ("gemma2", "gemma3_text", "gpt_oss")
"""Half of their layers slide."""


def crowded(architecture: str, num_blocks: int, longest: int) -> dict[str, Any]:
    """Settings with which there are so many blocks of 4 tokens; if layers slide in half of the model, what a sequence
    of the longest length takes at most, and one block more."""
    if architecture not in MIXED:
        return {"num_gpu_blocks_override": num_blocks}
    layout = KVLayout((EVERYTHING, Reach(window=_WINDOW["sliding_window"])), 4, 5)
    return {"num_gpu_blocks_override": layout.num_blocks_for(longest) + 1, "max_num_batched_tokens": 5}


def make_model(architecture: str = "llama", *, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """A random float32 model; `overrides` are fields of its config."""
    config = AutoConfig.for_model(architecture, **ARCHITECTURES[architecture] | overrides)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for name, parameter in model.named_parameters():
            if name.endswith(("bias", "sinks")):  # zeros, or left as they were in memory
                torch.nn.init.normal_(parameter, std=0.15)
    return model.eval().requires_grad_(False)


def make_tokenizer(*, chat_template: str | None = CHAT_TEMPLATE) -> PreTrainedTokenizerFast:
    """One token per byte: the id of a byte is its value."""
    alphabet = _byte_alphabet()
    backend = Tokenizer(models.BPE(vocab={alphabet[byte]: byte for byte in range(256)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL_TOKENS])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<|bos|>",
        eos_token="<|eos|>",
        pad_token="<|eos|>",
        additional_special_tokens=["<|im_start|>", "<|im_end|>"],
        chat_template=chat_template,
        clean_up_tokenization_spaces=False,
    )


def prompt_logprobs(llm: LLM, prompt: list[int]) -> torch.Tensor:
    """Of each token of a prompt but the first [T - 1]."""
    (output,) = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0))
    assert output.prompt_logprobs is not None
    entries = zip(prompt[1:], output.prompt_logprobs[1:], strict=True)
    return torch.tensor([each[token_id].logprob for token_id, each in entries if each])


def save_model(
    folder: Path,
    *,
    model: PreTrainedModel | None = None,
    tokenizer: bool = True,
    generation_config: dict[str, Any] | None = None,
    config: dict[str, Any] | None = None,
) -> Path:
    """Write a checkpoint folder; `generation_config` replaces that file, `config` changes entries of config.json."""
    (model or make_model()).save_pretrained(folder)
    if tokenizer:
        make_tokenizer().save_pretrained(folder)
    if generation_config is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation_config))
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | (config or {})))
    return folder


def _byte_alphabet() -> list[str]:
    """The printable character by which byte-level vocabularies spell each byte (GPT-2's table)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]
