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
from paged_backend.model.kept_packed import packable_layers, put_in, repack, sizes, stand_in
from paged_backend.model.packed_weights import METHODS, Unpacked, packing_of
from paged_backend.model.remote_layouts import Layout, layout_of
from paged_backend.model.tensor_files import TensorFiles
from paged_kernels import PackedWeight

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
        self, source: str, options: Mapping[str, Any], dtype: torch.dtype, name: str, *, keep_packed: bool
    ) -> tuple[PreTrainedModel, dict[str, Any]]:
        """The model in `dtype`, and what transformers says of the loading. Weights that are quantised stay so, in our
        kernels' form, if `keep_packed`."""
        config = self.config
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        state, packed = self._read(TensorFiles(source, options), dtype, name, keep_packed=keep_packed)
        model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
        model, report = model_class.from_pretrained(
            None, config=config, state_dict=state, dtype=dtype, output_loading_info=True
        )
        _check_left_over(report["unexpected_keys"], state, name)
        put_in(model, packed, dtype)
        model.config._name_or_path = source
        model.generation_config = _generation_config(source, options, model.generation_config)
        return model, report

    def _read(
        self, files: TensorFiles, dtype: torch.dtype, name: str, *, keep_packed: bool
    ) -> tuple[dict[str, Tensor], dict[str, PackedWeight]]:
        """The state dict, and what is packed by the names of its layers, for which the state has stand-ins."""
        state: dict[str, Tensor] = {}
        packed: dict[str, PackedWeight] = {}
        if self.quantization is None:
            for original in _with_progress(files):
                state |= self._converted(original, files[original])
            return state, packed
        tensors = Unpacked(files, packing_of(self.quantization, name))
        layers = packable_layers(self.config) if keep_packed else set[str]()
        unpacked = 0
        for original in _with_progress(tensors):
            is_quantized = tensors.is_quantized(original)
            scales = tensors.scales(original) if is_quantized and self.layout is None else None
            for new, tensor in self._converted(original, tensors[original]).items():
                layer = new.removesuffix(".weight")
                if is_quantized and layer in layers:
                    packed[layer] = repack(tensor, scales, bits=tensors.packing.bits)
                    tensor = stand_in(tensor.shape, dtype)
                state[new] = tensor.to(dtype) if is_quantized else tensor
                unpacked += is_quantized and layer not in packed
        _tell(name, str(self.quantization["quant_method"]), packed, unpacked, dtype)
        return state, packed

    def _converted(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        return {name: tensor} if self.layout is None else dict(self.layout.convert({name: tensor}))


def _with_progress(names: Mapping[str, Tensor]) -> Iterable[str]:
    progress: Iterable[str] = tqdm(names, desc="Converting weights", total=len(names), disable=None)
    return progress


def _tell(name: str, method: str, packed: Mapping[str, PackedWeight], unpacked: int, dtype: torch.dtype) -> None:
    if packed:
        logger.info("%d weights of %s, quantised by %s, are kept packed: %s", len(packed), name, method, sizes(packed))
    if unpacked:
        logger.info("%d weights of %s, quantised by %s, are unpacked to %s", unpacked, name, method, dtype)


def conversion_of(
    source: str, options: Mapping[str, Any], name: str, device: torch.device, *, unpacks: bool = False
) -> Conversion | None:
    """None for checkpoints that transformers loads itself, as it does GPTQ and AWQ where there is a package for them
    unless the weights are to be unpacked. Raises ModelError for what nobody can load."""
    where = {key: value for key, value in options.items() if key != "trust_remote_code"}
    settings, _ = PreTrainedConfig.get_config_dict(source, **where)
    layout = layout_of(settings, name)
    quantization = settings.get("quantization_config")
    is_ours = (
        isinstance(quantization, Mapping)
        and quantization.get("quant_method") in METHODS
        and (unpacks or device.type == "cpu" or importlib.util.find_spec("gptqmodel") is None)
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
