"""Whether a model is still the one that an engine was built on, and whether its weights have moved since."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Self

from torch import Tensor, nn


class Snapshot(NamedTuple):
    """What can be seen of a model's state without reading it.

    `structure` changes with its modules, hooks, tensors, types and devices: then an engine must be built anew.
    `values` changes with whatever writes into a weight or gives it other memory, such as an optimizer's step or
    `load_state_dict`: then keys and values computed before are stale. A write through `tensor.data` goes unseen.
    """

    structure: tuple[object, ...]
    values: tuple[int, ...]

    @classmethod
    def of(cls, model: nn.Module) -> Self:
        structure: list[object] = []
        values: list[int] = []
        for module in model.modules():
            structure += (id(module), len(module._forward_hooks), len(module._forward_pre_hooks))
            for tensor in module._parameters.values():
                if tensor is not None:
                    structure += (id(tensor), tensor.dtype, tensor.device)
                    values += (_version(tensor), tensor.data_ptr())
            for buffer in _learned_buffers(module):
                structure += (id(buffer), _version(buffer), buffer.dtype, buffer.device)
        return cls(tuple(structure), tuple(values))


def _learned_buffers(module: nn.Module) -> Iterator[Tensor]:
    """Those that are saved with the model. An engine has copies of them, whereas it shares the parameters."""
    for name, buffer in module._buffers.items():
        if buffer is not None and name not in module._non_persistent_buffers_set:
            yield buffer


def _version(tensor: Tensor) -> int:
    """How often it was written into; nobody counts that for tensors made in inference mode."""
    return -1 if tensor.is_inference() else tensor._version


def has_adapters(model: nn.Module) -> bool:
    """Whether PEFT has put adapters into the model, which are switched on and off without a trace in its tensors."""
    return any(type(module).__module__.partition(".")[0] == "peft" for module in model.modules())
