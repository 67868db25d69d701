"""A client of streamed chats that costs little, since it shares the cores with the server it measures."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import re
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

_TEXT = re.compile(rb'"content":\s*"[^"]')
_TEXT_LENGTH = len('"content":"x')
_NUM_TOKENS = re.compile(rb'"completion_tokens":\s*(\d+)')
_LAST_CHUNK = b"0\r\n\r\n"
_KEPT = 4096


@dataclasses.dataclass(slots=True)
class Answer:
    """What became of one chat."""

    num_tokens: int = 0
    """As the server counts them; of a chat that was hung up on, the pieces that had come."""
    seconds_to_first: float | None = None
    seconds: float = 0.0
    hung_up: bool = False
    error: str | None = None


def run(work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, in an event loop that costs less than asyncio's own, where there is one."""
    try:
        from uvloop import new_event_loop
    except ImportError:  # there is none for Windows
        new_event_loop = None
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(work)


async def chat(host: str, port: int, body: dict[str, Any], *, hang_up_after: int | None, timeout: float) -> Answer:
    """Send a chat whose answer streams and ends with its usage; hang up once that many pieces of text have come.

    What goes wrong is in the answer, and not raised.
    """
    loop = asyncio.get_running_loop()
    start = time.perf_counter()
    done: asyncio.Future[None] = loop.create_future()
    reader = _Reader(done, hang_up_after)
    answer = reader.answer
    try:
        async with asyncio.timeout(timeout):
            transport, _ = await loop.create_connection(lambda: reader, host, port)
            transport.write(_request(host, port, body))
            try:
                await done
            finally:
                transport.abort() if reader.answer.hung_up else transport.close()
    except (OSError, TimeoutError) as error:
        answer.error = f"{type(error).__name__}: {error}"
    answer.seconds = time.perf_counter() - start
    if answer.seconds_to_first is not None:
        answer.seconds_to_first -= start
    return answer


def _request(host: str, port: int, body: dict[str, Any]) -> bytes:
    content = json.dumps({**body, "stream": True}).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}:{port}\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    return head.encode() + content


class _Reader(asyncio.Protocol):
    """Counts pieces of text in the bytes as they come, and reads the rest at the end."""

    def __init__(self, done: asyncio.Future[None], hang_up_after: int | None) -> None:
        self.answer = Answer()
        self._done = done
        self._hang_up_after = hang_up_after
        self._num_pieces = 0
        self._tail = b""

    def data_received(self, data: bytes) -> None:
        self._num_pieces += len(_TEXT.findall(self._tail[1 - _TEXT_LENGTH :] + data))
        self._tail = (self._tail + data)[-_KEPT:]
        if self._num_pieces and self.answer.seconds_to_first is None:
            self.answer.seconds_to_first = time.perf_counter()
        if self._hang_up_after is not None and self._num_pieces >= self._hang_up_after and not self._done.done():
            self.answer.hung_up, self.answer.num_tokens = True, self._num_pieces
            self._done.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        if self._done.done():
            return
        counted = _NUM_TOKENS.search(self._tail)
        if counted and self._tail.endswith(_LAST_CHUNK):
            self.answer.num_tokens = int(counted[1])
        else:
            self.answer.error = f"{error or 'ended early'}: {self._tail[-300:].decode(errors='replace')}"
        self._done.set_result(None)
