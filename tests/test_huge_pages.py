"""A large KV cache and weights are on huge pages where the system has them."""

from __future__ import annotations

import platform
import re
import sys
import time
from pathlib import Path

import pytest
import torch

from paged_backend.model.attention import LayerSpec
from paged_backend.model.huge_pages import use_huge_pages
from paged_backend.model.kv_cache import allocate

_ENABLED = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_POLICY = _ENABLED.read_text() if sys.platform == "linux" and _ENABLED.exists() else "[never]"

SPEC = LayerSpec(4, 64, 64, scale=1.0, window=None, chunk=None, softcap=None)


def mapping_at(address: int) -> dict[str, str]:
    """What the system says of the mapping that holds this address."""
    is_inside, found = False, dict[str, str]()
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if head := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            is_inside = int(head[1], 16) <= address < int(head[2], 16)
        elif is_inside:
            name, _, value = line.partition(":")
            found[name] = value
    return found


def asks_for_huge_pages(address: int) -> bool:
    """Whether there are any to be had depends on what else is in memory."""
    return "hg" in mapping_at(address)["VmFlags"].split()


def huge_bytes(address: int) -> int:
    return int(mapping_at(address)["AnonHugePages"].split()[0]) * 1024


@pytest.mark.skipif("[never]" in _POLICY, reason="the system has no huge pages")
def test_a_large_cache_asks_for_huge_pages() -> None:
    (layer,) = allocate([SPEC], 4096, 16, torch.bfloat16, torch.device("cpu"))

    assert asks_for_huge_pages(layer.keys.data_ptr() + layer.keys.nbytes // 2)


@pytest.mark.skipif("[madvise]" not in _POLICY, reason="not only whoever asks gets huge pages")
def test_a_small_cache_does_not() -> None:
    (layer,) = allocate([SPEC], 64, 16, torch.bfloat16, torch.device("cpu"))

    assert not asks_for_huge_pages(layer.keys.data_ptr())


@pytest.mark.skipif("[never]" in _POLICY, reason="the system has no huge pages")
@pytest.mark.skipif(tuple(map(int, re.findall(r"\d+", platform.release())[:2])) < (6, 1), reason="needs Linux 6.1")
def test_weights_are_moved_with_what_is_in_them() -> None:
    weights = torch.arange(2**24, dtype=torch.int32)  # 64 MiB
    middle = weights.data_ptr() + weights.nbytes // 2
    use_huge_pages([weights, torch.zeros(3)])
    deadline = time.monotonic() + 60
    while huge_bytes(middle) < weights.nbytes // 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert huge_bytes(middle) >= weights.nbytes // 2
    assert torch.equal(weights, torch.arange(2**24, dtype=torch.int32))
