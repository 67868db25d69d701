"""The check of memory accesses finds what it is for."""

import pytest
import torch
import triton
import triton.language as tl

from helpers_triton import watched_memory


@triton.jit
def write(ptr, offset, stride, SIZE: tl.constexpr):
    tl.store(ptr + offset + tl.program_id(0) * stride + tl.arange(0, SIZE), 1.0)


@triton.jit
def shift(ptr):
    tl.store(ptr + tl.program_id(0), tl.load(ptr + tl.program_id(0) + 1))


def test_a_number_past_the_end_of_a_view_is_seen():
    whole = torch.zeros(64)
    with watched_memory(), pytest.raises(Exception, match="stores 4 numbers outside"):
        write[(1,)](whole[:12], 0, 0, SIZE=16)
    assert not whole.any()


def test_two_programs_that_write_the_same_are_seen():
    with watched_memory(), pytest.raises(AssertionError, match="write the same address"):
        write[(2,)](torch.zeros(64), 0, 15, SIZE=16)


def test_a_program_that_reads_what_another_writes_is_seen():
    with watched_memory(), pytest.raises(AssertionError, match="read and write the same address"):
        shift[(2,)](torch.zeros(64))


def test_bytes_are_counted_by_argument():
    with watched_memory() as launches:
        write[(2,)](torch.zeros(64), 0, 16, SIZE=16)
        shift[(1,)](torch.zeros(2, dtype=torch.float16))
    assert [launch.bytes_written["ptr"] for launch in launches] == [128, 2]
    assert [launch.bytes_read["ptr"] for launch in launches] == [0, 2]
