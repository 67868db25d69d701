"""Low-rank additions to the outputs of linear layers on GPUs, each row with the weights of its own adapter.

Rows are put into tiles that share an adapter, in an order made on the host, once per step. Two launches then serve all
adapters and all pieces of a layer: the first multiplies the tiles by what shrinks them, in parts of their depth if
there are few of them, the second by what expands them again. How many programs there are depends on shapes only: tiles
that nobody needs are empty.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from paged_kernels.adapters import LowRankAdapters, RowIndex
from paged_kernels.triton_device import widened

_FEW_ROWS = 256
_DEPTH_BLOCK = 128
_PART = 1024  # of the depth: what a program takes of few rows
_FEW_COLUMNS, _MANY_COLUMNS = 64, 128
_LEAST_RANK = 16  # of a matrix product in registers
_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def add_low_rank(out: Tensor, x: Tensor, adapters: LowRankAdapters, rows: RowIndex) -> None:
    """See `reference.add_low_rank`. An adapter's pieces have to change different columns."""
    num_rows, depth = x.shape
    if not num_rows:
        return
    assert x.stride(1) == out.stride(1) == 1
    has_few = num_rows <= _FEW_ROWS
    is_wide = torch.float32 in (x.dtype, adapters.dtype)  # no tensor cores: products take registers
    columns = _FEW_COLUMNS if is_wide else _MANY_COLUMNS
    extent, table, tiles = adapters.extent, adapters.table, rows.tiles(16 if has_few or is_wide else 64, x.device)
    rank = max(_LEAST_RANK, triton.next_power_of_2(extent.rank))
    num_parts = triton.cdiv(depth, _PART) if has_few else 1
    low = x.new_empty(num_parts, num_rows, extent.num_pieces, rank, dtype=torch.float32)
    options = {
        "ROWS": tiles.shape[1] - 1,
        "RANK": rank,
        "PIECES": extent.num_pieces,
        "WEIGHT_TYPE": _TYPES[adapters.dtype],
        "num_warps": 4 if has_few and not is_wide else 8,
    }
    shrink_rows[(len(tiles), extent.num_pieces, num_parts)](
        *(low, x, table, table[0].numel(), tiles, num_rows, depth, x.stride(0)),
        PART=_PART if has_few else depth,
        BLOCK=_DEPTH_BLOCK,
        **options,
    )
    expand_rows[(len(tiles), extent.num_pieces, triton.cdiv(extent.width, columns))](
        *(out, low, table, table[0].numel(), tiles, num_rows, out.stride(0)),
        PARTS=num_parts,
        COLUMNS=columns,
        IS_ALIGNED=extent.is_aligned,
        **options,
    )


@triton.jit(do_not_specialize=["table_size", "num_rows"])
def shrink_rows(
    low_ptr,
    x_ptr,
    table_ptr,
    table_size,
    tiles_ptr,
    num_rows,
    depth,
    stride,
    PART: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    RANK: tl.constexpr,
    PIECES: tl.constexpr,
    WEIGHT_TYPE: tl.constexpr,
):
    """Rows of x [ROWS, depth] times a piece's [rank, depth], over one part of the depth."""
    adapter, rows = _tile(tiles_ptr, ROWS)
    piece = tl.program_id(1)
    part = tl.program_id(2)
    if adapter < 0:
        return
    shrink_ptr = _address(table_ptr, adapter * PIECES + piece, WEIGHT_TYPE)
    rank = tl.load(table_ptr + 2 * table_size + adapter * PIECES + piece)
    if rank == 0:
        return
    ranks = tl.arange(0, RANK)
    is_row = (rows >= 0)[:, None]
    end = tl.minimum(depth, (part + 1) * PART)
    sums = tl.zeros([ROWS, RANK], tl.float32)
    for start in range(part * PART, end, BLOCK):
        k = start + tl.arange(0, BLOCK)
        is_k = k < end
        x = tl.load(x_ptr + rows[:, None] * stride + k[None, :], mask=is_row & is_k[None, :], other=0.0)
        weights = tl.load(
            shrink_ptr + ranks[None, :] * depth + k[:, None], mask=(ranks < rank)[None, :] & is_k[:, None], other=0.0
        )
        sums = _product(x, weights, sums)
    lines = ((part * num_rows + rows) * PIECES + piece)[:, None] * RANK
    tl.store(low_ptr + lines + ranks[None, :], sums, mask=is_row)


@triton.jit(do_not_specialize=["table_size", "num_rows"])
def expand_rows(
    out_ptr,
    low_ptr,
    table_ptr,
    table_size,
    tiles_ptr,
    num_rows,
    stride,
    PARTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    IS_ALIGNED: tl.constexpr,
    ROWS: tl.constexpr,
    RANK: tl.constexpr,
    PIECES: tl.constexpr,
    WEIGHT_TYPE: tl.constexpr,
):
    """Add shrunk rows [ROWS, rank] times a piece's [rank, width] to some of its columns of the output."""
    adapter, rows = _tile(tiles_ptr, ROWS)
    piece = tl.program_id(1)
    if adapter < 0:
        return
    entry = table_ptr + adapter * PIECES + piece
    expand_ptr = _address(table_ptr + table_size, adapter * PIECES + piece, WEIGHT_TYPE)
    rank = tl.load(entry + 2 * table_size)
    first = tl.load(entry + 3 * table_size)
    width = tl.load(entry + 4 * table_size)
    if IS_ALIGNED:
        first = tl.multiple_of(first, 16)
        width = tl.multiple_of(width, 16)
    columns = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    if tl.program_id(2) * COLUMNS >= width:  # also pieces of rank 0
        return
    ranks = tl.arange(0, RANK)
    is_row = (rows >= 0)[:, None]
    is_column = (columns < width)[None, :]
    low = tl.zeros([ROWS, RANK], tl.float32)
    for part in range(PARTS):
        lines = ((part * num_rows + rows) * PIECES + piece)[:, None] * RANK
        low += tl.load(low_ptr + lines + ranks[None, :], mask=is_row & (ranks < rank)[None, :], other=0.0)
    weights = tl.load(
        expand_ptr + ranks[:, None] * width + columns[None, :], mask=(ranks < rank)[:, None] & is_column, other=0.0
    )
    at = out_ptr + rows[:, None] * stride + first + columns[None, :]
    sums = tl.load(at, mask=is_row & is_column, other=0.0).to(tl.float32)
    sums = _product(low.to(WEIGHT_TYPE), weights, sums)
    tl.store(at, sums.to(out_ptr.dtype.element_ty), mask=is_row & is_column)


@triton.jit
def _tile(tiles_ptr, ROWS: tl.constexpr):
    """The adapter of this program's tile, -1 for none, and its rows, -1 where there is none."""
    at = tiles_ptr + tl.program_id(0) * (1 + ROWS)
    return tl.load(at), tl.load(at + 1 + tl.arange(0, ROWS)).to(tl.int64)


@triton.jit
def _address(table_ptr, entry, WEIGHT_TYPE: tl.constexpr):
    return tl.multiple_of(tl.load(table_ptr + entry).to(tl.pointer_type(WEIGHT_TYPE)), 16)


@triton.jit
def _product(x, weights, sums):
    if x.dtype != weights.dtype:
        x = x.to(tl.float32)
        weights = weights.to(tl.float32)
    return tl.dot(widened(x), widened(weights), sums, input_precision="ieee")
