"""From start to end of a server process: listen, load, serve, drain."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn
from fastapi import FastAPI

from paged_backend import LLM
from paged_backend.server.app import add_metrics, create_app
from paged_backend.server.serving import Serving
from paged_backend.server.settings import ServerSettings

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.05
_ABORT_SECONDS = 5.0
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def run(make: Callable[[], LLM], serving: Serving) -> None:
    """Serve until a signal says stop; raises what `make` raises, and OSError for an address that cannot be used.

    The first SIGTERM or SIGINT drains: requests that run may finish, for `shutdown_timeout` seconds, new ones are told
    503. A second one ends them at once.
    """
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(serve(make, serving))


async def serve(make: Callable[[], LLM], serving: Serving) -> None:
    """`run` in a running event loop."""
    settings = serving.settings
    servers = [_Server(_config(create_app(serving), settings))]
    if settings.metrics_port is not None:
        servers.append(_Server(_metrics_config(serving, settings)))
    drain = _Drain(serving)
    with drain.on_signals():
        listening = [asyncio.create_task(server.listen()) for server in servers]
        loading = asyncio.create_task(serving.load(make))
        stopping = asyncio.create_task(drain.wait())
        try:
            await _until_stopped(loading, stopping, listening)
        finally:
            loading.cancel()
            stopping.cancel()
            for server in servers:
                server.should_exit = True
            await asyncio.gather(*listening, return_exceptions=True)
            await asyncio.to_thread(serving.close)


async def _until_stopped(
    loading: asyncio.Task[None], stopping: asyncio.Task[None], listening: list[asyncio.Task[None]]
) -> None:
    """Until the drain is over; raises what goes wrong before."""
    waiting: set[asyncio.Task[None]] = {loading, stopping, *listening}
    while not stopping.done():
        done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        waiting -= done
        for task in done:
            task.result()


class _Drain:
    """What the signals ask for: first to finish, then to stop."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving
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
        serving, settings = self._serving, self._serving.settings
        serving.is_draining = True
        logger.info("draining %d requests, for %g s at most", serving.num_active, settings.shutdown_timeout)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(settings.shutdown_timeout):
                await self._idle_or_told()
        if serving.num_active:
            logger.warning("aborting %d requests", serving.num_active)
            await asyncio.to_thread(serving.close)  # each of them ends with an error
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_ABORT_SECONDS):
                    while serving.num_active:
                        await asyncio.sleep(_POLL_SECONDS)

    async def _idle_or_told(self) -> None:
        while self._serving.num_active and not self._second.is_set():
            await asyncio.sleep(_POLL_SECONDS)


class _Server(uvicorn.Server):
    """Uvicorn without its signal handlers, and without ending the process if an address is in use."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def listen(self) -> None:
        try:
            await self.serve()
        except SystemExit:
            where = self.config.uds or f"{self.config.host}:{self.config.port}"
            raise OSError(f"cannot listen on {where}; is another server running there?") from None


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


def _metrics_config(serving: Serving, settings: ServerSettings) -> uvicorn.Config:
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    add_metrics(app, serving)
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
