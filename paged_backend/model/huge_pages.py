"""Memory on huge pages, of which a CPU remembers the places of many more bytes at once: on Linux, where it has them.

Asking for them is enough before a tensor is written to; what has been written is moved.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
import threading
from collections.abc import Iterable
from pathlib import Path

from torch import Tensor

_SIZE = 1 << 21  # of a huge page, where pages have 4 KiB
_LEAST = 8 * _SIZE  # a page counts as used from the first number in it, so that small tensors do without
_COLLAPSE = 25  # MADV_COLLAPSE: Linux 6.1 and later
_POLICY = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def ask_for_huge_pages(tensor: Tensor) -> None:
    """Have the pages of a large new tensor on a CPU be huge, once it is written to."""
    if tensor.is_cpu and tensor.nbytes >= _LEAST and _are_available():
        first, end = -(-tensor.data_ptr() // _SIZE), (tensor.data_ptr() + tensor.nbytes) // _SIZE
        _advise(range(first, end), mmap.MADV_HUGEPAGE)


def use_huge_pages(tensors: Iterable[Tensor]) -> None:
    """Have the system move the memory of these tensors on a CPU to huge pages, in a thread, while others may use it.

    That takes some 2 ms for each page.
    """
    if _are_available():
        pages = {page for tensor in tensors for page in _pages_of(tensor)}
        threading.Thread(target=_move, args=(sorted(pages),), name="huge pages", daemon=True).start()


def _are_available() -> bool:
    return sys.platform == "linux" and _POLICY.exists() and "[never]" not in _POLICY.read_text()


def _pages_of(tensor: Tensor) -> range:
    """All that it has a part of."""
    return range(tensor.data_ptr() // _SIZE, -(-(tensor.data_ptr() + tensor.nbytes) // _SIZE))


def _move(pages: Iterable[int]) -> None:
    # Refused for pages that are partly of something else, and by an older system, where the first advice is what helps.
    for page in pages:
        for advice in (mmap.MADV_HUGEPAGE, _COLLAPSE):
            _advise(range(page, page + 1), advice)


def _advise(pages: range, advice: int) -> None:
    ctypes.CDLL(None).madvise(ctypes.c_void_p(pages.start * _SIZE), ctypes.c_size_t(len(pages) * _SIZE), advice)
