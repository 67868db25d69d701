"""From start to end of a server process: listen, load, serve, drain."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI

from paged_backend.server.app import add_metrics, create_app
from paged_backend.server.middleware import AnswerHead
from paged_backend.server.models import Models
from paged_backend.server.settings import ServerSettings
from paged_backend.server.throughput_log import log_when_busy
from paged_backend.server.tracing import Tracing

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.05
_ABORT_SECONDS = 5.0
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def run(models: Models) -> None:
    """Serve until a signal says stop; raises what loading the only model raises, and OSError for an address that cannot
    be used.

    The first SIGTERM or SIGINT drains: requests that run may finish, for `shutdown_timeout` seconds, new ones are told
    503. A second one ends them at once.
    """
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(serve(models))


async def serve(models: Models) -> None:
    """`run` in a running event loop."""
    settings = models.settings
    tracing = None if settings.otlp_endpoint is None else Tracing(settings.otlp_endpoint)
    servers = [_Server(_config(create_app(models, tracing), settings))]
    if settings.metrics_port is not None:
        servers.append(_Server(_metrics_config(models, settings)))
    drain = _Drain(models)
    with drain.on_signals():
        listening = [asyncio.create_task(server.listen()) for server in servers]
        stopping = asyncio.create_task(drain.wait())
        working = [asyncio.create_task(work) for work in (models.start(), models.unload_idle(), log_when_busy(models))]
        try:
            await _until_stopped(stopping, [*working, *listening])
        finally:
            for task in (stopping, *working):
                task.cancel()
            for server in servers:
                server.should_exit = True
            await asyncio.gather(*listening, return_exceptions=True)
            await models.close()
            if tracing is not None:
                await asyncio.to_thread(tracing.close)


async def _until_stopped(stopping: asyncio.Task[None], others: list[asyncio.Task[None]]) -> None:
    """Until the drain is over; raises what goes wrong before."""
    waiting = {stopping, *others}
    while not stopping.done():
        done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        waiting -= done
        for task in done:
            task.result()


class _Drain:
    """What the signals ask for: first to finish, then to stop."""

    def __init__(self, models: Models) -> None:
        self._models = models
        self._first = asyncio.Event()
        self._second = asyncio.Event()

    @contextlib.contextmanager
    def on_signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():  # where no signal arrives
            yield
            return
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.add_signal_handler(number, self.signalled)
        try:
            yield
        finally:
            for number in _SIGNALS:
                loop.remove_signal_handler(number)

    def signalled(self) -> None:
        (self._second if self._first.is_set() else self._first).set()

    async def wait(self) -> None:
        """Until everything is answered, after the first signal, or nothing more can be waited for."""
        await self._first.wait()
        models, settings = self._models, self._models.settings
        models.is_draining = True
        logger.info("draining %d requests, for %g s at most", models.num_active, settings.shutdown_timeout)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(settings.shutdown_timeout):
                await self._idle_or_told()
        if models.num_active:
            logger.warning("aborting %d requests", models.num_active)
            await models.close()  # each of them ends with an error
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_ABORT_SECONDS):
                    while models.num_active:
                        await asyncio.sleep(_POLL_SECONDS)

    async def _idle_or_told(self) -> None:
        while self._models.num_active and not self._second.is_set():
            await asyncio.sleep(_POLL_SECONDS)


class _Server(uvicorn.Server):
    """Uvicorn without its signal handlers, and without ending the process if an address is in use."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def listen(self) -> None:
        config = self.config
        try:
            await self.serve()
        except (SystemExit, OSError) as error:
            if self.started:
                raise
            reason = error if isinstance(error, OSError) else _why_not(config.host, config.port)
            where, name = (config.uds, "uds") if config.uds else (f"{config.host}:{config.port}", "host or port")
            raise OSError(f"cannot listen on {where} ({_told(reason)}); choose another {name}") from None
        if self.config.uds:
            Path(self.config.uds).unlink(missing_ok=True)


def _why_not(host: str, port: int) -> OSError | None:
    """Why nothing can listen there; uvicorn tells its log only."""
    try:
        first, *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, _, _, address = first
        with socket.socket(family, kind) as listener:
            listener.bind(address)
    except OSError as error:
        return error
    return None


def _told(error: OSError | None) -> str:
    return "the log says why" if error is None else error.strerror or str(error)


def _config(app: FastAPI, settings: ServerSettings) -> uvicorn.Config:
    return _uvicorn_config(
        app,
        settings,
        port=settings.port,
        uds=settings.uds,
        ssl_certfile=settings.ssl_certfile,
        ssl_keyfile=settings.ssl_keyfile,
        access_log=settings.log_level == "debug",
    )


def _metrics_config(models: Models, settings: ServerSettings) -> uvicorn.Config:
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    add_metrics(app, models)
    app.add_middleware(AnswerHead)
    assert settings.metrics_port is not None
    return _uvicorn_config(app, settings, port=settings.metrics_port, access_log=False)


def _uvicorn_config(app: FastAPI, settings: ServerSettings, **options: Any) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        host=settings.host,
        http="httptools",
        ws="none",
        lifespan="off",
        log_level=settings.log_level,
        timeout_graceful_shutdown=1,  # what had to be waited for, has been
        **options,
    )


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:  # there is none for Windows
        return None
    return uvloop.new_event_loop
