"""An asynchronous stream whose request is made at the first step, off the event loop if that takes long."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Self, TypeVar

from paged_backend.handle import RequestHandle
from paged_backend.outputs import RequestOutput

T = TypeVar("T")


class AsyncStream:
    """`async for output in stream`. Closing it, dropping it or cancelling a waiting task aborts the request."""

    def __init__(self, submit: Callable[[], Awaitable[RequestHandle]]) -> None:
        self._submit = submit
        self._handle: RequestHandle | None = None
        self._is_closed = False
        self._lock = asyncio.Lock()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> RequestOutput:
        if self._is_closed:
            raise StopAsyncIteration
        async with self._lock:  # several tasks may read one stream
            if self._handle is None:
                self._handle = await self._submit()
            if self._is_closed:  # meanwhile
                self._handle.close()
        return await self._handle.__anext__()

    async def aclose(self) -> None:
        self._is_closed = True
        if self._handle is not None:
            self._handle.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()


async def run_off_loop(function: Callable[[], T], *, is_long: bool) -> T:
    """The result of `function`; in a thread if it would keep the event loop waiting."""
    return await asyncio.to_thread(function) if is_long else function()
