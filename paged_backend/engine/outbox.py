"""Where one request's news wait for their reader: a thread, or a task of any event loop."""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")
_SLICE_SECONDS = 1.0


class Outbox(Generic[T]):
    """A queue that blocks neither writer nor event loop. A slow reader gets everything that has gathered at once.

    It belongs to no event loop: each wait uses the loop it is called from.
    """

    def __init__(self) -> None:
        self._items: list[T] = []
        self._lock = threading.Lock()
        self._wake: list[Callable[[], None]] = []

    def put(self, item: T) -> None:
        with self._lock:
            self._items.append(item)
            wake, self._wake = self._wake, []
        for call in wake:
            call()

    def take(self, timeout: float | None = None) -> list[T]:
        """All items, as soon as there is one. Raises TimeoutError after `timeout` seconds."""
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        event = threading.Event()
        while not (items := self._take_or_register(event.set)):
            # In slices: a Ctrl-C that arrives just before a wait is noticed at its end.
            while not event.wait(min(_SLICE_SECONDS, max(0.0, deadline - time.monotonic()))):
                if time.monotonic() >= deadline:
                    raise TimeoutError(f"no news within {timeout} s")
            event.clear()
        return items

    async def take_async(self) -> list[T]:
        """All items, as soon as there is one; other tasks run meanwhile."""
        loop = asyncio.get_running_loop()
        while True:
            future: asyncio.Future[None] = loop.create_future()

            def wake(future: asyncio.Future[None] = future) -> None:
                with contextlib.suppress(RuntimeError):  # the reader's loop is closed: nobody waits any more
                    loop.call_soon_threadsafe(_resolve, future)

            if items := self._take_or_register(wake):
                return items
            await future

    def _take_or_register(self, wake: Callable[[], None]) -> list[T]:
        with self._lock:
            items, self._items = self._items, []
            if not items:
                self._wake.append(wake)
            return items


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
