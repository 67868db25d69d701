"""Checkpoints that are mapped into memory: their pages are given back once what they hold is held elsewhere."""

from __future__ import annotations

import ctypes
import mmap
import re
import sys
from collections.abc import Iterable
from pathlib import Path

from torch import Tensor

_LINE = re.compile(r"(?P<start>\w+)-(?P<end>\w+) r\S\Sp .*\.safetensors$")
_MAPS = Path("/proc/self/maps")


class MappedFiles:
    """Where safetensors files are in this process's memory, as of now. Nowhere, on systems other than Linux.

    Only pages of such files are given back, so that nothing is lost: who reads them again gets them from the file.
    """

    def __init__(self) -> None:
        lines = _MAPS.read_text().splitlines() if sys.platform == "linux" and _MAPS.exists() else []
        matches = filter(None, map(_LINE.fullmatch, lines))
        self._ranges = [range(int(match["start"], 16), int(match["end"], 16)) for match in matches]

    def let_go(self, tensors: Iterable[Tensor]) -> None:
        """Give back the memory of tensors that nobody reads any more."""
        for tensor in tensors:
            start = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
            end = (tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
            if start < end and any(start in one and end - 1 in one for one in self._ranges):
                ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), mmap.MADV_DONTNEED)
