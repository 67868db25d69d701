"""Knowing when kernels are compiled, which takes long, rather than read from the disk."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def telling_of_compilation(tell: Callable[[], None]) -> Iterator[None]:
    """Calls `tell` when the first kernel begins to be compiled within this block, if one does."""
    from numba.core import event  # late: Numba takes half a second to import

    class Listener(event.Listener):  # type: ignore[misc]
        has_told = False

        def on_start(self, event: object) -> None:
            if not self.has_told:
                self.has_told = True
                tell()

        def on_end(self, event: object) -> None:
            pass

    with event.install_listener("numba:compile", Listener()):
        yield
