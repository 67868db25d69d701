"""HEAD, by which load balancers ask whether a server is up."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

import paged_backend
from helpers import WAIT_SECONDS
from helpers_server import ServerUnderTest, make_server

PATHS = ("/health", "/ready", "/version", "/v1/models", "/v1/models/fake", "/metrics", "/", "/openapi.json")
REFUSED = ("/nope", "/v1/models/nope", "/v1/completions", "/v1/messages")


@pytest.fixture(scope="module")
def server() -> Iterator[ServerUnderTest]:
    server = make_server()
    yield server
    server.serving.close()


@pytest.mark.parametrize("path", [*PATHS, *REFUSED])
async def test_it_is_answered_as_get_without_the_body(server: ServerUnderTest, path: str) -> None:
    async with server.client() as client:
        got, head = await client.get(path), await client.head(path)
    assert (head.status_code, head.content) == (got.status_code, b"")
    assert got.content and (got.status_code == 200) == (path in PATHS)
    for name in ("content-type", "content-length", "allow", "etag"):
        assert path == "/metrics" or head.headers.get(name) == got.headers.get(name)


async def test_it_says_when_no_requests_are_taken() -> None:
    server = make_server()
    server.models.is_draining = True
    async with server.client() as client:
        assert [(await client.head(path)).status_code for path in ("/health", "/ready", "/v1/models")] == [
            200,
            503,
            503,
        ]
    server.serving.close()


async def test_it_needs_a_key_where_get_does() -> None:
    server = make_server(api_keys=("key",))
    async with server.client() as client:
        assert [(await client.head(path)).status_code for path in ("/health", "/ready", "/v1/models")] == [
            200,
            200,
            401,
        ]
    server.serving.close()


def test_the_connection_goes_on_after_it(server: ServerUnderTest) -> None:
    answer = f'{{"version":"{paged_backend.__version__}"}}'
    with server.live() as url, socket.socket() as connection:
        connection.settimeout(WAIT_SECONDS)
        host, port = url.removeprefix("http://").split(":")
        connection.connect((host, int(port)))
        for method in ("HEAD", "HEAD", "GET"):
            connection.sendall(f"{method} /version HTTP/1.1\r\nHost: x\r\n\r\n".encode())
            head, _, body = connection.recv(4096).partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200 OK") and f"content-length: {len(answer)}" in head.decode().lower()
            assert body.decode() == (answer if method == "GET" else "")
