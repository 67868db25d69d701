"""Where one request's news wait for their readers: threads, or tasks of any event loop."""

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
    """A queue that blocks neither its writer nor an event loop. A slow reader gets all that has gathered at once.

    It belongs to no event loop: each wait uses the loop it is called from. After the last item, nobody waits any more.
    """

    def __init__(self) -> None:
        self._items: list[T] = []
        self._is_closed = False
        self._lock = threading.Lock()
        self._wake: list[Callable[[], None]] = []

    def put(self, item: T, *, is_last: bool = False) -> None:
        with self._lock:
            self._items.append(item)
            self._is_closed = is_last
            if not self._wake:
                return
            wake, self._wake = self._wake, []
        for call in wake:
            call()

    def take(self) -> list[T]:
        """What is there now."""
        with self._lock:
            items, self._items = self._items, []
        return items

    def wait(self, timeout: float | None = None) -> None:
        """Until there is something to take, or no more will come. Raises TimeoutError after `timeout` seconds."""
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        event = threading.Event()
        while not self._is_ready_or_registers(event.set):
            # In slices: a Ctrl-C that arrives just before a wait is noticed at its end.
            while not event.wait(min(_SLICE_SECONDS, max(0.0, deadline - time.monotonic()))):
                if time.monotonic() >= deadline:
                    raise TimeoutError(f"no news within {timeout} s")
            event.clear()

    async def wait_async(self) -> None:
        """The same for a task; other tasks run meanwhile."""
        loop = asyncio.get_running_loop()
        while True:
            future: asyncio.Future[None] = loop.create_future()

            def wake(future: asyncio.Future[None] = future) -> None:
                with contextlib.suppress(RuntimeError):  # the reader's loop is closed: nobody waits any more
                    loop.call_soon_threadsafe(_resolve, future)

            if self._is_ready_or_registers(wake):
                return
            await future

    def _is_ready_or_registers(self, wake: Callable[[], None]) -> bool:
        with self._lock:
            is_ready = bool(self._items) or self._is_closed
            if not is_ready:
                self._wake.append(wake)
            return is_ready


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
