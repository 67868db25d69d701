"""Garbage collection while an engine is made: a second of nothing but looking at modules that are there to stay."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def no_garbage_collection() -> Iterator[None]:
    """No collection by itself in this block, nor of what was made in it soon after: it counts as old."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        if not gc.get_freeze_count():  # somebody else's would be unfrozen too
            gc.freeze()
            gc.unfreeze()  # into the oldest generation, without looking at one of them
        gc.enable()
