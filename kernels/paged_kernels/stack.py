"""All layers of a decoder built like Llama in one call, for CPUs.

It calls the kernels that a layer at a time would be computed with, and gives the same bits. But on a few tokens most of
them take a few microseconds, which is what calling one from Python takes as well.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paged_kernels import cpu, fused, gemm, packed
from paged_kernels.compiled import TYPES, array_of, set_num_threads
from paged_kernels.native import address_of
from paged_kernels.packing import PackedWeight
from paged_kernels.stack_steps import Buffers, Kernels, Likes, Operation, Options, Sizes, run_layers


@dataclasses.dataclass(frozen=True, slots=True)
class Matrix:
    """The weights of linear layers that read the same input, one after the other."""

    weight: Tensor | PackedWeight
    """[N, K] contiguous"""
    bias: Tensor | None
    """[N]"""

    def arguments(self) -> tuple[Any, ...]:
        """As `multiply` takes it; the bias has to be contiguous float32."""
        if isinstance(self.weight, PackedWeight):
            return packed.matrix_of(self.weight, self.bias)
        return gemm.matrix_of(self.weight, self.bias)

    def types(self, x: Tensor) -> tuple[NDArray[Any], ...]:
        if isinstance(self.weight, PackedWeight):
            return packed.types_of(x, self.weight)
        return gemm.types_of(x, self.weight)

    def part_kernels(self, x: Tensor) -> Any:
        """What `multiply` takes for its parts."""
        if isinstance(self.weight, PackedWeight):
            return packed.part_kernels(packed.types_of(x, self.weight), packed.matrix_of(self.weight, None))
        return gemm.part_kernel(gemm.types_of(x, self.weight))

    @property
    def precision(self) -> tuple[Any, ...]:
        """What decides by which kernel it is multiplied."""
        weight = self.weight
        return (weight.bits, weight.scales.dtype) if isinstance(weight, PackedWeight) else (weight.dtype,)

    @property
    def kind(self) -> tuple[Any, ...]:
        """What it has in common with its like in the other layers."""
        *_, sizes, rounding = self.arguments()
        return *self.precision, sizes, rounding

    @property
    def tensors(self) -> list[Tensor | None]:
        """Weights, scales, factors, bias."""
        weight = self.weight
        if isinstance(weight, PackedWeight):
            return [weight.values, weight.scales, weight.input_factors, self.bias]
        return [weight, None, None, self.bias]


@dataclasses.dataclass(frozen=True, slots=True)
class LayerWeights:
    """Norms are [E], or [D] for queries and keys."""

    attention_norm: Tensor
    qkv: Matrix
    q_norm: Tensor | None
    k_norm: Tensor | None
    output: Matrix
    mlp_norm: Tensor
    gate_up: Matrix
    down: Matrix

    @property
    def norms(self) -> list[Tensor | None]:
        return [self.attention_norm, self.q_norm, self.k_norm, self.mlp_norm]

    @property
    def matrices(self) -> list[Matrix]:
        return [self.qkv, self.output, self.gate_up, self.down]

    @property
    def kind(self) -> tuple[Any, ...]:
        """What layers of one stack have in common."""
        norms = [None if norm is None else (norm.dtype, tuple(norm.shape)) for norm in self.norms]
        return *norms, *(matrix.kind for matrix in self.matrices)


@dataclasses.dataclass(frozen=True, slots=True)
class AttentionOfLayer:
    """Where a layer's keys and values are, and how they are attended to; see `reference.paged_attention`."""

    keys: Tensor
    values: Tensor
    key_scales: Tensor | None
    value_scales: Tensor | None
    scale: float
    window: int | None
    chunk: int | None
    softcap: float | None
    group: int = 0
    """Of the places of a step, which are its."""

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        return self.keys, self.values, self.key_scales, self.value_scales


