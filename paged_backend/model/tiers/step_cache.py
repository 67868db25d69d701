"""The cache object that a model gets for one call: what is in it goes to the pages, or stays with the sequences."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol, Self

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import LinearAttentionCacheLayerMixin


class Pages(Protocol):
    """What takes keys and values."""

    def update(self, layer_idx: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Takes those of this call's tokens, [B, K, S, D] each; returns what the model attends to."""
        ...


class LinearStates(NamedTuple):
    """What one convolution or recurrence has of the B sequences of a call, [B, ...] each."""

    conv: Tensor | None
    recurrent: Tensor | None
    conv_kernel_size: int | None


class SequenceState(NamedTuple):
    """What all of a model's convolutions and recurrences have of one sequence after its computed tokens.

    A value: a step makes new ones, so that forks share it. Sequences of one call share its memory until all of them
    have been in another one: most go on together, and are copied together.
    """

    layers: tuple[LinearStates, ...]
    """Of all sequences of the call."""
    row: int
    """Which of them it is."""
    in_modules: tuple[Tensor, ...] = ()
    """What it has in the model's modules: see ModuleStates."""

    def copy(self) -> Self:
        return self

    @property
    def num_bytes(self) -> int:
        of_layers = [tensor[self.row] for layer in self.layers for tensor in layer[:2] if tensor is not None]
        return sum(tensor.numel() * tensor.element_size() for tensor in (*of_layers, *self.in_modules))


class StepCache(DynamicCache):  # type: ignore[misc]
    """Made for one call with B sequences. Each has had `num_before` tokens, or fewer and is padded on the left."""

    def __init__(
        self,
        config: PreTrainedConfig,
        pages: Pages,
        *,
        num_before: int,
        num_new: int,
        states: list[SequenceState | None],
    ) -> None:
        super().__init__(config=config)
        self._pages = pages
        self._num_before, self._num_new = num_before, num_new
        self._num_sequences = len(states)
        known = [state for state in states if state is not None]
        assert len(known) in (0, len(states))
        if known:
            for (layer, index), joined in zip(self._places(), _joined(known), strict=True):
                _fill(layer, index, joined)

    def states(self) -> list[SequenceState]:
        """Of each sequence, after the call."""
        layers = tuple(
            LinearStates(layer.conv_states[index], layer.recurrent_states[index], layer.conv_kernel_size[index])
            for layer, index in self._places()
        )
        return [SequenceState(layers, row) for row in range(self._num_sequences)]

    def _places(self) -> list[tuple[Any, int]]:
        return [(layer, index) for layer in _linear_layers(self) for index in range(layer.number_of_states)]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        return self._pages.update(layer_idx, key_states, value_states)

    def update_indexer(self, indexer_key_states: Tensor, layer_idx: int) -> Tensor:
        """An indexer's keys [B, S, D] have pages of their own, which go by the complement of the layer's number."""
        indexed, _ = self._pages.update(~layer_idx, indexer_key_states[:, None], indexer_key_states[:, None, :, :0])
        return indexed[:, 0]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._num_before

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return self._num_before

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self._num_before + self._num_new, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1

    get_max_cache_shape = get_max_length


def keeps_state(config: PreTrainedConfig) -> bool:
    """Whether the model's own cache has states of convolutions or recurrences."""
    try:
        return bool(_linear_layers(DynamicCache(config=config)))
    except Exception:  # whatever a config without the usual fields makes it raise
        return False


def _linear_layers(cache: DynamicCache) -> list[Any]:
    return [layer for layer in cache.layers if isinstance(layer, LinearAttentionCacheLayerMixin)]


def _joined(states: list[SequenceState]) -> list[LinearStates]:
    """Of these sequences, in memory that a call may change."""
    layers, rows = states[0].layers, [state.row for state in states]
    if all(state.layers is layers for state in states):
        return [LinearStates(_select(layer.conv, rows), _select(layer.recurrent, rows), layer[2]) for layer in layers]
    columns = zip(*(state.layers for state in states), strict=True)
    return [
        LinearStates(
            _stack([layer.conv for layer in column], rows),
            _stack([layer.recurrent for layer in column], rows),
            column[0][2],
        )
        for column in columns
    ]


def _select(tensor: Tensor | None, rows: list[int]) -> Tensor | None:
    return None if tensor is None else tensor.index_select(0, torch.tensor(rows, device=tensor.device))


def _stack(tensors: list[Tensor | None], rows: list[int]) -> Tensor | None:
    """Row `rows[i]` of each tensor, unless there are none."""
    known = [tensor[row] for tensor, row in zip(tensors, rows, strict=True) if tensor is not None]
    return torch.stack(known) if known else None


def _fill(layer: Any, index: int, states: LinearStates) -> None:
    if states.conv is not None:
        layer.conv_states[index] = states.conv
        layer.is_conv_states_initialized[index] = True
        layer.conv_kernel_size[index] = states.conv_kernel_size
    if states.recurrent is not None:
        layer.recurrent_states[index] = states.recurrent
        layer.is_recurrent_states_initialized[index] = True
    layer.has_previous_state[index] = True
    known = states.conv if states.conv is not None else states.recurrent
    if known is not None:
        layer.device, layer.dtype = known.device, known.dtype
