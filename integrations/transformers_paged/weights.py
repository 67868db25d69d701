"""Whether a model is still the one that an engine was built on, and whether its weights have moved since."""

from __future__ import annotations

import enum
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

_NUM_SAMPLES = 4


class Change(enum.Enum):
    """What has become of a model since the last look."""

    NOTHING = enum.auto()
    VALUES = enum.auto()
    """Weights were written into, so keys and values that were computed before are stale."""
    STRUCTURE = enum.auto()
    """Modules, hooks, tensors, types or devices are others, so an engine must be built anew."""


class Watch:
    """Notices what becomes of a model, without reading all of it.

    An optimizer's step, writing into a tensor and giving a parameter other memory are always noticed. A write through
    `tensor.data` has no trace but the numbers: it is noticed if it changes one of the first four of any parameter.
    """

    def __init__(self) -> None:
        self._structure: tuple[object, ...] = ()
        self._versions: tuple[int, ...] = ()
        self._views: list[Tensor] = []
        self._samples = torch.empty(0)
        self._num_steps = 0
        watch = weakref.ref(self)

        def count_step(*_: Any) -> None:  # fused optimizers write without counting the tensor's version up
            if (counting := watch()) is not None:
                counting._num_steps += 1

        self._hook = weakref.finalize(self, register_optimizer_step_post_hook(count_step).remove)

    def look(self, model: nn.Module) -> Change:
        """What has changed since the last look; the first one sees a new structure."""
        structure: list[object] = []
        versions = [self._num_steps]
        for module in model.modules():
            structure += (id(module), len(module._forward_hooks), len(module._forward_pre_hooks))
            for tensor in _parameters(module):
                structure += (id(tensor), tensor.dtype, tensor.device)
                versions += (_version(tensor), tensor.data_ptr())
            for buffer in _learned_buffers(module):
                structure += (id(buffer), _version(buffer), buffer.dtype, buffer.device)
        before, self._structure = self._structure, tuple(structure)
        if self._structure != before:
            change = Change.STRUCTURE
        elif self._versions != tuple(versions) or not torch.equal(self._read(), self._samples):
            change = Change.VALUES
        else:
            return Change.NOTHING
        self._versions = tuple(versions)
        self._views = [view for module in model.modules() for view in _views(module)]
        self._samples = self._read()
        return change

    def close(self) -> None:
        """Let go of the model's memory and of torch's optimizers."""
        self._views = []
        self._hook()

    def _read(self) -> Tensor:
        return torch.cat(self._views).cpu() if self._views else torch.empty(0)


def _parameters(module: nn.Module) -> Iterator[Tensor]:
    return (tensor for tensor in module._parameters.values() if tensor is not None)


def _learned_buffers(module: nn.Module) -> Iterator[Tensor]:
    """Those that are saved with the model. An engine has copies of them, whereas it shares the parameters."""
    for name, buffer in module._buffers.items():
        if buffer is not None and name not in module._non_persistent_buffers_set:
            yield buffer


def _views(module: nn.Module) -> Iterator[Tensor]:
    """The first numbers of each plain parameter, in its own memory."""
    for tensor in _parameters(module):
        if tensor.dtype in (torch.float32, torch.bfloat16, torch.float16) and tensor.is_contiguous():
            yield tensor.detach().view(-1)[:_NUM_SAMPLES]


def _version(tensor: Tensor) -> int:
    """How often it was written into; nobody counts that for tensors made in inference mode."""
    return -1 if tensor.is_inference() else tensor._version


def has_adapters(model: nn.Module) -> bool:
    """Whether PEFT has put adapters into the model, which are switched on and off without a trace in its tensors."""
    return any(type(module).__module__.partition(".")[0] == "peft" for module in model.modules())
