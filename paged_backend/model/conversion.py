"""Checkpoints that transformers cannot load by itself, loaded as ones that it can."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from tqdm.auto import tqdm
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
)

from paged_backend.errors import ModelError
from paged_backend.model.packed_weights import METHODS, Unpacked, packing_of
from paged_backend.model.remote_layouts import Layout, layout_of
from paged_backend.model.tensor_files import TensorFiles

logger = logging.getLogger(__name__)

AVAILABLE = (
    "GGUF files; AWQ with 4 bits and GPTQ with 2, 4 and 8, which are unpacked; FP8, which is unpacked without a "
    "GPU for it; compressed-tensors, bitsandbytes and torchao, with the packages of these names and accelerate"
)
"""Kinds of quantised checkpoints."""


class Conversion(NamedTuple):
    """What has to happen to the tensors of a checkpoint: they are unpacked, or renamed and split, or both."""

    config: PreTrainedConfig
    layout: Layout | None
    quantization: Mapping[str, Any] | None

    def load(
        self, source: str, options: Mapping[str, Any], dtype: torch.dtype, name: str
    ) -> tuple[PreTrainedModel, dict[str, Any]]:
        """The model in `dtype`, and what transformers says of the loading."""
        tensors: Mapping[str, Tensor] = TensorFiles(source, options)
        if self.quantization is not None:
            method = self.quantization["quant_method"]
            logger.info("the weights of %s, quantised by %s, are unpacked to %s", name, method, dtype)
            tensors = Unpacked(tensors, packing_of(self.quantization, name), dtype)
        pairs: Iterable[tuple[str, Tensor]] = tensors.items() if self.layout is None else self.layout.convert(tensors)
        state = dict(tqdm(pairs, desc="Converting weights", total=len(tensors), disable=None))
        config = self.config
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
        model, report = model_class.from_pretrained(
            None, config=config, state_dict=state, dtype=dtype, output_loading_info=True
        )
        _check_left_over(report["unexpected_keys"], state, name)
        model.config._name_or_path = source
        model.generation_config = _generation_config(source, options, model.generation_config)
        return model, report


def conversion_of(source: str, options: Mapping[str, Any], name: str, device: torch.device) -> Conversion | None:
    """None for checkpoints that transformers loads itself. Raises ModelError for what nobody can load."""
    where = {key: value for key, value in options.items() if key != "trust_remote_code"}
    settings, _ = PreTrainedConfig.get_config_dict(source, **where)
    layout = layout_of(settings, name)
    quantization = settings.get("quantization_config")
    is_ours = (
        isinstance(quantization, Mapping)
        and quantization.get("quant_method") in METHODS
        and (device.type == "cpu" or importlib.util.find_spec("gptqmodel") is None)
    )
    if layout is None and not is_ours:
        return None
    config = AutoConfig.from_pretrained(source, **options) if layout is None else layout.config
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return None
    return Conversion(config, layout, quantization if is_ours else None)


def _check_left_over(names: Iterable[str], state: Mapping[str, Tensor], name: str) -> None:
    """GPTQ writes biases of zeros that the model does not have; anything else that was not used would be missed."""
    used_up = [one for one in names if not (one.endswith(".bias") and not state[one].any())]
    if used_up:
        some = ", ".join(sorted(used_up)[:3])
        raise ModelError(f"model={name!r} has weights that its architecture has no place for, among them {some}")


def _generation_config(source: str, options: Mapping[str, Any], default: GenerationConfig) -> GenerationConfig:
    where = {key: value for key, value in options.items() if key != "trust_remote_code"}
    try:
        return GenerationConfig.from_pretrained(source, **where)
    except OSError:  # there is none
        return default
