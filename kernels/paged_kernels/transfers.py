"""Which device kernels are launched on, and copies between it and host memory, without anybody waiting."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor


def on_device(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """In this block kernels are launched on this device: Triton asks for the thread's current one, which is the first
    unless somebody says otherwise, wherever the tensors are."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def to_device(array: NDArray[Any], device: torch.device) -> Tensor:
    """The array on the device, in time for what is launched there next.

    On a CUDA device it goes through pinned memory: from other memory the driver may wait for all that was launched.
    """
    tensor = torch.from_numpy(array)
    if device.type == "cpu":  # which is where it is, but asking takes as long as all the rest
        return tensor
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


class HostCopies:
    """Tensors on their way to host memory; on the CPU they are there. They must not change meanwhile."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._event: torch.cuda.Event | None = None
        if tensors and tensors[0].is_cuda:
            self._tensors = [
                torch.empty(one.shape, dtype=one.dtype, pin_memory=True).copy_(one, non_blocking=True)
                for one in tensors
            ]
            self._event = torch.cuda.current_stream(tensors[0].device).record_event()
        else:
            self._tensors = [one.cpu() for one in tensors]

    def wait(self) -> list[Tensor]:
        """The copies, once they are made."""
        if self._event is not None:
            self._event.synchronize()
        return self._tensors
