"""`quantization`: the linear layers of a model become layers with weights of 8 or 4 bits, one after the other.

Some inputs of a layer are far larger than others, whatever the text. So a few tokens go through the model first, and
each layer is packed when they come to it, with factors that fit what it sees.
"""

from __future__ import annotations

import dataclasses
import logging
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from paged_backend.errors import ConfigError
from paged_backend.model.encoder import is_encoder
from paged_backend.model.linear import PackedLinear
from paged_backend.model.mapped_files import MappedFiles
from paged_backend.model.model_call import ModelCall
from paged_kernels import pack
from paged_kernels.packing import LEAST_COLUMNS, can_be_group, factors_for

logger = logging.getLogger(__name__)

_BITS = {"int8": 8, "int4": 4}
# What chooses the token needs precision more than the rest, and has few rows.
_BITS_OF_LOGITS, _GROUP_OF_LOGITS = 8, 64
_NUM_TOKENS = 64  # that go through the model


@dataclasses.dataclass(slots=True)
class _Layer:
    """A linear layer that is packed when it is first called, and whose place in the model the packed one then takes."""

    parents: list[tuple[nn.Module, str]]
    """Whose it is, and what they call it."""
    linear: nn.Linear | Conv1D | None
    """None once it is packed, so that its memory is free while the next one is packed."""
    bits: int
    group: int | None
    """See `pack`."""
    files: MappedFiles | None
    """Where its weights may be, if nobody else reads them."""
    packed: PackedLinear | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.packed is None:
            factors = factors_for(_sizes(x.reshape(-1, x.shape[-1])))
            self.pack(factors if factors.isfinite().all() else None)
        assert self.packed is not None
        y: Tensor = self.packed(x)
        return y

    def pack(self, input_factors: Tensor | None) -> None:
        assert self.linear is not None
        weight = _weight(self.linear)
        assert weight is not None
        packed = pack(weight, self.bits, input_factors, group_of_8_bits=self.group)
        self.packed = PackedLinear(packed, self.linear.bias, weight.dtype)
        for parent, child_name in self.parents:
            setattr(parent, child_name, self.packed)
        if self.files is not None:
            self.files.let_go([self.linear.weight])
        self.linear = None


@torch.inference_mode()
def quantize_linears(model: PreTrainedModel, quantization: str, name: str) -> None:
    """Replace each linear layer by one of rounded weights, and let go of what it was made of.

    Layers of fewer than LEAST_COLUMNS outputs stay, such as routers, where there is nothing to gain. Embeddings stay;
    if `lm_head` shares their weights, it gets its own. A layer that the tokens do not come to, as in a mixture of
    experts, is packed without factors. Raises ConfigError for a model that is not on a CPU or has no linear layers.
    """
    if model.device.type != "cpu":
        raise ConfigError(
            f"quantization={quantization!r} is for CPUs, but {name} is on {model.device}; leave it at None there"
        )
    if is_encoder(model.config):
        raise ConfigError(f"quantization={quantization!r} is for models that generate text, and {name} is an encoder")
    layers = _layers(model, _BITS[quantization])
    if not layers:
        raise ConfigError(f"quantization={quantization!r}: {name} has no linear layers that could be quantised")
    _pack_on_the_way(model, layers, name)
    for layer in layers:
        if layer.packed is None:
            layer.pack(None)
    num_weights = sum(layer.packed.in_features * layer.packed.out_features for layer in layers if layer.packed)
    logger.info("%s: %.0f million weights in %s", name, num_weights / 1e6, quantization)


def _layers(model: PreTrainedModel, bits: int) -> list[_Layer]:
    """Those to be packed."""
    head = model.get_output_embeddings()
    files, shared = MappedFiles(), _shared_weights(model)
    layers = dict[int, _Layer]()
    for parent in model.modules():
        children: list[tuple[str, Any]] = list(parent.named_children())
        for child_name, child in children:
            weight = _weight(child)
            if weight is not None and len(weight) >= LEAST_COLUMNS:
                own_files = None if id(child.weight) in shared else files
                is_divided = child is head and can_be_group(_GROUP_OF_LOGITS, weight.shape[1])
                group = _GROUP_OF_LOGITS if is_divided else None
                layer = _Layer([], child, _BITS_OF_LOGITS if child is head else bits, group, own_files)
                layers.setdefault(id(child), layer).parents.append((parent, child_name))
    return list(layers.values())


def _pack_on_the_way(model: PreTrainedModel, layers: Sequence[_Layer], name: str) -> None:
    """Let some tokens go through the model, and pack each layer when they come to it."""
    for layer in layers:
        if layer.linear is not None:
            layer.linear.forward = layer.forward  # type: ignore[method-assign]
    try:
        ModelCall(model).plain(_token_ids(model))
    except Exception as error:  # whatever the model's code raises; whether it can be run is found out later
        logger.info("%s: its layers are quantised without a look at their inputs: %r", name, error)
    finally:
        for layer in layers:
            if layer.linear is not None:
                del layer.linear.forward


def _token_ids(model: PreTrainedModel) -> Tensor:
    """Some that are spread over the vocabulary."""
    num_ids: int = model.get_input_embeddings().num_embeddings
    length = min(_NUM_TOKENS, getattr(model.config.get_text_config(), "max_position_embeddings", _NUM_TOKENS))
    return torch.tensor([(7 + 7919 * i) % num_ids for i in range(length)])


def _sizes(x: Tensor) -> Tensor:
    """Of each of the inputs [T, K]: the root of its mean square, with all tokens' inputs taken as equally large."""
    squares = x.float().square()
    return (squares / squares.mean(1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)).mean(0).sqrt()


def _shared_weights(model: nn.Module) -> set[int]:
    """The ids of those that more than one module has."""
    users = Counter(id(weight) for module in model.modules() for weight in module.parameters(recurse=False))
    return {weight for weight, num_users in users.items() if num_users > 1}


def _weight(layer: Any) -> Tensor | None:
    """[out, in] of a linear layer; None for any other."""
    if type(layer) is nn.Linear:
        return layer.weight
    return layer.weight.T if type(layer) is Conv1D else None
