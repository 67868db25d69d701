"""Linear layers on a CPU: by our kernel or by torch, whichever is faster there for the number of rows."""

from __future__ import annotations

import functools
import pathlib
import sys
from typing import Self

import torch
from torch import Tensor, nn

import paged_kernels

_FEW_ROWS = 16


def cpu_computes(dtype: torch.dtype) -> bool:
    """Whether this CPU has arithmetic for `dtype`, rather than converting each number to float32 and back."""
    if dtype in (torch.float32, torch.float64):
        return True
    name = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}.get(dtype, "")
    return bool(getattr(torch.ops.mkldnn, name, bool)())


@functools.cache
def _torch_is_fast_in_bfloat16() -> bool:
    """Whether bfloat16 arithmetic beats float32's here: with AMX tiles, and on AMD since Zen 4.

    Intel's AVX-512 bfloat16 instructions run at half the rate of float32's. This is a fixed rule and not a
    measurement at each start, so that a machine gives the same tokens from run to run.
    """
    return torch.cpu._is_amx_tile_supported() or (torch.cpu._is_avx512_bf16_supported() and _is_amd())


def _is_amd() -> bool:
    try:
        return "AuthenticAMD" in pathlib.Path("/proc/cpuinfo").read_text()
    except OSError:  # not Linux
        return False


class Linear:
    """x [T, in] -> x W^T + b [T, out], with the weight as the checkpoint has it, held once."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight, self._bias = weight, bias
        self._is_ours = weight.dtype == torch.bfloat16 and weight.device.type == "cpu"
        self._most_rows = _FEW_ROWS if _torch_is_fast_in_bfloat16() else sys.maxsize

    @classmethod
    def of(cls, module: nn.Linear) -> Self:
        return cls(module.weight, module.bias)

    @classmethod
    def merged(cls, modules: list[nn.Linear]) -> Self:
        """One layer for several that read the same input; their weights become views of the merged one."""
        weight = torch.cat([module.weight for module in modules])
        sizes = [module.out_features for module in modules]
        for module, part in zip(modules, torch.split(weight, sizes), strict=True):
            module.weight = nn.Parameter(part, requires_grad=False)
        biases: list[Tensor] = [module.bias for module in modules if module.bias is not None]
        assert len(biases) in (0, len(modules))
        return cls(weight, torch.cat(biases) if biases else None)

    def __call__(self, x: Tensor) -> Tensor:
        if self._is_ours and x.shape[0] <= self._most_rows:
            return paged_kernels.linear(x, self._weight, self._bias)
        return nn.functional.linear(x, self._weight, self._bias)


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
