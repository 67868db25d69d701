"""Weights on huge pages of memory, of which a CPU remembers the places of many more bytes at once."""

from __future__ import annotations

import ctypes
import mmap
import sys
import threading
from collections.abc import Iterable
from pathlib import Path

from torch import Tensor

_SIZE = 1 << 21  # of a huge page, where pages have 4 KiB
_COLLAPSE = 25  # MADV_COLLAPSE: Linux 6.1 and later
_POLICY = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def use_huge_pages(tensors: Iterable[Tensor]) -> None:
    """Have the system move the memory of these tensors to huge pages, in a thread, where it can and may.

    It takes some 2 ms for each page, while which everybody may use the memory.
    """
    if sys.platform != "linux" or not _POLICY.exists() or "[never]" in _POLICY.read_text():
        return
    pages = {page for tensor in tensors for page in _pages_of(tensor)}
    threading.Thread(target=_collapse, args=(sorted(pages),), name="huge pages", daemon=True).start()


def _pages_of(tensor: Tensor) -> range:
    start = tensor.data_ptr() // _SIZE
    return range(start, -(-(tensor.data_ptr() + tensor.nbytes) // _SIZE))


def _collapse(pages: Iterable[int]) -> None:
    # Refused for pages that are partly of something else, and by an older system, where the first call is what helps.
    advise = ctypes.CDLL(None).madvise
    for page in pages:
        for advice in (mmap.MADV_HUGEPAGE, _COLLAPSE):
            advise(ctypes.c_void_p(page * _SIZE), ctypes.c_size_t(_SIZE), advice)
