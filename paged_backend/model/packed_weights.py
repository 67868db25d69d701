"""Checkpoints quantised by GPTQ and AWQ: integers packed into words, unpacked into the weights that they stand for.

Both hold for each linear layer `qweight`, `scales` [groups, out] and `qzeros`, and mean `(q - zero) * scale`, with a
scale and a zero for each output and each group of inputs.

GPTQ packs qweight [in * bits / 32, out] along the inputs and qzeros [groups, out * bits / 32] along the outputs, lowest
bits first; `g_idx` [in] has the group of each input, in any order if it was quantised with act-order. Its first format,
which most checkpoints are in, holds zeros less one.

AWQ packs both along the outputs, 8 numbers of 4 bits in a word in the order 0 2 4 6 1 3 5 7.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from paged_backend.errors import ModelError

METHODS = ("gptq", "awq")
_GPTQ_BITS = (2, 4, 8)
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where in its word each of 8 numbers is."""


class Packing(Protocol):
    """How the integers of a layer become its weight."""

    bits: int
    """Of the numbers, less their zeros, in most of its checkpoints."""

    def unpack(self, read: Mapping[str, Tensor], layer: str) -> Tensor:
        """The weight [out, in], in float32."""
        ...

    def scales(self, read: Mapping[str, Tensor], layer: str) -> Tensor | None:
        """What its weights are multiples of, [out, groups]; None if the inputs of a group are no neighbours."""
        ...


class Unpacked(Mapping[str, Tensor]):
    """A checkpoint as if it had never been quantised: a layer's packed tensors are its `weight`, unpacked when read, in
    float32."""

    def __init__(self, packed: Mapping[str, Tensor], packing: Packing) -> None:
        self._packed, self.packing = packed, packing
        layers = [name.removesuffix("qweight") for name in packed if name.endswith(".qweight")]
        self._layers = {f"{layer}weight": layer for layer in layers}
        dropped = {layer + part for layer in layers for part in ("qweight", "qzeros", "scales", "g_idx")}
        self._others = [name for name in packed if name not in dropped]

    def __getitem__(self, name: str) -> Tensor:
        layer = self._layers.get(name)
        return self._packed[name] if layer is None else self.packing.unpack(self._packed, layer)

    def is_quantized(self, name: str) -> bool:
        return name in self._layers

    def scales(self, name: str) -> Tensor | None:
        """See `Packing.scales`."""
        return self.packing.scales(self._packed, self._layers[name])

    def __iter__(self) -> Iterator[str]:
        yield from self._others
        yield from self._layers

    def __len__(self) -> int:
        return len(self._others) + len(self._layers)


def packing_of(settings: Mapping[str, Any], name: str) -> Packing:
    """What a checkpoint's `quantization_config` says; raises ModelError for what is not supported."""
    method, bits = settings["quant_method"], settings.get("bits", settings.get("w_bit"))
    if method == "gptq":
        if bits not in _GPTQ_BITS:
            raise _unsupported(name, f"GPTQ with {bits} bits", f"{', '.join(map(str, _GPTQ_BITS))} bits")
        is_v1 = settings.get("checkpoint_format", "gptq") == "gptq"
        if not is_v1 and settings["checkpoint_format"] != "gptq_v2":
            raise _unsupported(name, f"GPTQ's format {settings['checkpoint_format']!r}", "'gptq' and 'gptq_v2'")
        return _Gptq(int(bits), zero_offset=int(is_v1), is_symmetric=bool(settings.get("sym", True)))
    assert method == "awq"
    version = str(settings.get("version", "gemm")).lower()
    if bits != 4 or version != "gemm":
        raise _unsupported(name, f"AWQ with {bits} bits in the form {version!r}", "4 bits in the form 'gemm'")
    return _Awq()


class _Gptq:
    def __init__(self, bits: int, *, zero_offset: int, is_symmetric: bool) -> None:
        self._bits, self._zero_offset = bits, zero_offset
        self.bits = 4 if bits < 4 or (bits == 4 and is_symmetric) else 8

    def unpack(self, read: Mapping[str, Tensor], layer: str) -> Tensor:
        scales = read[f"{layer}scales"].float()  # [G, out]
        zeros = _numbers(read[f"{layer}qzeros"], self._bits)  # [G, out]
        zeros = (zeros + self._zero_offset) & (2**self._bits - 1)
        integers = _numbers(read[f"{layer}qweight"].T.contiguous(), self._bits)  # [out, in]
        group_of = self._group_of(read, layer, integers.shape[1], len(scales))
        weight = integers.float()
        weight -= zeros.float().T[:, group_of]
        weight *= scales.T[:, group_of]
        return weight

    def scales(self, read: Mapping[str, Tensor], layer: str) -> Tensor | None:
        scales, num_inputs = read[f"{layer}scales"], read[f"{layer}qweight"].shape[0] * 32 // self._bits
        group_of = self._group_of(read, layer, num_inputs, len(scales))
        is_in_order = torch.equal(group_of, _neighbours(num_inputs, len(scales)))
        return scales.T if is_in_order else None

    def _group_of(self, read: Mapping[str, Tensor], layer: str, num_inputs: int, num_groups: int) -> Tensor:
        """[in]"""
        if f"{layer}g_idx" in read:
            return read[f"{layer}g_idx"].long()
        return _neighbours(num_inputs, num_groups)


class _Awq:
    bits = 8  # since the zeros may be anywhere, 5 are needed

    def unpack(self, read: Mapping[str, Tensor], layer: str) -> Tensor:
        scales = read[f"{layer}scales"].float()  # [G, out]
        integers, zeros = (self._numbers(read[layer + part]) for part in ("qweight", "qzeros"))  # [in, out], [G, out]
        group_size = integers.shape[0] // scales.shape[0]
        weight = integers.float().view(scales.shape[0], group_size, -1)
        weight -= zeros.float()[:, None]
        weight *= scales[:, None]
        unpacked: Tensor = weight.flatten(0, 1).T.contiguous()
        return unpacked

    def scales(self, read: Mapping[str, Tensor], layer: str) -> Tensor | None:
        return read[f"{layer}scales"].T

    def _numbers(self, words: Tensor) -> Tensor:
        numbers = _numbers(words, 4)
        return numbers.view(*words.shape, 8)[..., _AWQ_ORDER].flatten(1)


def _numbers(words: Tensor, bits: int) -> Tensor:
    """[rows, words] of 32 bits -> [rows, words * 32 / bits], lowest bits first."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    numbers: Tensor = (words.to(torch.int32)[..., None] >> shifts) & (2**bits - 1)
    return numbers.flatten(1)


def _neighbours(num_inputs: int, num_groups: int) -> Tensor:
    return torch.arange(num_inputs) // (num_inputs // num_groups)


def _unsupported(name: str, what: str, known: str) -> ModelError:
    return ModelError(
        f"model={name!r} is quantised by {what}, which cannot be unpacked here; available: {known}, GGUF files, and "
        "checkpoints without quantisation"
    )