@dataclasses.dataclass(frozen=True, slots=True)
class StackOptions:
    """What all layers have in common."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    eps: float
    """Of all norms."""
    activation: str
    """As `silu_and_mul` takes it."""


class StepPlaces(Protocol):
    """Where the T tokens of a step are, as `store_kv` and `paged_attention` take it, but with slots [G, T] and tables
    [G, S, most blocks] for layers of G groups."""

    @property
    def slot_mapping(self) -> Tensor: ...
    @property
    def block_tables(self) -> Tensor: ...
    @property
    def query_start_loc(self) -> Tensor: ...
    @property
    def seq_lens(self) -> Tensor: ...


class LayerStack:
    """Layers that have the same sizes and types.

    It goes by addresses: the tensors that it is made of are kept alive, and have to stay where they are.
    """

    def __init__(
        self,
        layers: Sequence[LayerWeights],
        attention: Sequence[AttentionOfLayer],
        last_norm: Tensor,
        options: StackOptions,
    ) -> None:
        assert self.can_hold(layers)
        self._options, self._last_norm = options, last_norm
        self._layers = [_ready(layer) for layer in layers]
        self._attention = list(attention)
        pairs = zip(self._layers, self._attention, strict=True)
        self._table = np.array([_row(*pair) for pair in pairs], np.int64)
        self._factors = np.array([(of_layer.scale, of_layer.softcap or 0.0) for of_layer in attention], np.float64)
        self._run: Callable[..., None] | None = None
        """`run_layers` with what is the same in all steps."""

    @staticmethod
    def can_hold(layers: Sequence[LayerWeights]) -> bool:
        """Whether they are alike, and all their matrices of one type or packed in one way."""
        precisions = {matrix.precision for matrix in layers[0].matrices}
        return len({layer.kind for layer in layers}) == len(precisions) == 1

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, places: StepPlaces, keep: Tensor) -> Tensor:
        """The last hidden states, normalised, [R, E], of the rows `keep` [R]; `x` [T, E] is overwritten.

        cos and sin are [T, D].
        """
        cos, sin = cos.contiguous(), sin.contiguous()
        assert x.is_contiguous() and cos.dtype == sin.dtype and cos.shape[1] == self._options.head_size
        layer, num_tokens, width = self._layers[0], *x.shape
        num_kept, num_numbers = keep.shape[0], layer.output.weight.shape[1]
        shapes = [(num_tokens, width), (num_tokens, layer.qkv.weight.shape[0]), (num_tokens, num_numbers)]
        shapes += [(num_tokens, width), (num_tokens, layer.gate_up.weight.shape[0])]
        shapes += [(num_tokens, layer.down.weight.shape[1]), (num_kept, num_numbers), (num_kept, width)]
        buffers = [x, *(x.new_empty(shape) for shape in shapes)]
        step = (
            Options(self._options.eps, *fused.GATES[self._options.activation], set_num_threads()),
            self._table,
            self._factors,
            Buffers(*(buffer.data_ptr() for buffer in buffers)),
            (cos.data_ptr(), sin.data_ptr(), self._last_norm.data_ptr()),
            _arrays(places),
            keep.numpy(),
        )
        if self._run is None:
            self._run = self._prepared(x, cos, places, step)
        self._run(*step)
        return buffers[1][:num_kept]

    def _prepared(self, x: Tensor, cos: Tensor, places: StepPlaces, step: tuple[Any, ...]) -> Callable[..., None]:
        """`run_layers` for steps with arguments of these types."""
        scales = self._attention[0].key_scales
        kernels = self._find_kernels(x, cos, places)
        of_all_steps = (
            self._layers[0].qkv.types(x),
            self._likes(x, cos),
            None if scales is None else TYPES[scales.dtype],
            self._sizes(x.shape[1]),
            tuple(map(_operation, self._layers[0].matrices)),
        )
        address_of(run_layers, kernels, *of_all_steps, *step)
        keys = self._attention[0].keys  # last, since another process may be compiling for it
        kernels = kernels._replace(attend_items=cpu.item_kernels(x, keys))
        return functools.partial(run_layers, kernels, *of_all_steps)

    def _likes(self, x: Tensor, cos: Tensor) -> Likes:
        keys = self._attention[0].keys
        arrays = TYPES[x.dtype], TYPES[self._last_norm.dtype], TYPES[cos.dtype], _empty(keys)
        return Likes(*arrays, *cpu.tile_types(x, keys))

    def _sizes(self, width: int) -> Sizes:
        options, (keys, values, scales, _) = self._options, self._attention[0].tensors
        heads = options.num_heads, options.num_kv_heads, options.head_size, values.shape[3]
        blocks = (keys.shape[0], keys.shape[1], keys.shape[2])
        token = self._layers[0].qkv.weight.shape[0]
        return Sizes(width, token, *heads, blocks, (0, 0, 0) if scales is None else blocks)

    def _find_kernels(self, x: Tensor, cos: Tensor, places: StepPlaces) -> Kernels:
        """Those for arguments of these types, but for those that work on attention's items."""
        like, norm_like, angle_like, _, *tile_types = self._likes(x, cos)
        tensors, qkv = self._attention[0].tensors, self._layers[0].qkv
        keys, values, *scales = (cpu.NO_SCALES if tensor is None else array_of(tensor) for tensor in tensors)
        slots, tables, *lengths = _arrays(places)
        norm = (like, 0, 0, 0, norm_like, 0, 0, 0.0, 0.0, False, 0, 0)
        rotation = (like, (0, 0, 0, 0), (0, 0, 0, 0), angle_like, (0, 0, 0), False, 0, 0)
        gate = (like, 0, 0, 0, 0.0, 0.0, 0, 0)
        heads = (like, 0, 0, keys, values, *scales, tables[0], *lengths, _empty(x, 3), *tile_types)
        stores = cpu.store if tensors[2] is None else cpu.quantize
        stored = (keys, slots[0]) if tensors[2] is None else (keys, scales[0], slots[0])
        multiply = packed.multiply if isinstance(qkv.weight, PackedWeight) else gemm.multiply
        return Kernels(
            address_of(fused.norm_rows, *norm),
            address_of(fused.norm_all_rows, *norm),
            address_of(fused.rotate_tokens, *rotation),
            address_of(fused.rotate_all_tokens, *rotation),
            address_of(fused.gate_rows, *gate),
            address_of(fused.gate_all_rows, *gate),
            address_of(stores, like, 0, 0, *stored),
            address_of(cpu.attend, (0, 0, 0), *heads, 0.0, 0, 0, 0.0, cpu.NO_HEADS, cpu.NO_HEADS, 0),
            (0, 0, 0),
            address_of(multiply, qkv.part_kernels(x), qkv.types(x), 0, 0, qkv.arguments(), 0, 0, 0),
            qkv.part_kernels(x),
        )


