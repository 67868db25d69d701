"""`quantization`: the linear layers of a model become layers with weights of 8 or 4 bits, one after the other."""

from __future__ import annotations

import logging

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from paged_backend.errors import ConfigError
from paged_backend.model.encoder import is_encoder
from paged_backend.model.linear import PackedLinear
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
    num_weights = 0
    for parent in list(model.modules()):
        for child_name, child in list(parent.named_children()):
            if type(child) in (nn.Linear, Conv1D) and _num_columns(child) >= LEAST_COLUMNS:
                bits = _BITS_OF_LOGITS if child is head else _BITS[quantization]
                setattr(parent, child_name, _quantized(child, bits))
                num_weights += child.weight.numel()
    if num_weights == 0:
        raise ConfigError(f"quantization={quantization!r}: {name} has no linear layers that could be quantised")
    logger.info("%s: %.0f million weights in %s", name, num_weights / 1e6, quantization)


def _num_columns(layer: nn.Module) -> int:
    assert isinstance(layer.weight, torch.Tensor)
    return layer.weight.shape[1 if isinstance(layer, Conv1D) else 0]


def _quantized(layer: nn.Module, bits: int) -> PackedLinear:
    weight = layer.weight.T if isinstance(layer, Conv1D) else layer.weight
    assert isinstance(weight, torch.Tensor)
    bias = layer.bias
    assert bias is None or isinstance(bias, nn.Parameter)
    return PackedLinear(pack(weight, bits), bias, weight.dtype)
