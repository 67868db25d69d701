"""Which linear layers of a model an adapter may change."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D


def linear_layers(model: nn.Module) -> dict[str, tuple[int, int]]:
    """(in, out) of each linear layer, also of those with packed weights."""
    return {name: shape for name, module in model.named_modules() if (shape := _shape(module)) is not None}


class LayerWatch:
    """Watches calls of a model for the linear layers that do not get a row for each token in every call.

    To these nothing can be added: experts get the rows that are routed to them, and some code reads a layer's weights
    instead of calling it.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._layers = {name: model.get_submodule(name) for name in linear_layers(model)}
        self._num_tokens = 0
        self._seen: set[str] = set()
        self.unlike: set[str] = set()
        """The names of those layers, as far as calls have shown."""

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        head = self._model.get_output_embeddings()  # type: ignore[operator]
        with contextlib.ExitStack() as hooks:
            hooks.callback(self._model.register_forward_pre_hook(self._begin, with_kwargs=True).remove)
            hooks.callback(self._model.register_forward_hook(self._end).remove)
            for name, layer in self._layers.items():
                hooks.callback(layer.register_forward_hook(self._hook_of(name, is_head=layer is head)).remove)
            yield

    def _begin(self, model: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        self._num_tokens = named["input_ids"].numel()
        self._seen = set()

    def _end(self, model: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
        self.unlike |= self._layers.keys() - self._seen

    def _hook_of(self, name: str, *, is_head: bool) -> Any:
        def look(layer: nn.Module, arguments: tuple[Tensor, ...], output: Tensor) -> None:
            self._seen.add(name)
            num_rows = arguments[0].shape[:-1].numel()
            if num_rows != self._num_tokens and not (is_head and num_rows < self._num_tokens):
                self.unlike.add(name)

        return look


def _shape(module: nn.Module) -> tuple[int, int] | None:
    if isinstance(module, Conv1D):
        return int(module.weight.shape[0]), int(module.weight.shape[1])
    sizes = getattr(module, "in_features", None), getattr(module, "out_features", None)
    return (sizes[0], sizes[1]) if isinstance(sizes[0], int) and isinstance(sizes[1], int) else None
