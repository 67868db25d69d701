"""The most likely tokens of each row, in an order that depends on nothing but the row."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

_LOW_HALF = np.int64(0xFFFFFFFF)
_GROUP_SIZE = 32


class Candidates(NamedTuple):
    """Tokens by falling value, those of equal value by rising id; [R rows, C candidates] each."""

    values: npt.NDArray[np.float32]
    ids: npt.NDArray[np.int64]


def largest(values: torch.Tensor, num: int) -> Candidates:
    """The `num` largest of each row of float32 `values` [R, V].

    Where the last of them ties with others that did not fit, which of these are among them is not defined.
    """
    if num >= values.shape[1]:
        return _in_order(values.cpu().numpy(), np.arange(values.shape[1], dtype=np.int64)[None, :])
    if num * _GROUP_SIZE * 2 > values.shape[1]:
        top = values.topk(num, sorted=False)
        return _in_order(top.values.cpu().numpy(), top.indices.cpu().numpy())
    ids = _ids_in_best_groups(values, num)
    top = values.gather(1, ids).topk(num, sorted=False)
    return _in_order(top.values.cpu().numpy(), ids.gather(1, top.indices).cpu().numpy())


def _ids_in_best_groups(values: torch.Tensor, num: int) -> torch.Tensor:
    """Ids [R, num * group + rest] that hold the `num` largest: the members of the `num` groups with the largest maxima.

    Finding these takes one cheap pass over the vocabulary, several times faster than a `topk` over all of it.
    """
    num_rows, vocab_size = values.shape
    num_groups = vocab_size // _GROUP_SIZE
    whole = num_groups * _GROUP_SIZE
    maxima = values[:, :whole].view(num_rows, _GROUP_SIZE, num_groups).amax(dim=1)
    groups = maxima.topk(num, dim=1, sorted=False).indices
    members = torch.arange(0, whole, num_groups, device=values.device)
    ids = (members[None, :, None] + groups[:, None, :]).flatten(1)
    rest = torch.arange(whole, vocab_size, device=values.device).expand(num_rows, -1)
    return torch.cat([ids, rest], dim=1)


def at_least(values: torch.Tensor, cuts: npt.NDArray[np.float32]) -> Candidates:
    """All of each row of `values` [R, V] that are not below the row's cut; shorter rows end in -inf of id 0."""
    mask = values >= torch.from_numpy(cuts).to(values.device)[:, None]
    index = mask.nonzero(as_tuple=True)
    found = values[index].cpu().numpy()
    rows, ids = (column.cpu().numpy() for column in index)
    counts = np.bincount(rows, minlength=len(cuts))
    columns = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
    shape = (len(cuts), max(1, int(counts.max())))
    padded_values, padded_ids = np.full(shape, -np.inf, np.float32), np.zeros(shape, np.int64)
    padded_values[rows, columns], padded_ids[rows, columns] = found, ids
    return _in_order(padded_values, padded_ids)


def take_rows(values: torch.Tensor, rows: npt.NDArray[np.int64] | list[int]) -> torch.Tensor:
    """The rows, without a copy when they are all there are."""
    return values if len(rows) == len(values) else values[torch.as_tensor(rows, device=values.device)]


def _in_order(values: npt.NDArray[np.float32], ids: npt.NDArray[np.int64]) -> Candidates:
    """Sorts value and id as one integer, several times faster than an argsort and a gather."""
    bits = (values + np.float32(0.0)).view(np.int32)  # adding zero makes -0.0 equal to 0.0 in its bits as well
    keys = np.sort((~_ordered(bits)).astype(np.int64) << 32 | ids, axis=1)
    bits = _ordered(~(keys >> 32).astype(np.int32))
    return Candidates(bits.view(np.float32), keys & _LOW_HALF)


def _ordered(bits: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """Float bits to integers that compare like the floats, and back: it is its own inverse."""
    return bits ^ ((bits >> 31) & np.int32(0x7FFFFFFF))
