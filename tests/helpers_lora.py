"""Adapters in PEFT's files, and models with the same change in their weights."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def save_adapter(
    folder: Path,
    model: PreTrainedModel,
    *,
    targets: tuple[str, ...] = TARGETS,
    rank: int = 4,
    alpha: int = 8,
    seed: int = 1,
    size: float = 0.2,
    more: dict[str, Tensor] | None = None,
    **config: Any,
) -> Path:
    """A random adapter of all modules whose names end so; `more` are other tensors of its file."""
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = dict(more or {})
    for name, module in model.named_modules():
        if name.endswith(targets):
            weight = module.weight.T if isinstance(module, Conv1D) else module.weight
            key = f"base_model.model.{name}.lora_"
            tensors[f"{key}A.weight"] = torch.randn(rank, weight.shape[1], generator=generator) * size
            tensors[f"{key}B.weight"] = torch.randn(weight.shape[0], rank, generator=generator) * size
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "target_modules": list(targets), "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(settings | config))
    return folder


def merged(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """A copy of the model with the adapter in its weights."""
    from safetensors.torch import load_file

    config = json.loads((folder / "adapter_config.json").read_text())
    tensors = load_file(folder / "adapter_model.safetensors")
    result = copy.deepcopy(model)
    for key, shrink in tensors.items():
        name, is_first, _ = key.removeprefix("base_model.model.").partition(".lora_A")
        if not is_first:
            continue
        scale = config["lora_alpha"] / (config["r"] ** (0.5 if config.get("use_rslora") else 1))
        change = tensors[key.replace("lora_A", "lora_B")] @ shrink * scale
        module = result.get_submodule(name)
        module.weight.data += change.T if isinstance(module, Conv1D) else change
    return result


def greedy(model: PreTrainedModel, prompt: list[int], num_tokens: int) -> list[int]:
    output = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=num_tokens,
        do_sample=False,
        eos_token_id=None,
    )
    return [int(token) for token in output[0, len(prompt) :]]
