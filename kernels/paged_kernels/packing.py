"""Packed weights, of 16, 8 or 4 bits: how they lie in memory, and how they are rounded.

What is multiplied at once lies together, so that memory is read from one end to the other, and sums of products need no
sum over lanes at their end.

With 8 or 4 bits a layer's inputs are rotated before they are rounded, and so are its weights, which leaves their
products as they were. It spreads large numbers over many, so that 8 bits are enough for whole rows. Before that, inputs
that are large in all rows can be made smaller and their weights larger, by `input_factors`. Weights that were rounded
elsewhere are not rotated; `pack_numbers` takes them as they are, in groups.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import torch
from torch import Tensor

LANES = 16
"""Columns whose weights lie next to each other: a block."""
LEAST_COLUMNS = 4 * LANES
"""The kernels multiply so many columns at once; smaller matrices are padded to it."""
BITS = (16, 8, 4)
GROUP_OF_4_BITS = 32
"""Weights of 4 bits share their scale with so many neighbours; weights of 8 bits with their whole column, unless `pack`
is told otherwise."""
ROTATION = 64
"""Most neighbours that are mixed; more gave no better results."""
_LEAST_SIZE = 0.01  # of an input, in those of the mean
_MOST_AT_ONCE = 4096  # columns, so that what is in between takes little memory


@dataclasses.dataclass(frozen=True, slots=True)
class PackedWeight:
    """A matrix of weights [N, K]; column n of the product is the input times row n. N is padded to a multiple
    of LANES, and to LEAST_COLUMNS.

    With 16 bits a weight is what is stored, with fewer it is `(stored - offset) * scale`, rotated.
    """

    values: Tensor
    """[N / 16, steps, 16, 2] bfloat16 or [N / 16, steps, 16, 4] uint8: a step holds 2 or 4 neighbours of each of 16
    columns. With 4 bits a byte holds a number of this step's first 4 neighbours in its lower half, and one of the 4
    after them in the upper one."""
    scales: Tensor
    """[N / 16, groups, 16]: float32 with 8 bits, bfloat16 with 4, or what was given; no groups with 16 bits."""
    shape: tuple[int, int]
    """N and K."""
    bits: int
    is_rotated: bool = True
    """With 8 or 4 bits."""
    input_factors: Tensor | None = None
    """[K] float32, with 8 or 4 bits: what inputs are multiplied by before they are rotated, and weights were divided
    by; None: 1."""

    @property
    def offset(self) -> int:
        return 0 if self.bits == 16 else int(1 << (self.bits - 1))

    @property
    def rotation(self) -> int:
        """How many neighbours are mixed."""
        return rotation_size(self.shape[1]) if self.is_rotated else 1

    @property
    def padded_depth(self) -> int:
        return self.values.shape[1] * (32 // self.bits)

    @property
    def num_groups(self) -> int:
        return max(1, self.scales.shape[1])

    @property
    def numbers(self) -> Tensor:
        """[N, K], both padded: what is stored, less the offset, as float32."""
        values = self.values
        if self.bits == 4:
            values = torch.stack([values & 15, values >> 4], dim=2).flatten(1, 2)
        return values.permute(0, 2, 1, 3).reshape(-1, self.padded_depth).float() - self.offset

    @property
    def column_scales(self) -> Tensor:
        """[N, groups], N padded: the scales of the columns' groups, float32."""
        return self.scales.float().permute(0, 2, 1).flatten(0, 1)

    def rows(self, indices: Tensor) -> Tensor:
        """These rows of the weights, [R, K], as they are stored with 16 bits."""
        assert self.bits == 16
        return self.values[indices // LANES, :, indices % LANES].flatten(1)[:, : self.shape[1]]

    def unpack(self) -> Tensor:
        """The weights [N, K] as float32, rotated back."""
        num_columns, depth = self.shape
        if self.bits == 16:
            return self.numbers[:num_columns, :depth]
        grouped = self.numbers.view(-1, self.num_groups, self.padded_depth // self.num_groups)
        weight = rotate((grouped * self.column_scales[..., None]).flatten(1)[:num_columns, :depth], self.rotation)
        return weight if self.input_factors is None else weight * self.input_factors


def packs_bfloat16() -> bool:
    """Whether weights of 16 bits are multiplied faster packed than in rows, on this CPU."""
    from paged_kernels.vector import BFLOAT16_IS_FAST, WIDTH  # late: Numba takes half a second to import

    return BFLOAT16_IS_FAST or WIDTH == 8


def pack(
    weight: Tensor, bits: int, input_factors: Tensor | None = None, *, group_of_8_bits: int | None = None
) -> PackedWeight:
    """Pack the weights [N, K] of a linear layer, which with 16 bits are bfloat16.

    With fewer they are rounded after they are divided by the `input_factors` [K], float32 and positive, and rotated.
    With 4 bits each group of a column has a scale of its own; with 8 each column, or each `group_of_8_bits` neighbours,
    which `can_be_group`, as their inputs then have.
    """
    assert bits in BITS and weight.dim() == 2 and (bits != 16 or weight.dtype == torch.bfloat16)
    shape = (weight.shape[0], weight.shape[1])
    if bits == 16:
        return PackedWeight(*_packed(weight), shape, bits)
    group = GROUP_OF_4_BITS if bits == 4 else group_of_8_bits
    parts = [_quantized(part, bits, group, input_factors) for part in torch.split(weight, _MOST_AT_ONCE)]
    values, scales = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    return PackedWeight(values, scales, shape, bits, input_factors=input_factors)


def factors_for(size_of_inputs: Tensor) -> Tensor:
    """Factors [K] for inputs whose numbers have these sizes [K], the roots of their mean squares.

    The noise of rounded inputs grows with the largest numbers times all weights, and that of rounded weights with the
    largest weights times all inputs; for both together it is best to move the square root of an input's size into its
    weights. Inputs that are hardly ever there are taken as a hundredth of the mean.
    """
    sizes = size_of_inputs.float()
    return sizes.clamp_min(_LEAST_SIZE * sizes.mean()).rsqrt()


def pack_numbers(numbers: Tensor, scales: Tensor, bits: int) -> PackedWeight:
    """Pack weights [N, K] that are whole numbers of 8 or 4 bits, signed, times the scales [N, groups] of their groups
    of neighbours, which `can_be_group`. Scales stay in their type: float32, bfloat16 or float16."""
    num_columns, depth = numbers.shape
    assert bits != 16 and can_be_group(depth // scales.shape[1], depth) and depth % scales.shape[1] == 0
    parts = [
        _laid_out(torch.nn.functional.pad(part, padding), torch.nn.functional.pad(part_scales, padding), bits)
        for part, part_scales in zip(
            torch.split(numbers, _MOST_AT_ONCE), torch.split(scales, _MOST_AT_ONCE), strict=True
        )
        for padding in [(0, 0, 0, _padding(len(part)))]
    ]
    values, packed_scales = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    return PackedWeight(values, packed_scales, (num_columns, depth), bits, is_rotated=False)


def can_be_group(size: int, depth: int) -> bool:
    """Whether so many neighbours of `depth` can share a scale in the kernels."""
    return size % LANES == 0 and depth % size == 0


def can_be_merged(weights: list[PackedWeight]) -> bool:
    """Whether all are rounded in the same way, as are their inputs, and none has padding."""
    sizes = [weight.shape[0] for weight in weights]
    kinds = {(weight.bits, weight.scales.shape[1], weight.scales.dtype, weight.is_rotated) for weight in weights}
    is_alike = len(kinds) == 1 and all(_have_same_factors(weights[0], weight) for weight in weights)
    return is_alike and all(n % LANES == 0 and n >= LEAST_COLUMNS for n in sizes)


def merge(weights: list[PackedWeight]) -> PackedWeight:
    """One matrix of the columns of several, which `can_be_merged`."""
    assert can_be_merged(weights)
    values, scales = (torch.cat([getattr(weight, name) for weight in weights]) for name in ("values", "scales"))
    num_columns = sum(weight.shape[0] for weight in weights)
    shape = (num_columns, weights[0].shape[1])
    return dataclasses.replace(weights[0], values=values, scales=scales, shape=shape)


def split(weight: PackedWeight, sizes: list[int]) -> list[PackedWeight]:
    """Views of the columns, `sizes` at a time, as they were merged."""
    blocks = [size // LANES for size in sizes]
    tensors = zip(torch.split(weight.values, blocks), torch.split(weight.scales, blocks), sizes, strict=True)
    return [
        dataclasses.replace(weight, values=values, scales=scales, shape=(size, weight.shape[1]))
        for values, scales, size in tensors
    ]


def quantize_rows(x: Tensor, weight: PackedWeight) -> tuple[Tensor, Tensor]:
    """Inputs [T, K] as whole numbers from -127 to 127, [T, groups, size], and their scales [T, groups, 1].

    A row with a number that is not finite has scales that are NaN.
    """
    x = x.float() if weight.input_factors is None else x.float() * weight.input_factors
    rotated = torch.nn.functional.pad(rotate(x, weight.rotation), (0, weight.padded_depth - x.shape[1]))
    grouped = rotated.view(len(x), weight.num_groups, -1)
    largest = grouped.abs().amax(-1, keepdim=True)
    factors = torch.where(largest > 0, 127 / largest, 0.0)
    numbers = torch.where(largest.isfinite(), grouped * factors, 0.0).round()
    return numbers, torch.where(largest.isfinite(), largest / 127, torch.nan)


def rotate(x: Tensor, size: int | None = None) -> Tensor:
    """[..., K] times an orthogonal matrix, its own inverse: Hadamard matrices mix each `size`, `rotation_size(K)` if
    that is None."""
    depth = x.shape[-1]
    size = size or rotation_size(depth)
    rotated: Tensor = (x.reshape(*x.shape[:-1], depth // size, size) @ _hadamard(size).to(x)).reshape(x.shape)
    return rotated


def rotation_size(depth: int) -> int:
    """The largest power of two that divides the depth, ROTATION at most."""
    return min(ROTATION, depth & -depth)


@functools.cache
def _hadamard(size: int) -> Tensor:
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix / math.sqrt(size)


def _have_same_factors(one: PackedWeight, other: PackedWeight) -> bool:
    if one.input_factors is None or other.input_factors is None:
        return one.input_factors is other.input_factors
    return torch.equal(one.input_factors, other.input_factors)


def _packed(weight: Tensor) -> tuple[Tensor, Tensor]:
    """bfloat16 weights as PackedWeight has them, and no scales."""
    padding = (0, weight.shape[1] % 2, 0, _padding(weight.shape[0]))
    padded = torch.nn.functional.pad(weight, padding) if any(padding) else weight.contiguous()
    blocks = len(padded) // LANES
    pairs = padded.view(torch.int32).view(blocks, LANES, -1)
    values = pairs.transpose(1, 2).contiguous().view(torch.bfloat16).view(blocks, -1, LANES, 2)
    return values, torch.empty(blocks, 0, LANES)


def _quantized(weight: Tensor, bits: int, group: int | None, input_factors: Tensor | None) -> tuple[Tensor, Tensor]:
    """A group of None is a column."""
    num_columns, depth = weight.shape
    divided = weight.float() if input_factors is None else weight.float() / input_factors
    padded = torch.nn.functional.pad(rotate(divided), (0, -depth % (group or 4), 0, _padding(num_columns)))
    grouped = padded.view(len(padded), -1, group or padded.shape[1])
    if bits == 8:
        scales = grouped.abs().amax(-1, keepdim=True) / 127
    else:
        # The largest number becomes -8, which has no positive counterpart.
        largest = grouped.gather(-1, grouped.abs().argmax(-1, keepdim=True))
        scales = (largest / -8).bfloat16().float()
    most = 127 if bits == 8 else 7
    numbers = torch.where(scales != 0, grouped / scales, 0.0).round().clamp(-most - 1, most)
    scales = scales[..., 0].to(torch.float32 if bits == 8 else torch.bfloat16)
    return _laid_out(numbers.flatten(1), scales, bits)


def _laid_out(numbers: Tensor, scales: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Whole numbers [N, K], signed, and scales [N, groups], N padded, as PackedWeight has them."""
    blocks = len(numbers) // LANES
    values = (
        (numbers.to(torch.int16) + (1 << (bits - 1))).to(torch.uint8).view(blocks, LANES, -1, 4).permute(0, 2, 1, 3)
    )
    if bits == 4:
        values = values[:, 0::2] | (values[:, 1::2] << 4)
    return values.contiguous(), scales.view(blocks, LANES, -1).permute(0, 2, 1).contiguous()


def _padding(num_columns: int) -> int:
    return max(LEAST_COLUMNS, -(-num_columns // LANES) * LANES) - num_columns
