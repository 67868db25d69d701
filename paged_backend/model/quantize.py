"""`quantization`: the linear layers of a model become layers with weights of 8 or 4 bits, one after the other."""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from paged_backend.errors import ConfigError
from paged_backend.model.encoder import is_encoder
from paged_backend.model.linear import PackedLinear
from paged_backend.model.mapped_files import MappedFiles
from paged_kernels import pack
from paged_kernels.packing import LEAST_COLUMNS

logger = logging.getLogger(__name__)

_BITS = {"int8": 8, "int4": 4}
_BITS_OF_LOGITS = 8  # what chooses the token needs them more than the rest, and is read once per step


@torch.inference_mode()
def quantize_linears(model: PreTrainedModel, quantization: str, name: str) -> None:
    """Replace each linear layer by one of rounded weights, and let go of what it was made of.

    Layers of fewer than LEAST_COLUMNS outputs stay, such as routers, where there is nothing to gain. Embeddings stay;
    if `lm_head` shares their weights, it gets its own. Raises ConfigError for a model that is not on a CPU or has no
    linear layers.
    """
    if model.device.type != "cpu":
        raise ConfigError(
            f"quantization={quantization!r} is for CPUs, but {name} is on {model.device}; leave it at None there"
        )
    if is_encoder(model.config):
        raise ConfigError(f"quantization={quantization!r} is for models that generate text, and {name} is an encoder")
    head = model.get_output_embeddings()
    files, shared = MappedFiles(), _shared_weights(model)
    num_weights = 0
    for parent in list(model.modules()):
        children: list[tuple[str, Any]] = list(parent.named_children())
        for child_name, child in children:
            weight = _weight(child)
            if weight is not None and len(weight) >= LEAST_COLUMNS:
                bits = _BITS_OF_LOGITS if child is head else _BITS[quantization]
                setattr(parent, child_name, PackedLinear(pack(weight, bits), child.bias, weight.dtype))
                num_weights += weight.numel()
                if id(child.weight) not in shared:
                    files.let_go([child.weight])
    if num_weights == 0:
        raise ConfigError(f"quantization={quantization!r}: {name} has no linear layers that could be quantised")
    logger.info("%s: %.0f million weights in %s", name, num_weights / 1e6, quantization)


def _shared_weights(model: nn.Module) -> set[int]:
    """The ids of those that more than one module has."""
    users = Counter(id(weight) for module in model.modules() for weight in module.parameters(recurse=False))
    return {weight for weight, num_users in users.items() if num_users > 1}


def _weight(layer: Any) -> Tensor | None:
    """[out, in] of a linear layer; None for any other."""
    if type(layer) is nn.Linear:
        return layer.weight
    return layer.weight.T if type(layer) is Conv1D else None
