"""All models of a server: which of them is loaded, for whom, and for how long."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Sequence

from starlette.requests import Request

import paged_backend
from paged_backend import ConfigError, EngineError, EngineStats
from paged_backend.server.errors import ApiError
from paged_backend.server.metrics import exposition
from paged_backend.server.serving import Serving
from paged_backend.server.settings import ServerSettings

logger = logging.getLogger(__name__)

HOLDING = "paged_backend.holding"
"""Where the scope of an HTTP request has the exit stack that is left when it has been answered."""
_LONGEST_PAUSE = 1.0


class Models:
    """The models behind the routes, and whether the server takes requests for them.

    A model that is the only one is loaded at the start; until then requests are told 503. Of several, each is loaded
    when the first request asks for it, which waits. A request holds its model from then until its answer has been sent,
    and a model that is held is never unloaded. Loading and unloading happen one at a time.
    """

    def __init__(
        self,
        settings: ServerSettings,
        servings: Sequence[Serving],
        *,
        free_memory: Callable[[], int] = lambda: paged_backend.available_memory(),  # which imports torch
    ) -> None:
        self.settings = settings
        self.servings = tuple(servings)
        self.is_draining = False
        self.num_active = 0
        """HTTP requests that are being answered."""
        self._free_memory = free_memory
        self._is_started = len(self.servings) > 1 or self.servings[0].is_loaded
        self._is_closed = False
        self._turn = asyncio.Lock()
        """Of whoever loads or unloads: two at once would count on the same memory."""
        self._loading: dict[Serving, asyncio.Task[None]] = {}
        self._waiting: defaultdict[Serving, list[asyncio.Future[None]]] = defaultdict(list)
        """Those who wait for a model. They hold it from the moment it is loaded, not from when they get to run: else it
        might be unloaded for somebody else before, again and again."""

    @property
    def is_ready(self) -> bool:
        """Whether requests are taken; that a model has to be loaded first does not matter."""
        return self._is_started and not self.is_draining and not any(serving.is_dead for serving in self.servings)

    @property
    def names(self) -> list[str]:
        """What requests may ask for: models, and adapters of models."""
        return [name for serving in self.servings for name in (*serving.model_names, *serving.lora_modules)]

    async def start(self) -> None:
        """Load the only model, and raise what that raises; several are loaded when they are asked for."""
        if not self._is_started:
            await self.servings[0].load()
            self._is_started = True

    def find(self, name: str | None) -> Serving:
        """The model of that name, loaded or not; None stands for the first one. Raises the 404 of unknown names."""
        if name is None:
            return self.servings[0]
        for serving in self.servings:
            if name in serving.model_names or name in serving.lora_modules:
                return serving
        raise ApiError(
            404,
            f"the model {name!r} is not served here; served: {', '.join(self.names)}",
            param="model",
            code="model_not_found",
        )

    async def hold(self, request: Request, name: str | None) -> Serving:
        """The model of that name, loaded, for as long as this HTTP request lasts; raises what says why it cannot be."""
        stack: contextlib.AsyncExitStack = request.scope[HOLDING]
        return await stack.enter_async_context(self.using(name))

    @contextlib.asynccontextmanager
    async def using(self, name: str | None) -> AsyncIterator[Serving]:
        """The same within a block."""
        serving = self.find(name)
        if not self._is_started:
            raise ApiError(503, "the model is not loaded yet; try again later", code="loading", retry=True)
        if serving.is_loaded:
            serving.num_users += 1
        else:
            await self._wait_and_hold(serving)
        try:
            yield serving
        finally:
            serving.num_users -= 1
            serving.last_used = time.monotonic()

    async def unload_idle(self) -> None:
        """Unload, for ever, what has not been used for `model_idle_timeout` seconds."""
        limit = self.settings.model_idle_timeout
        while limit is not None:
            await asyncio.sleep(min(limit / 4, _LONGEST_PAUSE))
            for serving in self.servings:
                if _is_idle(serving, limit):
                    async with self._turn:
                        if _is_idle(serving, limit):
                            await _unload(serving, f"it was not used for {limit:g} s")

    async def stats(self) -> dict[Serving, EngineStats]:
        """The counters of the models that are loaded; raises the 503 of an engine that does not answer."""
        if not self._is_started:
            raise ApiError(503, "the model is not loaded yet; try again later", code="loading", retry=True)
        return {serving: await serving.stats() for serving in self.servings if serving.is_loaded}

    async def exposition(self) -> bytes:
        """What Prometheus scrapes; without the part of engines that do not answer."""
        stats: dict[Serving, EngineStats] = {}
        for serving in self.servings:
            with contextlib.suppress(ApiError, EngineError):
                stats[serving] = await serving.stats()
        return exposition([(serving.metrics, stats.get(serving)) for serving in self.servings])

    async def close(self) -> None:
        """End what is unfinished with an error, those who wait for a model included."""
        self._is_closed = True
        for task in self._loading.values():
            task.cancel()
        await asyncio.gather(*(asyncio.to_thread(serving.close) for serving in self.servings))

    async def _wait_and_hold(self, serving: Serving) -> None:
        """Wait until it is loaded, with everybody else who does. Who stops waiting does not stop the others."""
        if self._is_closed:
            raise _closed()
        loaded: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[serving].append(loaded)
        self._see_to(serving)
        limit = self.settings.request_timeout
        try:
            async with asyncio.timeout(limit):
                await loaded
        except TimeoutError:
            self._let_go(serving, loaded)
            message = f"the model {serving.model_names[0]!r} was not loaded within the request's {limit:g} s"
            raise ApiError(504, message, code="request_timeout") from None
        except asyncio.CancelledError:
            self._let_go(serving, loaded)
            raise

    def _let_go(self, serving: Serving, loaded: asyncio.Future[None]) -> None:
        if not loaded.cancelled() and loaded.done() and loaded.exception() is None:  # it came at the last moment
            serving.num_users -= 1

    def _see_to(self, serving: Serving) -> None:
        """Have it loaded by one task for all who wait."""
        if serving not in self._loading:
            self._loading[serving] = asyncio.create_task(self._load(serving))
            self._loading[serving].add_done_callback(lambda task: self._note_end(serving, task))

    def _note_end(self, serving: Serving, task: asyncio.Task[None]) -> None:
        del self._loading[serving]
        error = _closed() if task.cancelled() else task.exception()
        if error is None:
            if self._waiting[serving]:  # who came when it was about to be unloaded again
                self._see_to(serving)
            return
        for loaded in self._waiting.pop(serving, ()):
            if not loaded.done():
                loaded.set_exception(error)

    async def _load(self, serving: Serving) -> None:
        async with self._turn:
            if not serving.is_loaded:
                await self._load_now(serving)
            for loaded in self._waiting.pop(serving, ()):
                if not loaded.done():
                    serving.num_users += 1
                    loaded.set_result(None)

    async def _load_now(self, serving: Serving) -> None:
        name = serving.model_names[0]
        while self._others(serving) and serving.num_bytes_needed() > self._free_memory():
            await self._make_room(serving)
        try:
            await self._load_in_what_there_is(serving)
        except ApiError:
            raise
        except Exception:  # of a model's files and code, anything may come
            logger.exception("the model %s could not be loaded", name)
            message = f"the model {name!r} could not be loaded; the server's log has the reason"
            raise ApiError(503, message, code="model_not_loaded", retry=True) from None
        logger.info("loaded %s", name)

    async def _load_in_what_there_is(self, serving: Serving) -> None:
        """Load, and unload others if it turns out that memory is short."""
        while True:
            try:
                return await serving.load()
            except Exception as error:
                if not (_is_about_memory(error) and self._others(serving)):
                    raise
                await self._make_room(serving)

    def _others(self, newcomer: Serving) -> list[Serving]:
        return [serving for serving in self.servings if serving.is_loaded and serving is not newcomer]

    async def _make_room(self, newcomer: Serving) -> None:
        """Unload the least recently used other model, and an idle one rather than one in use, whose requests may
        finish first. Raises the 503 that says that they did not in time."""
        name, limit = newcomer.model_names[0], self.settings.model_unload_timeout
        victim = min(self._others(newcomer), key=lambda serving: (serving.num_users > 0, serving.last_used))
        victim.is_leaving = True
        try:
            async with asyncio.timeout(limit):
                while victim.num_users:
                    await asyncio.sleep(0.01)
        except TimeoutError:
            message = f"there was no memory for the model {name!r} for {limit:g} s: the others are in use"
            raise ApiError(503, message, code="model_not_loaded", retry=True) from None
        finally:
            victim.is_leaving = False
        await _unload(victim, f"{name} needs its memory")


def _closed() -> ApiError:
    return ApiError(503, "the engine is closed", code="engine_dead")


def _is_about_memory(error: Exception) -> bool:
    """Settings have been checked before: what is impossible about them now is the memory they ask for."""
    return isinstance(error, (ConfigError, MemoryError)) or type(error).__name__ == "OutOfMemoryError"


def _is_idle(serving: Serving, limit: float) -> bool:
    return serving.is_loaded and not serving.num_users and time.monotonic() - serving.last_used >= limit


async def _unload(serving: Serving, reason: str) -> None:
    logger.info("unloading %s: %s", serving.model_names[0], reason)
    await serving.unload()
