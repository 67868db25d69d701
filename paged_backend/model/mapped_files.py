"""Memory that is given back to the system: pages of mapped files that nobody reads any more, and what malloc keeps."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from torch import Tensor

import paged_kernels

_WEIGHTS = re.compile(r"(?P<start>\w+)-(?P<end>\w+) r\S\Sp .*\.safetensors$")
_COMPILER = re.compile(r"(?P<start>\w+)-(?P<end>\w+) r-[x-]p .*libllvmlite\.so$")
_MAPS = Path("/proc/self/maps")


class MappedFiles:
    """Where safetensors files are in this process's memory, as of now. Nowhere, on systems other than Linux.

    Only pages of such files are given back, so that nothing is lost: who reads them again gets them from the file.
    """

    def __init__(self) -> None:
        self._ranges = _ranges(_WEIGHTS)

    def let_go(self, tensors: Iterable[Tensor]) -> None:
        """Give back the memory of tensors that nobody reads any more, or not for some time."""
        for tensor in tensors:
            start = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
            end = (tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
            if start < end and any(start in one and end - 1 in one for one in self._ranges):
                _give_back(range(start, end))


@contextlib.contextmanager
def compiler_given_back() -> Iterator[None]:
    """Within this block the compiler's code and constants, some 70 MiB of a file, are in memory only while a kernel is
    compiled or linked; a kernel that comes later reads what it needs of them again."""
    parts: list[range] = []

    def let_go() -> None:
        # The last part that cannot be written has pointers that were filled in: it is no longer what is in the file.
        parts.extend([] if parts else _ranges(_COMPILER)[:-1])
        for part in parts:
            _give_back(part)

    with paged_kernels.after_compilation(let_go):
        let_go()
        yield


def trim_heap() -> None:
    """Give back what was freed in C's heap, which glibc keeps for later."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


def _ranges(pattern: re.Pattern[str]) -> list[range]:
    lines = _MAPS.read_text().splitlines() if sys.platform == "linux" and _MAPS.exists() else []
    return [
        range(int(match["start"], 16), int(match["end"], 16)) for match in filter(None, map(pattern.fullmatch, lines))
    ]


def _give_back(pages: range) -> None:
    ctypes.CDLL(None).madvise(ctypes.c_void_p(pages.start), ctypes.c_size_t(len(pages)), mmap.MADV_DONTNEED)
