"""States that a model keeps in attributes of its modules instead of in its cache, as RecurrentGemma does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn


class ModuleStates:
    """Tensors that a call leaves in a model's modules, and the next call finds there: [B, ...] of B sequences."""

    def __init__(self, model: nn.Module) -> None:
        """Before a call of one sequence; `find` comes after it."""
        self._model = model
        self._before = _tensors(model)
        self._places: list[tuple[nn.Module, str]] = []

    def find(self) -> None:
        before = {(id(module), name): tensor for module, name, tensor in self._before}
        self._places = [
            (module, name)
            for module, name, tensor in _tensors(self._model)
            if tensor.dim() > 1 and tensor.shape[0] == 1 and before.get((id(module), name)) is not tensor
        ]
        self._before = []

    def put(self, states: Sequence[tuple[Tensor, ...] | None]) -> None:
        """Before a call of so many sequences, all of which have a state, or none of which has."""
        for index, (module, name) in enumerate(self._places):
            known = [state[index] for state in states if state is not None]
            setattr(module, name, torch.cat(known) if known else None)

    def take(self, num_sequences: int) -> list[tuple[Tensor, ...]]:
        """After the call, the state of each sequence, in memory of its own."""
        values: list[Any] = [getattr(module, name) for module, name in self._places]
        return [tuple(value[row : row + 1].clone() for value in values) for row in range(num_sequences)]


def _tensors(model: nn.Module) -> list[tuple[nn.Module, str, Tensor]]:
    """Attributes that are neither parameters nor buffers."""
    return [
        (module, name, value)
        for module in model.modules()
        for name, value in vars(module).items()
        if isinstance(value, Tensor)
    ]
