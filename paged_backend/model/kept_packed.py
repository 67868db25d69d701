"""Weights that a checkpoint holds in few bits, kept so: repacked for our kernels, instead of unpacked.

What can be is taken over as it is: whole numbers of 8 or 4 bits, with a scale for each group of neighbours. All others
are rounded again to 8 bits in groups of 32, which is far finer than the 2 to 6 bits that most of them had.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, GenerationConfig, PreTrainedConfig, PreTrainedModel

from paged_backend.model.linear import PackedLinear
from paged_backend.model.tensor_files import TensorFiles
from paged_kernels import PackedWeight, pack_numbers
from paged_kernels.packing import LEAST_COLUMNS, can_be_group

logger = logging.getLogger(__name__)

_GROUP = 32
_LARGEST_GROUP = 128  # inputs are rounded in the same groups, where one large number takes the bits of the others
_ROWS_AT_ONCE = 4096
_LEAST_HALF = 2**-24  # what neighbouring float16 near zero differ by
_MOST = {8: 127, 4: 7}
_FILE = "packed.safetensors"


def packable_layers(config: PreTrainedConfig) -> set[str]:
    """The names of the linear layers of a model that are large enough to be packed."""
    with torch.device("meta"):
        model = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config)
    return {name for name, module in model.named_modules() if is_packable(module)}


def is_packable(module: nn.Module) -> bool:
    if type(module) is not nn.Linear:
        return False
    return module.out_features >= LEAST_COLUMNS and can_be_group(_GROUP, module.in_features)


def repack(weight: Tensor, scales: Tensor | None = None, *, bits: int = 8) -> PackedWeight:
    """Pack a float32 weight [N, K], K a multiple of 32, in whole numbers of `bits`, or 8 if it does not hold such.
    `scales` [N, groups] are those whose multiples it holds, if they are known.

    It is exact if the numbers fit and the scales are float16. Scales are found if each group's largest number is the
    largest there is, as GGUF's Q8_0 and Q4_0 have it.
    """
    if scales is not None:
        exact = _given(weight, scales, bits)
        if exact is not None:
            return exact
    if bits == 4:
        exact = _given(weight, _largest(weight, signed=True) / -8, 4)
        if exact is not None:
            return exact
    largest = _largest(weight)
    scales = (largest / _MOST[8]).half()
    scales = torch.where(scales.float() * 127.4 < largest, scales + _LEAST_HALF, scales)  # it was too small for float16
    return pack_numbers(_numbers(weight, scales, 8), scales, 8)


def _given(weight: Tensor, scales: Tensor, bits: int) -> PackedWeight | None:
    """None if the weight does not hold whole numbers of so few bits times the scales, or of 8."""
    halves, group = scales.half(), weight.shape[1] // scales.shape[1]
    part = next((size for size in (_LARGEST_GROUP, 64, _GROUP, 16) if size <= group and group % size == 0), None)
    if part is None or weight.shape[1] % group or not torch.equal(halves.float(), scales.float()):
        return None
    halves = halves.repeat_interleave(group // part, dim=1)
    for width in dict.fromkeys((bits, 8)):
        numbers = _numbers(weight, halves, width)
        if all(map(_is_product, *(torch.split(part, _ROWS_AT_ONCE) for part in (weight, numbers, halves)))):
            return pack_numbers(numbers, halves, width)
    return None


def _numbers(weight: Tensor, scales: Tensor, bits: int) -> Tensor:
    """[N, K] int8: the weights as multiples of their groups' scales."""
    parts = []
    for rows, row_scales in zip(
        torch.split(weight, _ROWS_AT_ONCE), torch.split(scales.float(), _ROWS_AT_ONCE), strict=True
    ):
        grouped = rows.view(len(rows), row_scales.shape[1], -1)
        divided = torch.where(row_scales[..., None] != 0, grouped / row_scales[..., None], 0.0)
        parts.append(divided.round_().clamp_(-_MOST[bits] - 1, _MOST[bits]).to(torch.int8).flatten(1))
    return torch.cat(parts)


