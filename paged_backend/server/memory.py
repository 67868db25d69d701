"""What loading a model takes, as far as its files tell; and giving that back."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
from pathlib import Path

from paged_backend import EngineConfig

_BESIDE_WEIGHTS = 1.2
"""Loading and running a model takes some memory besides."""


def num_bytes_needed(model: str, config: EngineConfig) -> int:
    """Bytes for the weights of a folder or a file, and the KV cache, if its size is given; 0 for what is not here."""
    path = Path(os.path.expanduser(model))
    cache = config.kv_cache_memory if isinstance(config.kv_cache_memory, int) else 0
    if path.is_file():
        num_bytes = path.stat().st_size
    else:
        files = list(path.glob("*.safetensors")) or list(path.glob("*.bin"))
        num_bytes = sum(file.stat().st_size for file in files)
    return int(num_bytes * _BESIDE_WEIGHTS) + cache


def give_memory_back() -> None:
    """Have the system get the memory of what nobody holds any more: engines are parts of cycles, and glibc keeps what
    has been freed, in each thread's arena, for the next who wants memory."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError, TypeError):  # other systems' allocators have no such function
        ctypes.CDLL(None).malloc_trim(0)
