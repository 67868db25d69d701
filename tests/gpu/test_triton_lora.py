"""The Triton kernels for adapters, interpreted, add to each row what its own adapter says."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from helpers_triton import poisoned_empty, watched_memory
from paged_kernels import reference
from paged_kernels.adapters import ExchangeableAdapters, Extent, LowRankAdapters, Piece, RowIndex
from paged_kernels.triton_lora import add_low_rank

pytestmark = pytest.mark.timeout(100)


@pytest.fixture(autouse=True)
def poison(monkeypatch):
    poisoned_empty(monkeypatch)


def random(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def make_adapters(depth: int, widths: tuple[int, ...], dtype: torch.dtype) -> LowRankAdapters:
    """Four, of which one has no piece, and none has the ranks of another one."""

    def piece(rank: int, number: int) -> Piece:
        shrink, expand = random(rank, depth, dtype=dtype) / 8, random(rank, widths[number], dtype=dtype) / 8
        return Piece(sum(widths[:number]), shrink, expand)

    every = range(len(widths))
    return LowRankAdapters([[piece(4, i) for i in every], [piece(20, every[-1])], [], [piece(3, 0)]])


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize("num_rows", [1, 40, 300])
@pytest.mark.parametrize(("depth", "widths"), [(64, (48, 160)), (33, (7,)), (1, (1, 1, 1))])
def test_it_agrees_with_its_definition(num_rows, depth, widths, dtype):
    adapters = make_adapters(depth, widths, dtype)
    numbers = torch.randint(-1, 4, (num_rows,), dtype=torch.int32, generator=torch.Generator().manual_seed(num_rows))
    rows = RowIndex(numbers.numpy(), 4)
    x, before = random(num_rows, depth, dtype=dtype), random(num_rows, sum(widths) + 5, dtype=dtype)
    actual, expected = before.clone(), before.clone()
    with watched_memory(*(part for pieces in adapters.pieces for piece in pieces for part in piece[1:])):
        add_low_rank(actual[:, 2:-3], x, adapters, rows)
    reference.add_low_rank(expected[:, 2:-3], x, adapters, rows)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}[dtype]
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)
    untouched = (numbers == -1) | (numbers == 2)
    assert torch.equal(actual[untouched], before[untouched])


def test_adapters_that_take_the_place_of_others_have_what_room_there_is():
    adapters = ExchangeableAdapters(4, Extent(2, 40, 160, False), torch.float32, torch.device("cpu"))
    memory: dict = {}
    table, tiles = adapters.table.data_ptr(), set()
    x = random(40, 64, dtype=torch.float32)
    for seed, made in enumerate([make_adapters(64, (48, 160), torch.float32), make_adapters(64, (7,), torch.float32)]):
        adapters.exchange(made.pieces)
        numbers = torch.randint(-1, 4, (40,), dtype=torch.int32, generator=torch.Generator().manual_seed(seed))
        rows = RowIndex(numbers.numpy(), 4, memory)
        actual, expected = torch.zeros(40, 208), torch.zeros(40, 208)
        add_low_rank(actual, x, adapters, rows)
        reference.add_low_rank(expected, x, made, RowIndex(numbers.numpy(), 4))
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
        tiles |= {tensor.data_ptr() for tensor in memory.values()}
    assert adapters.table.data_ptr() == table and len(tiles) == 1


def test_a_deep_layer_is_cut_into_parts():
    adapters, rows = make_adapters(2500, (16,), torch.float32), RowIndex(torch.arange(3).int().numpy(), 4)
    x = random(3, 2500, dtype=torch.float32)
    actual, expected = torch.zeros(3, 16), torch.zeros(3, 16)
    add_low_rank(actual, x, adapters, rows)
    reference.add_low_rank(expected, x, adapters, rows)
    torch.testing.assert_close(actual, expected)


def test_weights_may_be_of_another_type_than_inputs():
    adapters, rows = make_adapters(40, (16,), torch.bfloat16), RowIndex(torch.arange(3).int().numpy(), 4)
    x = random(3, 40, dtype=torch.float32)
    actual, expected = torch.zeros(3, 16), torch.zeros(3, 16)
    add_low_rank(actual, x, adapters, rows)
    reference.add_low_rank(expected, x, adapters, rows)
    torch.testing.assert_close(actual, expected, rtol=2e-2, atol=2e-2)


def test_the_number_of_tiles_depends_on_the_numbers_of_rows_and_adapters_only():
    sizes = {
        len(RowIndex(torch.tensor(numbers, dtype=torch.int32).numpy(), 3).tiles(16, torch.device("cpu")))
        for numbers in ([0] * 40, [-1] * 40, [0, 1, 2, -1] * 10)
    }
    assert len(sizes) == 1
