"""Decode steps as CUDA graphs: what a step launches is recorded once and then replayed for other requests."""

from __future__ import annotations

import bisect
import logging
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from paged_backend.model.attention import BatchShape, StepMetadata
from paged_backend.model.inputs import StepInputs, known

logger = logging.getLogger(__name__)

_MOST_SEQUENCES = 512
Capture = Callable[[Callable[[], None]], Callable[[], None]]
"""Runs a function, and returns what launches all that it launched again."""


class DecodeInputs(NamedTuple):
    """A padded step of B sequences with one token each, for layers in G groups, in memory that stays where it is."""

    input_ids: Tensor
    """[B] int64, as the next one"""
    positions: Tensor
    slot_mapping: Tensor
    """[G, B] int64; -1 in the padding"""
    seq_lens: Tensor
    """[B] int32; 0 in the padding"""
    block_tables: Tensor
    """[G, B, W] int32"""
    query_start_loc: Tensor
    """[B + 1] int32: 0 to B"""
    rows: Tensor
    """[B] int64: 0 to B - 1"""

    def metadata(self, block_size: int) -> StepMetadata:
        num_groups, num_rows, num_blocks = self.block_tables.shape
        batches = [BatchShape(num_rows, 1, num_blocks * block_size)] * num_groups
        places = self.slot_mapping, self.block_tables, self.query_start_loc, self.seq_lens
        return StepMetadata.shared(*places, batches)


class _Size(NamedTuple):
    """What a graph is captured for."""

    num_rows: int
    num_blocks: int
    """Of each sequence."""
    variant: int


