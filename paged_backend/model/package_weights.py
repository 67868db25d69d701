"""Checkpoints in few bits whose weights another package holds, and how these become plain weights again."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from paged_backend.errors import ConfigError

logger = logging.getLogger(__name__)

_UNPACKED_WHILE_LOADING = ("compressed-tensors", "fp8", "mxfp4", "metal")
"""Methods whose settings have `dequantize`."""


def ask_to_unpack(config: PreTrainedConfig) -> None:
    """Have transformers unpack the weights as it reads them, where it can; `unpack` comes after loading."""
    settings: Any = config.quantization_config
    if method_of(config) in _UNPACKED_WHILE_LOADING:
        settings["dequantize"] = True


def unpack(model: PreTrainedModel, method: str, quantization: str, name: str) -> None:
    """Make plain again what is still packed in a model that was loaded, in the type of its other weights.

    Raises ConfigError, naming the setting `quantization` that wants it, if nobody can unpack what `method` has packed.
    """
    if getattr(model, "hf_quantizer", None) is not None:
        dtype = model.dtype
        try:
            if method == "torchao":
                _unpack_tensors(model, dtype)
                model.hf_quantizer.remove_quantization_config(model)
            else:
                model.dequantize(dtype=dtype)
        except Exception as error:  # transformers' own NotImplementedError, or whatever a package raises
            raise ConfigError(
                f"quantization={quantization!r} needs plain weights, but those of {name}, quantised by {method}, "
                f"cannot be unpacked here ({error}); leave it at None, so that their package computes with them"
            ) from error
    logger.info("%s, quantised by %s, is unpacked to %s", name, method, model.dtype)


def method_of(config: PreTrainedConfig) -> str:
    """What a checkpoint's `quantization_config` calls it, as it is in the file or as transformers has read it."""
    settings: Any = config.quantization_config
    method = settings.get("quant_method") if isinstance(settings, dict) else settings.quant_method
    return str(getattr(method, "value", method))


def _unpack_tensors(model: nn.Module, dtype: torch.dtype) -> None:
    """torchao's weights are tensors of classes of its own, in layers that are torch's."""
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if type(parameter) is not nn.Parameter:
                packed: Any = parameter
                weight: Tensor = packed.dequantize().to(dtype)
                setattr(module, name, nn.Parameter(weight, requires_grad=False))
