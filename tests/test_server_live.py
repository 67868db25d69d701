"""A real server on a real socket: disconnects, slow readers, the SDKs, signals."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from langchain_openai import ChatOpenAI

from helpers import WAIT_SECONDS, is_idle, num_ended, wait_until
from helpers_server import END, ServerUnderTest, free_port, make_models, make_server, refusal, user
from paged_backend import LLM, ConfigError
from paged_backend.server import lifecycle
from paged_backend.server.settings import ServerSettings
from test_server_errors import failing_after

ROOT = Path(__file__).parents[1]
LONG = {"max_tokens": 2000, "ignore_eos": True}


@pytest.fixture(scope="module")
def live() -> Iterator[tuple[ServerUnderTest, str]]:
    server = make_server(num_blocks=4096, api_keys=("key",))
    with server.live() as url:
        yield server, url
    server.serving.close()


@pytest.fixture
def server(live: tuple[ServerUnderTest, str]) -> ServerUnderTest:
    live[0].sampler.script = [*b"abcdefgh", END]
    live[0].runner.on_step = lambda output: None
    return live[0]


@pytest.fixture
def url(live: tuple[ServerUnderTest, str]) -> str:
    return live[1]


@pytest.fixture
def client(server: ServerUnderTest, url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="key", max_retries=0, timeout=WAIT_SECONDS) as client:
        yield client


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_client_that_hangs_up_ends_its_request(server: ServerUnderTest, url: str, path: str, stream: bool) -> None:
    server.runner.on_step = lambda output: time.sleep(0.01)
    before = num_ended(server.llm.stats())
    body = {"prompt": ["a", "b"]} if path == "/v1/completions" else {"messages": [user("hi")]}
    with httpx.Client(base_url=url, headers={"Authorization": "Bearer key"}) as client:
        if stream:
            with client.stream("POST", path, json=body | LONG | {"stream": True}) as response:
                next(response.iter_lines())
        else:
            with pytest.raises(httpx.ReadTimeout):
                client.post(path, json=body | LONG, timeout=0.2)
    start = time.monotonic()
    wait_until(lambda: is_idle(server.llm.stats()))
    assert time.monotonic() - start < 1.0
    assert num_ended(server.llm.stats()) == before
    wait_until(lambda: server.models.num_active == 0)


def test_nothing_is_left_of_finished_requests(server: ServerUnderTest, client: openai.OpenAI) -> None:
    for _ in range(50):
        client.completions.create(model="fake", prompt="hi", max_tokens=1)
    assert is_idle(server.llm.stats())
    assert server.models.num_active == 0


def test_a_reader_who_reads_nothing_is_idle() -> None:
    server = make_server(num_blocks=8192, max_model_len=8192, stall_timeout=0.3)
    body = json.dumps({"prompt": ["x" * 7000] * 8, "n": 128, "echo": True, "max_tokens": 1, "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
    with server.live() as url, socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        host, port = url.removeprefix("http://").split(":")
        connection.connect((host, int(port)))
        connection.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + body)
        wait_until(lambda: server.models.num_active == 1)
        wait_until(lambda: server.models.num_active == 0 and is_idle(server.llm.stats()))
    server.serving.close()


@pytest.mark.parametrize("begun", [b"", b'{"prompt": '], ids=["nothing", "a part"])
def test_a_body_that_stops_coming_is_a_408(begun: bytes) -> None:
    server = make_server(stall_timeout=0.3)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n"
    with server.live() as url, socket.socket() as connection:
        connection.settimeout(WAIT_SECONDS)
        host, port = url.removeprefix("http://").split(":")
        connection.connect((host, int(port)))
        connection.sendall(head + begun)
        answer = connection.recv(4096)
        assert answer.startswith(b"HTTP/1.1 408 ") and b"stall_timeout=0.3 seconds" in answer
        wait_until(lambda: server.models.num_active == 0)
    server.serving.close()


async def test_the_event_loop_goes_on_while_prompts_are_tokenised(server: ServerUnderTest) -> None:
    """However long that takes."""
    gaps = []

    async def tick() -> None:
        while True:
            start = time.monotonic()
            await asyncio.sleep(0.01)
            gaps.append(time.monotonic() - start)

    ticking = asyncio.create_task(tick())
    slow = threading.Event()
    encode = server.llm.tokenizer.encode
    server.llm.tokenizer.encode = lambda *args, **kwargs: (slow.wait(0.5), encode(*args, **kwargs))[1]  # type: ignore[method-assign]
    try:
        async with server.client(headers={"Authorization": "Bearer key"}) as client:
            answers = await asyncio.gather(
                client.post("/v1/completions", json={"prompt": "hi", "max_tokens": 1}),
                client.post("/v1/chat/completions", json={"messages": [user("hi")], "max_tokens": 1}),
                client.post("/tokenize", json={"prompt": "hi"}),
            )
    finally:
        del server.llm.tokenizer.encode
        ticking.cancel()
    assert [answer.status_code for answer in answers] == [200] * 3
    assert len(gaps) > 10 and max(gaps) < 0.4


def test_openais_sdk_completes(client: openai.OpenAI) -> None:
    reply = client.completions.create(model="fake", prompt=["hi", "ho"], max_tokens=4, logprobs=1, echo=True)
    assert [choice.text for choice in reply.choices] == ["hiabcd", "hoabcd"]
    assert reply.usage is not None and reply.usage.completion_tokens == 8
    pieces = client.completions.create(model="fake", prompt="hi", max_tokens=4, stream=True)
    assert "".join(piece.choices[0].text for piece in pieces) == "abcd"


def test_openais_sdk_chats(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(model="fake", messages=[user("hi")], logprobs=True, top_logprobs=2)  # type: ignore[list-item]
    assert (reply.choices[0].message.content, reply.choices[0].finish_reason) == ("abcdefgh", "stop")
    assert reply.choices[0].logprobs is not None and len(reply.choices[0].logprobs.content or ()) == 9
    assert [model.id for model in client.models.list()] == ["fake"]
    assert client.models.retrieve("fake").owned_by == "paged-backend"


async def test_openais_asynchronous_sdk_streams_side_by_side(server: ServerUnderTest, url: str) -> None:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="key", max_retries=0, timeout=WAIT_SECONDS) as client:

        async def one() -> tuple[str, Any]:
            stream = await client.chat.completions.create(
                model="fake",
                messages=[user("hi")],  # type: ignore[list-item]
                stream=True,
                stream_options={"include_usage": True},
                extra_body={"top_k": 5, "cache_salt": "mine", "priority": 1},
            )
            chunks = [chunk async for chunk in stream]
            return "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]), chunks[-1].usage

        answers = await asyncio.gather(*(one() for _ in range(20)))
    assert {text for text, _ in answers} == {"abcdefgh"}
    assert {usage.completion_tokens for _, usage in answers} == {9}


def test_openais_sdk_raises_its_own_errors(server: ServerUnderTest, client: openai.OpenAI, url: str) -> None:
    with pytest.raises(openai.NotFoundError, match="nope"):
        client.completions.create(model="nope", prompt="hi")
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="fake", prompt="hi", temperature=3)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").models.list()
    failing_after(server, 3)
    with pytest.raises(openai.APIError, match="on purpose"):
        list(client.completions.create(model="fake", prompt="hi", max_tokens=50, stream=True))


def test_breaking_out_of_the_sdks_stream_ends_the_request(server: ServerUnderTest, client: openai.OpenAI) -> None:
    before = num_ended(server.llm.stats())
    server.runner.on_step = lambda output: time.sleep(0.005)
    with client.completions.create(
        model="fake", prompt="hi", max_tokens=2000, stream=True, extra_body={"ignore_eos": True}
    ) as stream:
        next(iter(stream))
        assert server.llm.stats().num_running == 1
    wait_until(lambda: is_idle(server.llm.stats()))
    assert num_ended(server.llm.stats()) == before


async def test_langchains_model_talks_to_it(server: ServerUnderTest, url: str) -> None:
    model = ChatOpenAI(model="fake", base_url=f"{url}/v1", api_key="key", stream_usage=True)  # type: ignore[arg-type]
    reply = await model.ainvoke("hi")
    assert reply.content == "abcdefgh" and reply.usage_metadata and reply.usage_metadata["output_tokens"] == 9
    chunks = [chunk async for chunk in model.astream("hi")]
    assert "".join(str(chunk.content) for chunk in chunks) == "abcdefgh"
    assert sum(chunk.usage_metadata["output_tokens"] for chunk in chunks if chunk.usage_metadata) == 9


def test_metrics_have_a_port_of_their_own_without_a_key() -> None:
    server = make_server()
    settings = ServerSettings(port=free_port(), metrics_port=free_port(), api_keys=("key",))
    models = make_models(settings, make=lambda: server.llm)

    async def run() -> tuple[int, int, str]:
        running = asyncio.create_task(lifecycle.serve(models))
        async with httpx.AsyncClient() as client:
            while not models.is_ready or not await is_open(settings.port) or not await is_open(settings.metrics_port):
                await asyncio.sleep(0.01)
            locked = await client.get(f"http://127.0.0.1:{settings.port}/metrics")
            open_ = await client.get(f"http://127.0.0.1:{settings.metrics_port}/metrics")
            assert (await client.head(open_.url)).status_code == 200
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        return locked.status_code, open_.status_code, open_.text

    locked, open_, text = asyncio.run(asyncio.wait_for(run(), WAIT_SECONDS))
    assert (locked, open_) == (401, 200) and "paged:num_requests_running" in text
    assert server.llm.is_closed


def test_a_drain_lets_requests_finish_and_refuses_new_ones() -> None:
    server = make_server()
    server.sampler.script, server.runner.on_step = [*b"abcdefgh"], lambda output: time.sleep(0.01)
    settings = ServerSettings(port=free_port())
    models = make_models(settings, make=lambda: server.llm)

    async def run() -> tuple[httpx.Response, list[str]]:
        running = asyncio.create_task(lifecycle.serve(models))
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{settings.port}") as client:
            while not models.is_ready or not await is_open(settings.port):
                await asyncio.sleep(0.01)
            body = {"prompt": "hi", "max_tokens": 30, "stream": True}
            async with client.stream("POST", "/v1/completions", json=body) as response:
                lines = response.aiter_lines()
                await anext(lines)
                signal.raise_signal(signal.SIGTERM)
                while not models.is_draining:
                    await asyncio.sleep(0.01)
                refused = await client.post("/v1/completions", json={"prompt": "hi"})
                rest = [line async for line in lines if line]
        await running
        return refused, rest

    refused, rest = asyncio.run(asyncio.wait_for(run(), WAIT_SECONDS))
    refusal(refused, 503)
    assert rest[-1] == "data: [DONE]" and json.loads(rest[-2][6:])["choices"][0]["finish_reason"] == "length"
    assert server.llm.is_closed


def test_an_address_in_use_is_an_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        settings = ServerSettings(port=taken.getsockname()[1])
        with pytest.raises(OSError, match="cannot listen on"):
            lifecycle.run(make_models(settings, make=lambda: make_server().llm))


@pytest.mark.parametrize(
    ("address", "told"),
    [
        ({"host": "no.such.host.invalid"}, r"no\.such\.host\.invalid:8000 \(.+\); choose another host or port"),
        ({"uds": "no/such/folder/socket"}, r"no/such/folder/socket \(No such file.*\); choose another uds"),
    ],
)
def test_an_address_that_cannot_be_is_an_error_that_says_why(address: dict[str, str], told: str) -> None:
    with pytest.raises(OSError, match=f"cannot listen on {told}"):
        lifecycle.run(make_models(ServerSettings(**address), make=lambda: make_server().llm))


def test_a_certificate_makes_it_https(certificate: tuple[str, str]) -> None:
    certfile, keyfile = certificate
    settings = ServerSettings(port=free_port(), ssl_certfile=certfile, ssl_keyfile=keyfile)
    models = make_models(settings, make=lambda: make_server().llm)

    async def run() -> tuple[int, str]:
        running = asyncio.create_task(lifecycle.serve(models))
        trusting = ssl.create_default_context(cafile=certfile)
        async with httpx.AsyncClient(verify=trusting, base_url=f"https://localhost:{settings.port}") as client:
            while not models.is_ready or not await is_open(settings.port):
                await asyncio.sleep(0.01)
            status = (await client.get("/ready")).status_code
            body = {"prompt": "hi", "max_tokens": 3, "stream": True}
            stream = (await client.post("/v1/completions", json=body)).text
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        return status, stream

    status, stream = asyncio.run(asyncio.wait_for(run(), WAIT_SECONDS))
    assert status == 200 and stream.endswith("data: [DONE]\n\n")


def test_a_certificate_that_cannot_be_used_is_refused_by_name(certificate: tuple[str, str], tmp_path: Path) -> None:
    certfile, keyfile = certificate
    with pytest.raises(ConfigError, match=r"ssl_certfile='nope.pem' is no file that can be read"):
        ServerSettings(ssl_certfile="nope.pem")
    with pytest.raises(ConfigError, match=r"ssl_keyfile='nope.pem' is no file that can be read"):
        ServerSettings(ssl_certfile=certfile, ssl_keyfile="nope.pem")
    locked = str(tmp_path / "locked.pem")
    command = ["openssl", "rsa", "-in", keyfile, "-aes256", "-passout", "pass:word", "-out", locked]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    told = r"cannot be used .*; give a certificate and its key, unencrypted, in PEM form"
    for wrong in ((keyfile, keyfile), (certfile, certfile), (certfile, locked), (certfile, None)):
        with pytest.raises(ConfigError, match=told):
            ServerSettings(ssl_certfile=wrong[0], ssl_keyfile=wrong[1])


def test_a_unix_socket_is_gone_with_its_server(tmp_path: Path) -> None:
    path = tmp_path / "server.sock"
    models = make_models(ServerSettings(uds=str(path)), make=lambda: make_server().llm)

    async def run() -> int:
        running = asyncio.create_task(lifecycle.serve(models))
        transport = httpx.AsyncHTTPTransport(uds=str(path))
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            while not models.is_ready or not path.exists():
                await asyncio.sleep(0.01)
            status = (await client.get("/ready")).status_code
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        return status

    assert asyncio.run(asyncio.wait_for(run(), WAIT_SECONDS)) == 200
    assert not path.exists()


def test_a_model_that_cannot_be_loaded_ends_the_server() -> None:
    def make() -> LLM:
        raise ValueError("no such model")

    with pytest.raises(ValueError, match="no such model"):
        lifecycle.run(make_models(ServerSettings(port=free_port()), make=make))


class Process:
    """The server as a process; its engine takes `step_seconds` a step."""

    def __init__(self, *options: str, step_seconds: float = 0.01) -> None:
        self.port = free_port()
        command = [sys.executable, "tests/server_process.py", str(step_seconds), "serve", "fake"]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(["tests", ".", "kernels"])}
        self.popen = subprocess.Popen(
            [*command, "--port", str(self.port), *options],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.url = f"http://127.0.0.1:{self.port}"
        wait_until(self._is_ready, 60)

    def _is_ready(self) -> bool:
        assert self.popen.poll() is None, self.popen.communicate()[0]
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(f"{self.url}/ready").status_code == 200
        return False

    def terminate(self) -> None:
        self.popen.send_signal(signal.SIGTERM)

    def end(self) -> tuple[int, str]:
        """Exit code and output."""
        output, _ = self.popen.communicate(timeout=WAIT_SECONDS)
        return self.popen.returncode, output


@contextlib.contextmanager
def running(*options: str, step_seconds: float = 0.01) -> Iterator[Process]:
    process = Process(*options, step_seconds=step_seconds)
    try:
        yield process
    finally:
        process.popen.kill()
        process.popen.communicate()


@pytest.mark.slow
def test_sigterm_lets_requests_finish_and_refuses_new_ones() -> None:
    with running() as process, httpx.Client(base_url=process.url, timeout=WAIT_SECONDS) as client:
        body = {"prompt": "hi", "max_tokens": 100, "stream": True}
        with client.stream("POST", "/v1/completions", json=body) as response:
            lines = response.iter_lines()
            next(lines)
            process.terminate()
            wait_until(lambda: httpx.get(f"{process.url}/ready").status_code == 503)
            refusal(httpx.post(f"{process.url}/v1/completions", json={"prompt": "hi"}), 503)
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]" and json.loads(rest[-2][6:])["choices"][0]["finish_reason"] == "length"
        code, output = process.end()
        assert (code, "Traceback" in output) == (0, False), output


@pytest.mark.slow
def test_a_second_sigterm_ends_requests_with_an_error() -> None:
    with running() as process, httpx.Client(base_url=process.url, timeout=WAIT_SECONDS) as client:
        with client.stream("POST", "/v1/completions", json={"prompt": "hi", "stream": True, **LONG}) as response:
            lines = response.iter_lines()
            next(lines)
            process.terminate()
            wait_until(lambda: httpx.get(f"{process.url}/ready").status_code == 503)
            process.terminate()
            rest = [line for line in lines if line]
        error = json.loads(rest[-1][6:])["error"]
        assert (error["code"], error["message"]) == ("engine_dead", "the engine is closed")
        code, output = process.end()
        assert (code, "Traceback" in output) == (0, False), output


@pytest.mark.slow
def test_the_drain_ends_after_its_time() -> None:
    with running("--shutdown-timeout", "0.2") as process:
        posting = threading.Thread(
            target=lambda: httpx.post(
                f"{process.url}/v1/completions", json={"prompt": "hi", **LONG}, timeout=WAIT_SECONDS
            )
        )
        posting.start()
        wait_until(lambda: bool(re.search(r"running\S* 1\.0", httpx.get(f"{process.url}/metrics").text)))
        process.terminate()
        assert process.end()[0] == 0
        posting.join(WAIT_SECONDS)


async def is_open(port: int | None) -> bool:
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    writer.close()
    return True