class DecodeGraphs:
    """Computes steps of one token per sequence, padded to one of few numbers of sequences and of blocks per sequence.

    Padding writes nothing: its slots are -1 and its lengths 0. A step of a new size runs as it is, which compiles its
    kernels; the second one is captured. All graphs read the same memory and write their logits to the same memory, so
    that what they need in between, they share. If capturing fails, steps go on without.
    """

    def __init__(
        self,
        compute: Callable[[DecodeInputs, int], Tensor],
        capture: Capture,
        *,
        max_num_seqs: int,
        max_num_blocks: int,
        num_groups: int,
        vocab_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """`compute` gives the logits [B, V] of a variant, in `dtype`; `max_num_blocks` is the most that a sequence may
        have."""
        self._compute, self._capture = compute, capture
        self._sizes = graph_sizes(min(max_num_seqs, _MOST_SEQUENCES))
        self._max_num_blocks, self._num_groups = max_num_blocks, num_groups
        most = self._sizes[-1]
        is_cuda = device.type == "cuda"
        nums = {torch.int64: (2 + num_groups) * most, torch.int32: most + num_groups * most * max_num_blocks}
        self._on_host = [torch.zeros(num, dtype=dtype, pin_memory=is_cuda) for dtype, num in nums.items()]
        self._on_device = [torch.zeros_like(tensor, device=device) for tensor in self._on_host]
        self._numbers = torch.arange(most, device=device)
        self._starts = torch.arange(most + 1, dtype=torch.int32, device=device)
        self._logits = torch.empty(most, vocab_size, dtype=dtype, device=device)
        self._is_copied = torch.cuda.Event() if is_cuda else None  # type: ignore[no-untyped-call]
        self._seen: set[_Size] = set()
        self._replays: dict[_Size, Callable[[], None]] = {}
        self._variant = 0
        """The last one that was not 0."""
        self._can_capture = True

    def can_compute(self, inputs: StepInputs) -> bool:
        """Whether each sequence has one token whose logits are wanted, and there are not too many of them."""
        num_seqs = len(inputs.seq_lens)
        return len(inputs.input_ids) == len(inputs.keep) == num_seqs <= self._sizes[-1]

    def num_rows(self, num_seqs: int) -> int:
        """What so many sequences are padded to."""
        return self._sizes[bisect.bisect_left(self._sizes, num_seqs)]

    def __call__(self, inputs: StepInputs, drawn: Tensor | None = None, *, variant: int = 0) -> Tensor:
        """Logits [S, V], which stay what they are until what the next call launches; `drawn` as for `known`.

        Of variants other than 0, only the last one is kept."""
        _, num_seqs, width = inputs.block_tables.shape
        num_rows = self.num_rows(num_seqs)
        num_blocks = min(1 << (width - 1).bit_length(), self._max_num_blocks)
        self._fill(inputs, num_rows, num_blocks)
        if drawn is not None:
            input_ids = self._on_device[0][:num_seqs]
            input_ids.copy_(known(input_ids, drawn))
        self._run(_Size(num_rows, num_blocks, variant))
        return self._logits[:num_seqs]

    def compute_largest(self) -> None:
        """The step that takes most memory, of padding alone."""
        for tensor in (*self._on_host, *self._on_device):
            tensor.zero_()
        num_rows = self._sizes[-1]
        self._on_device[0][2 * num_rows :] = -1
        self._compute_into_logits(_Size(num_rows, self._max_num_blocks, 0))

    def _fill(self, inputs: StepInputs, num_rows: int, num_blocks: int) -> None:
        num_groups, num_seqs, width = inputs.block_tables.shape
        if self._is_copied is not None:
            self._is_copied.synchronize()  # the copy of the step before, which that step began with
        wide, narrow = (tensor.numpy() for tensor in self._on_host)
        wide, narrow = wide[: (2 + num_groups) * num_rows], narrow[: num_rows * (1 + num_groups * num_blocks)]
        wide[: 2 * num_rows], wide[2 * num_rows :] = 0, -1
        for start, values in enumerate((inputs.input_ids, inputs.positions, *inputs.slot_mapping)):
            wide[start * num_rows : start * num_rows + num_seqs] = values
        narrow[:] = 0
        narrow[:num_seqs] = inputs.seq_lens
        narrow[num_rows:].reshape(num_groups, num_rows, num_blocks)[:, :num_seqs, :width] = inputs.block_tables
        for to, source, num in zip(self._on_device, self._on_host, (len(wide), len(narrow)), strict=True):
            to[:num].copy_(source[:num], non_blocking=True)
        if self._is_copied is not None:
            self._is_copied.record()

    def _run(self, size: _Size) -> None:
        if size.variant and size.variant != self._variant:
            self._begin_variant(size.variant)
        replay = self._replays.get(size)
        if replay is None and size in self._seen and self._can_capture:
            replay = self._captured(size)
        if replay is not None:
            replay()
            return
        self._seen.add(size)
        self._compute_into_logits(size)

    def _begin_variant(self, variant: int) -> None:
        """Let go of what was captured for the last one."""
        if self._is_copied is not None:
            torch.cuda.synchronize(self._logits.device)  # it may be running
        self._variant = variant
        self._seen = {size for size in self._seen if not size.variant}
        self._replays = {size: replay for size, replay in self._replays.items() if not size.variant}

    def _captured(self, size: _Size) -> Callable[[], None] | None:
        try:
            replay = self._replays[size] = self._capture(lambda: self._compute_into_logits(size))
        except RuntimeError as error:
            self._can_capture = False
            logger.warning("no CUDA graphs, since one could not be captured: %s", error)
            return None
        logger.debug("captured a step of %d sequences with %d blocks each, variant %d", *size)
        return replay

    def _compute_into_logits(self, size: _Size) -> None:
        logits = self._compute(self._views(size.num_rows, size.num_blocks), size.variant)
        self._logits[: size.num_rows].copy_(logits)

    def _views(self, num_rows: int, num_blocks: int) -> DecodeInputs:
        (wide, narrow), num_groups = self._on_device, self._num_groups
        rows = wide[: (2 + num_groups) * num_rows].view(-1, num_rows)
        return DecodeInputs(
            rows[0],
            rows[1],
            rows[2:],
            narrow[:num_rows],
            narrow[num_rows : num_rows * (1 + num_groups * num_blocks)].view(num_groups, num_rows, num_blocks),
            self._starts[: num_rows + 1],
            self._numbers[:num_rows],
        )


def graph_sizes(most: int) -> list[int]:
    """Numbers of sequences that steps are padded to: 1, 2, 4, then in steps of an eighth or less of what they are, but
    of 8 at least."""
    sizes = [1, 2, 4]
    while sizes[-1] < most:
        last = sizes[-1]
        sizes.append(last + max(8, 1 << (last.bit_length() - 4)) if last >= 8 else 8)
    return sorted({min(size, most) for size in sizes})


def cuda_capture(device: torch.device) -> Capture | None:
    """Capturing on this device, into memory that all graphs share; None where there are no graphs."""
    if device.type != "cuda":
        return None
    pool = torch.cuda.graph_pool_handle()

    def capture(launch: Callable[[], None]) -> Callable[[], None]:
        graph = torch.cuda.CUDAGraph()
        # Other threads may use the device, for models of their own.
        with torch.cuda.device(device), torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            launch()
        return graph.replay

    return capture
