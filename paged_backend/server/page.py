"""`/`: a page to try the model and to watch its KV cache. Plain files, and nothing from anywhere else."""

from __future__ import annotations

import hashlib
import mimetypes
from importlib import resources
from importlib.resources.abc import Traversable

from fastapi import FastAPI, Request
from starlette.responses import Response

_INDEX = "index.html"
_FOLDER = "static"
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "Cache-Control": "no-cache",  # a browser keeps it, and asks whether it is still the same
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


def page_paths() -> frozenset[str]:
    """Of the page's files. They hold no secrets: the page asks for a key, and so it comes without one."""
    return frozenset(map(_path, _files()))


def add_page(app: FastAPI) -> None:
    for file in _files():
        _add_file(app, _path(file), file.name, file.read_bytes())


def _files() -> list[Traversable]:
    folder = resources.files("paged_backend.server") / _FOLDER
    return sorted(folder.iterdir(), key=lambda file: file.name)


def _path(file: Traversable) -> str:
    return "/" if file.name == _INDEX else f"/{_FOLDER}/{file.name}"


def _add_file(app: FastAPI, path: str, name: str, content: bytes) -> None:
    kind = _kind(name)
    headers = {**_HEADERS, "ETag": f'"{hashlib.sha256(content).hexdigest()[:32]}"'}

    @app.get(path, include_in_schema=False)
    async def file(request: Request) -> Response:
        if headers["ETag"] in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        return Response(content, media_type=kind, headers=headers)


def _kind(name: str) -> str:
    """Not by this machine's tables where browsers insist: a Windows registry may call scripts plain text."""
    if name.endswith(".js"):
        return "text/javascript"
    return mimetypes.guess_type(name)[0] or "application/octet-stream"