def _is_product(weight: Tensor, numbers: Tensor, scales: Tensor) -> bool:
    grouped = numbers.view(len(numbers), scales.shape[1], -1)
    return torch.allclose((grouped * scales.float()[..., None]).flatten(1), weight, rtol=1e-6, atol=0)


def _largest(weight: Tensor, *, signed: bool = False) -> Tensor:
    """[N, groups]: the number of the largest magnitude of each 32, or its magnitude."""
    grouped = weight.view(len(weight), -1, _GROUP)
    if not signed:
        return torch.maximum(grouped.amax(-1), -grouped.amin(-1))
    lowest, highest = grouped.amin(-1), grouped.amax(-1)
    return torch.where(-lowest > highest, lowest, highest)


def sizes(packed: Mapping[str, PackedWeight]) -> str:
    """How many weights have how many bits, for people."""
    counts = Counter[int]()
    for weight in packed.values():
        counts[weight.bits] += weight.shape[0] * weight.shape[1]
    return ", ".join(f"{count / 1e6:.0f} million numbers of {bits} bits" for bits, count in sorted(counts.items()))


def stand_in(shape: torch.Size | tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor without memory, in a state dict in the place of a weight that is packed."""
    return torch.zeros((), dtype=dtype).expand(shape)


def put_in(model: nn.Module, packed: Mapping[str, PackedWeight], dtype: torch.dtype) -> None:
    """Replace the linear layers of these names by packed ones."""
    for name, weight in packed.items():
        layer: Any = model.get_submodule(name)
        model.set_submodule(name, PackedLinear(weight, layer.bias, dtype))


def save(folder: Path, model: PreTrainedModel, packed: Mapping[str, PackedWeight]) -> None:
    """Write a model, of whose linear layers those of these names are packed."""
    model.config.save_pretrained(folder)
    if model.generation_config is not None:
        model.generation_config.save_pretrained(folder)
    names = {f"{name}.weight" for name in packed}
    state = {name: tensor.contiguous() for name, tensor in model.state_dict().items() if name not in names}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    parts = {
        f"{name}.{part}": getattr(weight, part) for name, weight in packed.items() for part in ("values", "scales")
    }
    save_file(parts, folder / _FILE, metadata={"format": "pt"})


def is_kept_packed(folder: Path) -> bool:
    """Whether `save` wrote the folder."""
    return (folder / _FILE).is_file()


def load(folder: Path, config: PreTrainedConfig, dtype: torch.dtype) -> tuple[PreTrainedModel, dict[str, Any]]:
    """What was saved, mapped into memory, and what transformers says of the loading."""
    state = dict(TensorFiles(str(folder), {"local_files_only": True}))
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    with torch.device("meta"):
        skeleton = model_class(config)
    packed = _read(folder, skeleton)
    for name, weight in packed.items():
        if f"{name}.weight" not in skeleton.all_tied_weights_keys:
            state[f"{name}.weight"] = stand_in(weight.shape, dtype)
    model, report = model_class.from_pretrained(
        None, config=config, state_dict=state, dtype=dtype, output_loading_info=True
    )
    put_in(model, packed, dtype)
    logger.info("weights of linear layers are kept packed: %s; others are in %s", sizes(packed), dtype)
    model.config._name_or_path = str(folder)
    model.generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)
    return model, report


def _read(folder: Path, skeleton: nn.Module) -> dict[str, PackedWeight]:
    parts = TensorFiles(str(folder), {"local_files_only": True}, names=(_FILE,))
    packed = {}
    for name in sorted({name.rpartition(".")[0] for name in parts}):
        layer: Any = skeleton.get_submodule(name)
        values, scales = parts[f"{name}.values"], parts[f"{name}.scales"]
        bits = 32 * values.shape[1] // layer.in_features
        packed[name] = PackedWeight(values, scales, (layer.out_features, layer.in_features), bits, is_rotated=False)
    return packed
