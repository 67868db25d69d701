"""Knowing when kernels are compiled, which takes long, rather than read from the disk, and when that is over."""

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


@contextlib.contextmanager
def after_compilation(act: Callable[[], None]) -> Iterator[None]:
    """Calls `act` within this block whenever a kernel has been compiled, or read from the disk and linked."""
    from numba.core import event

    class Listener(event.Listener):  # type: ignore[misc]
        depth = 0

        def on_start(self, event: object) -> None:
            self.depth += 1

        def on_end(self, event: object) -> None:
            self.depth -= 1
            if self.depth == 0:
                act()

    with event.install_listener("numba:compiler_lock", Listener()):
        yield
