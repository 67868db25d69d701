"""Linear layers as GPTQ and AWQ pack them, and the weights that these stand for."""

from __future__ import annotations

import torch
from torch import Tensor

GROUP = 32
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which column is in each 4 bits of a word, lowest first."""
Packed = tuple[dict[str, Tensor], Tensor]
"""The tensors of a layer, and the weight that they stand for."""


def packed(numbers: Tensor, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """[rows, columns] -> [rows, columns * bits / 32], written out number by number."""
    per_word = 32 // bits
    order = order or tuple(range(per_word))
    rows = []
    for row in numbers.tolist():
        words = [
            sum(row[start + column] << (bits * place) for place, column in enumerate(order))
            for start in range(0, len(row), per_word)
        ]
        rows.append([word - 2**32 if word >= 2**31 else word for word in words])
    return torch.tensor(rows, dtype=torch.int32)


def random_layer(
    shape: tuple[int, int], bits: int, seed: int, group: int = GROUP
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Integers [out, in], zeros and scales [groups, out], and the group of each input; -1: all are one group."""
    generator = torch.Generator().manual_seed(seed)
    num_outputs, num_inputs = shape
    group = num_inputs if group == -1 else group
    num_groups = num_inputs // group
    integers = torch.randint(0, 2**bits, shape, generator=generator)
    zeros = torch.randint(0, 2**bits, (num_groups, num_outputs), generator=generator)
    scales = torch.rand(num_groups, num_outputs, generator=generator).half() / 2 ** (bits - 1) / 4
    return integers, zeros, scales, torch.arange(num_inputs) // group


def gptq(
    shape: tuple[int, int],
    seed: int,
    *,
    bits: int,
    act_order: bool,
    version: int,
    is_symmetric: bool = False,
    group: int = GROUP,
) -> Packed:
    integers, zeros, scales, groups = random_layer(shape, bits, seed, group)
    if is_symmetric:
        zeros[:] = 2 ** (bits - 1)
    if act_order:
        groups = groups[torch.randperm(len(groups), generator=torch.Generator().manual_seed(seed))]
    stored = (zeros - 1) % 2**bits if version == 1 else zeros
    weight = (integers - zeros.T[:, groups]) * scales.float().T[:, groups]
    tensors = {
        "qweight": packed(integers, bits).T.contiguous(),
        "qzeros": packed(stored, bits),
        "scales": scales,
        "g_idx": groups.int(),
        "bias": torch.zeros(shape[0], dtype=torch.float16),
    }
    return tensors, weight


def awq(shape: tuple[int, int], seed: int, group: int = GROUP) -> Packed:
    integers, zeros, scales, groups = random_layer(shape, 4, seed, group)
    weight = (integers - zeros.T[:, groups]) * scales.float().T[:, groups]
    tensors = {
        "qweight": packed(integers.T.contiguous(), 4, AWQ_ORDER),
        "qzeros": packed(zeros, 4, AWQ_ORDER),
        "scales": scales,
    }
    return tensors, weight
