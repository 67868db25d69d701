"""What happens to every request before a route sees it: the key, the drain, the size of its body, HEAD."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
from collections.abc import Collection, Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paged_backend.server.errors import ApiError
from paged_backend.server.kv_map import PATH as KV_MAP
from paged_backend.server.models import HOLDING, Models

WITHOUT_KEY = frozenset({"/health", "/ready"})
"""What load balancers ask, which have no key."""
WHILE_DRAINING = frozenset({"/health", "/ready", "/metrics", "/version", KV_MAP})


class RequireKey:
    """401 for requests without a known key; how long it takes to find out tells nothing about the keys.

    `open_paths` need none, nor does what load balancers ask.
    """

    def __init__(self, app: ASGIApp, *, keys: Sequence[str], open_paths: Collection[str] = ()) -> None:
        self._app = app
        self._open_paths = WITHOUT_KEY.union(open_paths)
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in self._open_paths or self._is_known(_presented(scope)):
            await self._app(scope, receive, send)
            return
        error = ApiError(401, "give a valid API key as 'Authorization: Bearer KEY'", code="invalid_api_key")
        await error.response(scope["path"])(scope, receive, send)

    def _is_known(self, presented: bytes) -> bool:
        digest = hashlib.sha256(presented).digest()
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        return any(matches)


class CountRequests:
    """Counts the requests that are being answered, lets go of their models afterwards, and answers 503 while the server
    drains."""

    def __init__(self, app: ASGIApp, *, models: Models) -> None:
        self._app = app
        self._models = models

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in WHILE_DRAINING:
            await self._app(scope, receive, send)
            return
        if self._models.is_draining:
            error = ApiError(503, "the server is shutting down; ask another one", code="draining", retry=True)
            await error.response(scope["path"])(scope, receive, send)
            return
        self._models.num_active += 1
        try:
            async with contextlib.AsyncExitStack() as scope[HOLDING]:
                await self._app(scope, receive, send)
        finally:
            self._models.num_active -= 1


class LimitBody:
    """413 for bodies that are too large, as soon as that is known, and 408 for those of which nothing more comes."""

    def __init__(self, app: ASGIApp, *, max_bytes: int, stall_timeout: float) -> None:
        self._app = app
        self._max_bytes, self._stall_timeout = max_bytes, stall_timeout

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        announced = Headers(scope=scope).get("content-length", "0")
        if announced.isdecimal() and int(announced) > self._max_bytes:
            await self._too_large().response(scope["path"])(scope, receive, send)
            return
        num_bytes, is_whole = 0, False

        async def limited() -> Message:
            nonlocal num_bytes, is_whole
            try:
                async with asyncio.timeout(None if is_whole else self._stall_timeout):
                    message = await receive()
            except TimeoutError:
                raise self._stalled() from None
            num_bytes += len(message.get("body", b""))
            is_whole = not message.get("more_body", False)
            if num_bytes > self._max_bytes:
                raise self._too_large()
            return message

        await self._app(scope, limited, send)

    def _too_large(self) -> ApiError:
        return ApiError(
            413,
            f"the body is larger than max_body_bytes={self._max_bytes}; send less, or raise the limit",
            code="body_too_large",
        )

    def _stalled(self) -> ApiError:
        return ApiError(
            408,
            f"nothing more of the body came for stall_timeout={self._stall_timeout:g} seconds; send it again",
            code="body_stalled",
        )


class AnswerHead:
    """HEAD is answered as GET, without the body: so do load balancers ask whether a server is up."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return

        async def send_head(message: Message) -> None:
            await send({**message, "body": b""} if message["type"] == "http.response.body" else message)

        await self._app({**scope, "method": "GET"}, receive, send_head)


def _presented(scope: Scope) -> bytes:
    """The key of a request: a bearer token, or `X-Api-Key`, which Anthropic's clients send."""
    headers = dict(reversed(scope["headers"]))
    scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
    return bytes(token.strip()) if scheme.lower() == b"bearer" else bytes(headers.get(b"x-api-key", b""))
