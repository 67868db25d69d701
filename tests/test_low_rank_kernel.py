"""`add_low_rank` adds to each row what its own adapter says, and leaves the others alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from paged_kernels import add_low_rank, reference
from paged_kernels.adapters import LowRankAdapters, Piece, RowIndex

each_dtype = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16], ids=str)


def random(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


@each_dtype
@pytest.mark.parametrize("num_rows", [1, 3, 40, 300])
@pytest.mark.parametrize(("depth", "widths"), [(64, (48, 16)), (33, (7,)), (1, (1, 1, 1))])
def test_it_agrees_with_its_definition(num_rows: int, depth: int, widths: tuple[int, ...], dtype: torch.dtype) -> None:
    def piece(rank: int, number: int) -> Piece:
        shrink, expand = random(rank, depth, dtype=dtype) / 8, random(rank, widths[number], dtype=dtype) / 8
        return Piece(sum(widths[:number]), shrink, expand)

    every = range(len(widths))
    adapters = LowRankAdapters([[piece(4, i) for i in every], [piece(16, every[-1])], [], [piece(3, 0)]])
    numbers = torch.randint(-1, 4, (num_rows,), dtype=torch.int32, generator=torch.Generator().manual_seed(num_rows))
    rows = RowIndex(numbers.numpy(), 4)
    x = random(num_rows, depth, dtype=dtype)
    before = random(num_rows, sum(widths) + 5, dtype=dtype)
    actual, expected = before.clone(), before.clone()
    add_low_rank(actual[:, 2:-3], x, adapters, rows)
    reference.add_low_rank(expected[:, 2:-3], x, adapters, rows)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}[dtype]
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)
    untouched = (numbers == -1) | (numbers == 2)
    assert torch.equal(actual[untouched], before[untouched])
    assert torch.equal(actual[:, :2], before[:, :2]) and torch.equal(actual[:, -3:], before[:, -3:])


def test_the_definition_is_a_product_of_both_weights() -> None:
    shrink, expand = random(3, 8, dtype=torch.float32), random(3, 5, dtype=torch.float32)
    x, out = random(4, 8, dtype=torch.float32), torch.zeros(4, 6)
    rows = RowIndex(np.array([0, -1, 0, 0], np.int32), 1)
    reference.add_low_rank(out, x, LowRankAdapters([[Piece(1, shrink, expand)]]), rows)
    right = torch.zeros(4, 6)
    right[:, 1:] = x @ shrink.T @ expand
    right[1] = 0
    torch.testing.assert_close(out, right)