def _arrays(places: StepPlaces) -> tuple[NDArray[Any], ...]:
    tensors = places.slot_mapping, places.block_tables, places.query_start_loc, places.seq_lens
    return tuple(tensor.numpy() for tensor in tensors)


def _ready(layer: LayerWeights) -> LayerWeights:
    """With biases as the kernels take them."""

    def ready(matrix: Matrix) -> Matrix:
        return matrix if matrix.bias is None else Matrix(matrix.weight, matrix.bias.float().contiguous())

    qkv, output, gate_up, down = map(ready, layer.matrices)
    return dataclasses.replace(layer, qkv=qkv, output=output, gate_up=gate_up, down=down)


def _operation(matrix: Matrix) -> Operation:
    *_, sizes, rounding = matrix.arguments()
    return Operation(sizes, rounding)


def _row(layer: LayerWeights, attention: AttentionOfLayer) -> list[int]:
    """Of the table."""
    tensors = [*layer.norms, *attention.tensors]
    for matrix in layer.matrices:
        tensors += matrix.tensors
    addresses = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
    return [*addresses, attention.window or 0, attention.chunk or 0, attention.group]


def _empty(like: Tensor, num_dimensions: int = 1) -> NDArray[Any]:
    """An array of no numbers, of a tensor's type."""
    return array_of(torch.empty((0,) * num_dimensions, dtype=like.dtype))
