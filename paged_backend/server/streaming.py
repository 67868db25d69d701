"""Answers that stop when nobody reads them: server-sent events, and plain ones."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from paged_backend import RequestHandle, RequestOutput
from paged_backend.server.calls import Calls
from paged_backend.server.errors import ApiError, described, encode_json
from paged_backend.server.metrics import Metrics
from paged_backend.server.tracing import traced

T = TypeVar("T")
Event = Mapping[str, Any] | bytes
"""A JSON object, or what it is as JSON."""

_MARK = "\N{NULL}"
_CLIENT_CLOSED_REQUEST = 499  # nobody reads it; nginx's number for logs


async def unless_disconnected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled if the client hangs up meanwhile."""
    working = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(request.receive))
    try:
        await asyncio.wait((working, gone), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ApiError(_CLIENT_CLOSED_REQUEST, "the client closed the connection")
        return working.result()
    finally:
        await _ended(working, gone)


class EventStream(Response):
    """Sends events as they come, until they end, the client hangs up or reads nothing for `stall_timeout` seconds.

    The status waits for the first event, so that an error before it is an answer of its own; a later one is the last
    event. However it ends, the events' generator is closed, which aborts its requests. What a slow reader has not read
    waits in the requests' outboxes, joined, and is no larger than their outputs; nothing is queued here.
    """

    media_type = "text/event-stream"
    last = b"data: [DONE]\n\n"
    """What follows the last event, unless that is an error."""

    def __init__(self, events: AsyncGenerator[Event, None], *, stall_timeout: float) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._stall_timeout = stall_timeout
        self._sending_since: float | None = None

    def encoded(self, event: Event) -> bytes:
        return b"data: " + (event if isinstance(event, bytes) else encode_json(event)) + b"\n\n"

    def error_event(self, error: Exception) -> Mapping[str, Any]:
        return described(error).body()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        writing = asyncio.ensure_future(self._write(scope, receive, send))
        gone = asyncio.ensure_future(_disconnected(receive))
        stalled = asyncio.ensure_future(self._stalled())
        try:
            await asyncio.wait((writing, gone, stalled), return_when=asyncio.FIRST_COMPLETED)
        finally:
            await _ended(writing, gone, stalled)  # without its last part the server closes the connection
            await self._events.aclose()
        if not writing.cancelled() and (error := writing.exception()):
            raise error

    async def _write(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            first = await anext(self._events)
        except Exception as error:
            await described(error).response(scope["path"])(scope, receive, send)
            return
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            await self._send(send, self.encoded(first))
            async for event in self._events:
                await self._send(send, self.encoded(event))
            await self._send(send, self.last)
        except Exception as error:
            await self._send(send, self.encoded(self.error_event(error)))
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send(self, send: Send, data: bytes) -> None:
        if not data:
            return
        self._sending_since = time.monotonic()
        await send({"type": "http.response.body", "body": data, "more_body": True})
        self._sending_since = None

    async def _stalled(self) -> None:
        """Until one piece has not got away for `stall_timeout` seconds; a timeout for each would cost as much as it."""
        while (left := self._stall_timeout - self._seconds_sending()) > 0:
            await asyncio.sleep(left)

    def _seconds_sending(self) -> float:
        return 0.0 if self._sending_since is None else time.monotonic() - self._sending_since


class TypedEventStream(EventStream):
    """The same as Anthropic's clients read it: each event is named after its type, and the last is `message_stop`."""

    last = b""

    def encoded(self, event: Event) -> bytes:
        assert not isinstance(event, bytes)
        return f"event: {event['type']}\n".encode() + super().encoded(event)

    def error_event(self, error: Exception) -> Mapping[str, Any]:
        return described(error).typed_body()


class ResponseEventStream(TypedEventStream):
    """The same as clients of `/v1/responses` read it: events are numbered, and the last says how the response ended."""

    def __init__(self, events: AsyncGenerator[Event, None], *, stall_timeout: float) -> None:
        super().__init__(events, stall_timeout=stall_timeout)
        self._num_sent = 0

    def encoded(self, event: Event) -> bytes:
        assert not isinstance(event, bytes)
        numbered = {**event, "sequence_number": self._num_sent}
        self._num_sent += 1
        return super().encoded(numbered)

    def error_event(self, error: Exception) -> Mapping[str, Any]:
        """OpenAI's fields of such an event, and the object by which its clients know that they have to raise."""
        body = described(error).body()
        return {"type": "error", **{key: body["error"][key] for key in ("code", "message", "param")}, **body}


class TextTemplate:
    """An event of which nothing changes but its text, as JSON but for that."""

    def __init__(self, event_of: Callable[[str], Mapping[str, Any]]) -> None:
        """`event_of` makes the event of a text, which is its last string."""
        self._head, mark, self._tail = encode_json(event_of(_MARK)).rpartition(encode_json(_MARK))
        assert mark

    def event(self, text: str) -> bytes:
        return self._head + encode_json(text) + self._tail


async def result_of(handle: RequestHandle, metrics: Metrics, tool_user: str | None = None) -> RequestOutput:
    """The whole output of a request; cancelling aborts it. `tool_user`: what kind of request it is, if it has tools."""
    output = await handle.aresult()
    _note_end(metrics, handle, output, [len(part.token_ids) for part in output.outputs])
    if tool_user is not None:
        for part in output.outputs:
            metrics.tools_considered("non_streaming", tool_user, has_called=bool(part.tool_calls))
    return output


async def outputs_of(
    handle: RequestHandle, metrics: Metrics, tool_user: str | None = None
) -> AsyncGenerator[RequestOutput, None]:
    """A request's deltas as they come; closing this aborts it."""
    num_tokens: Counter[int] = Counter()
    last_of_index: dict[int, float] = {}
    calls: defaultdict[int, Calls] = defaultdict(Calls)
    async with handle:
        async for output in handle:
            now = time.monotonic()
            for part in output.outputs:
                index, num_new = part.index, len(part.token_ids)
                if num_new and index in last_of_index:
                    metrics.observe_tokens((now - last_of_index[index]) / num_new, num_new)
                last_of_index[index] = now
                num_tokens[index] += num_new
                if tool_user is not None:
                    calls[index].add(part)
                    if part.finish_reason:
                        metrics.tools_considered("streaming", tool_user, has_called=bool(calls[index]))
            if output.finished:
                _note_end(metrics, handle, output, list(num_tokens.values()))
            yield output


def _note_end(
    metrics: Metrics, handle: RequestHandle, output: RequestOutput, nums_output_tokens: Sequence[int]
) -> None:
    metrics.observe(output, nums_output_tokens, handle.max_tokens)
    traced(metrics.model_name, output, nums_output_tokens)


async def merged(streams: Sequence[AsyncGenerator[T, None]]) -> AsyncIterator[tuple[int, T]]:
    """The items of several generators as they come, each with its generator's position; closes them all at the end."""
    waiting = {asyncio.ensure_future(anext(stream)): index for index, stream in enumerate(streams)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=waiting.__getitem__):
                index = waiting.pop(task)
                try:
                    item = task.result()
                except StopAsyncIteration:
                    continue
                yield index, item
                waiting[asyncio.ensure_future(anext(streams[index]))] = index
    finally:
        await _ended(*waiting)
        for stream in streams:
            await stream.aclose()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _ended(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
