"""What a CUDA graph asks of a step, checked on a CPU: equal operations on equal addresses, whatever the requests are,
and nothing that has to wait for a number."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from paged_backend.model import packed_run
from paged_backend.model.attention_backends import TorchAttention

_WAITING = {
    *("_local_scalar_dense", "nonzero", "is_nonzero", "masked_select", "equal", "bincount", "_unique2", "unique_dim"),
    "unique_consecutive",
}
_BY_MASK = {"index", "index_put", "index_put_"}


class StepTrace(TorchDispatchMode):
    """What a step does: its operations, what it reads that it did not make, and what breaks a rule."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Any] = []
        self.broken: list[str] = []
        self._made: dict[int, Tensor] = {}
        """By storage, and kept, so that no address is used twice."""
        self.addresses: set[int] = set()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name, kwargs = function.overloadpacket.__name__, kwargs or {}
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        self.read(inputs)
        by_mask = name in _BY_MASK and any(one.dtype == torch.bool for one in inputs[1:])
        if name in _WAITING or by_mask or (name == "repeat_interleave" and function._overloadname == "Tensor"):
            self.broken.append(f"{name} waits for the device")
        if name == "lift_fresh" or (name == "_to_copy" and kwargs.get("device") not in (None, torch.device("cpu"))):
            self.broken.append(f"{name} brings numbers from the host")
        outputs = function(*args, **kwargs)
        made = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)]
        self.make(made, inputs)
        scalars = tuple(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, int | float | str))
        self.operations.append((name, tuple(tuple(one.shape) for one in (*inputs, *made)), scalars))
        return outputs

    def read(self, tensors: list[Tensor]) -> None:
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage._cdata not in self._made:
                self.addresses.add(storage.data_ptr() + tensor.storage_offset() * tensor.itemsize)

    def make(self, tensors: list[Tensor], inputs: list[Tensor]) -> None:
        before = {tensor.untyped_storage()._cdata for tensor in inputs}
        for tensor in tensors:
            storage = tensor.untyped_storage()._cdata
            if storage not in before:
                self._made[storage] = tensor

    @contextlib.contextmanager
    def kernel(self, name: str, *arguments: Any) -> Iterator[None]:
        """One operation, whatever is computed inside: as a kernel of our own is."""
        tensors = [one for one in arguments if isinstance(one, Tensor)]
        self.read(tensors)
        scalars = tuple(one for one in arguments if isinstance(one, int | float | str | None))
        self.operations.append((name, tuple((tuple(one.shape), one.stride()) for one in tensors), scalars))
        with torch.utils._python_dispatch._disable_current_modes():
            yield


def broken_rules(step: Callable[[], object], fill: Callable[[int], object]) -> list[str]:
    """Runs a step with the first requests that `fill` fills in, and again with the second ones; what keeps it from
    being captured with the first and replayed for the second."""
    traces = []
    for which in range(2):
        fill(which)
        with StepTrace() as trace:
            step()
        traces.append(trace)
    first, second = traces
    broken = [*first.broken, *second.broken]
    for number, (one, other) in enumerate(zip(first.operations, second.operations, strict=False)):
        if one != other:
            broken.append(f"operation {number} is {one} first and {other} then")
            break
    if len(first.operations) != len(second.operations):
        broken.append(f"{len(first.operations)} operations first and {len(second.operations)} then")
    if first.addresses != second.addresses:
        broken.append(f"{len(first.addresses ^ second.addresses)} inputs moved")
    return broken


class FakeGraphs:
    """Captures of steps, and how often each of them was replayed."""

    def __init__(self, error: Exception | None = None) -> None:
        self.num_replays: list[int] = []
        self.error = error

    def capture(self, launch: Callable[[], None]) -> Callable[[], None]:
        if self.error is not None:
            raise self.error
        number = len(self.num_replays)
        self.num_replays.append(0)

        def replay() -> None:
            self.num_replays[number] += 1
            launch()

        return replay


@contextlib.contextmanager
def graphs_on_cpu(fake: FakeGraphs) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packed_run, "cuda_capture", lambda device: fake.capture)
        patch.setattr(TorchAttention, "is_capturable", True)
        patch.setattr(TorchAttention, "puts_decodes_first", True)
        yield
