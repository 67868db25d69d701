"""Linear layers on a CPU: by our kernels, or by torch where that is faster."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

import paged_kernels
from paged_kernels import PackedWeight
from paged_kernels.packing import can_be_merged, merge, split

READ_AS_A_MATRIX = "kv_b_proj"  # latents.py multiplies with its weights at each call


def cpu_computes(dtype: torch.dtype) -> bool:
    """Whether this CPU has arithmetic for `dtype`, rather than converting each number to float32 and back."""
    if dtype in (torch.float32, torch.float64):
        return True
    name = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}.get(dtype, "")
    return bool(getattr(torch.ops.mkldnn, name, bool)())


def can_stay_narrow(model: PreTrainedModel) -> bool:
    """Whether a bfloat16 model on a CPU without arithmetic for it is best left as it is: our kernels widen weights in
    registers, which takes half the time of reading float32, but torch takes tens of times as long for each product."""
    if model.dtype != torch.bfloat16 or not model._supports_attention_backend:
        return False
    read = {id(module.weight) for module in model.modules() if type(module) in (nn.Linear, nn.Embedding)}
    return all(id(parameter) in read for parameter in model.parameters() if parameter.dim() > 1)


# torch multiplies bfloat16 with AMX where there is one, which beats our kernel unless there are few rows.
MOST_ROWS = 16 if torch.cpu._is_amx_tile_supported() else sys.maxsize


class PackedLinear(nn.Module):
    """Takes the place of an `nn.Linear`, with weights that have been packed, and perhaps rounded to 8 or 4 bits."""

    def __init__(self, weight: PackedWeight, bias: nn.Parameter | None, dtype: torch.dtype) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.packed, self.bias = weight, bias
        self.was_read = False
        """Whether some code has read `weight`."""
        self._dtype = dtype

    @property
    def weight(self) -> Tensor:
        """The weights as an `nn.Linear` has them, made anew for code that reads them."""
        self.was_read = True
        return self.packed.unpack().to(self._dtype)

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]"""
        y = paged_kernels.packed_linear(x.reshape(-1, self.in_features), self.packed, self.bias)
        return y.view(*x.shape[:-1], self.out_features)


class Linear:
    """x [T, in] -> x W^T + b [T, out], with the weight as the layers have it that it stands for, held once."""

    def __init__(self, weight: Tensor | PackedWeight, bias: Tensor | None) -> None:
        self.weight, self.bias = weight, bias
        self.is_ours = isinstance(weight, PackedWeight) or (
            weight.dtype == torch.bfloat16 and weight.device.type == "cpu"
        )
        """Whether our kernels multiply, at least up to MOST_ROWS rows."""

    @classmethod
    def of(cls, module: nn.Linear | PackedLinear) -> Self:
        return cls(module.packed if isinstance(module, PackedLinear) else module.weight, module.bias)

    @classmethod
    def merged(cls, modules: Sequence[nn.Linear | PackedLinear]) -> Self:
        """One layer for several that read the same input; their weights become views of the merged one."""
        biases: list[Tensor] = [module.bias for module in modules if module.bias is not None]
        assert len(biases) in (0, len(modules))
        return cls(_merged_weight(modules), torch.cat(biases) if biases else None)

    @staticmethod
    def can_merge(modules: Sequence[nn.Module]) -> bool:
        """Whether all are linear layers, of one kind."""
        if not all(isinstance(module, PackedLinear) for module in modules):
            return all(type(module) is nn.Linear for module in modules)
        return can_be_merged([module.packed for module in modules if isinstance(module, PackedLinear)])

    def __call__(self, x: Tensor) -> Tensor:
        if isinstance(self.weight, PackedWeight):
            return paged_kernels.packed_linear(x, self.weight, self.bias)
        if self.is_ours and x.shape[0] <= MOST_ROWS:
            return paged_kernels.linear(x, self.weight, self.bias)
        return nn.functional.linear(x, self.weight, self.bias)


def _merged_weight(modules: Sequence[nn.Linear | PackedLinear]) -> Tensor | PackedWeight:
    sizes = [module.out_features for module in modules]
    packed = [module for module in modules if isinstance(module, PackedLinear)]
    if packed:
        merged = merge([module.packed for module in packed])
        for layer, part in zip(packed, split(merged, sizes), strict=True):
            layer.packed = part
        return merged
    plain = [module for module in modules if isinstance(module, nn.Linear)]
    weight = torch.cat([module.weight for module in plain])
    for module, rows in zip(plain, torch.split(weight, sizes), strict=True):
        module.weight = nn.Parameter(rows, requires_grad=False)
    return weight


class FastLinear(nn.Module):
    """Takes the place of an `nn.Linear` in a model, and shares its parameters."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]"""
        # Made at each call, since training and `model.to` replace a parameter's tensor.
        y = Linear(self.weight, self.bias)(x.reshape(-1, self.in_features))
        return y.view(*x.shape[:-1], self.out_features)


def speed_up_linears(model: nn.Module) -> None:
    """Let the bfloat16 linear layers of a model on the CPU use our kernel; subclasses of nn.Linear are left alone."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and child.weight.dtype == torch.bfloat16 and child.weight.device.type == "cpu":
                setattr(parent, name, FastLinear(child))


def unpack_projections(model: nn.Module) -> None:
    """Make packed layers plain again whose weights are read at each call."""
    for parent in list(model.modules()):
        packed = getattr(parent, READ_AS_A_MATRIX, None)
        if isinstance(packed, PackedLinear):
            plain = nn.Linear(packed.in_features, packed.out_features, bias=packed.bias is not None, device="meta")
            plain.weight = nn.Parameter(packed.weight, requires_grad=False)
            if packed.bias is not None:
                plain.bias = packed.bias
            setattr(parent, READ_AS_A_MATRIX, plain)
