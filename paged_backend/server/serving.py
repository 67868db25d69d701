"""A model behind the routes, from before it is loaded until after it is closed."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from paged_backend import LLM, EngineError, EngineStats, LoRARequest
from paged_backend.server.errors import ApiError
from paged_backend.server.memory import give_memory_back
from paged_backend.server.metrics import Metrics
from paged_backend.server.settings import ServerSettings

logger = logging.getLogger(__name__)

T = TypeVar("T")
_STATS_SECONDS = 10.0
_NUM_PREPARING_THREADS = 4


class Serving:
    """One model for all routes. While it is not loaded, and once its engine is closed, asking for that raises the 503
    that says so.

    Whatever takes long (loading, templates, tokenising, compiling grammars) runs in threads: the event loop goes on.
    """

    def __init__(
        self,
        settings: ServerSettings,
        *,
        model: str,
        names: tuple[str, ...] = (),
        make: Callable[[], LLM] | None = None,
        llm: LLM | None = None,
        num_bytes_needed: Callable[[], int] = lambda: 0,
    ) -> None:
        """`make` loads it, unless `llm` is there already; `num_bytes_needed` tells what that will take, if it can."""
        self.settings = settings
        self.model = model
        """As it was given."""
        self.model_names = names or settings.served_model_names or (model,)
        self.lora_modules = {name: LoRARequest(name, path) for name, path in settings.lora_modules.items()}
        """The adapters that are served, by their names."""
        self.metrics = Metrics(self.model_names[0])
        self.num_bytes_needed = num_bytes_needed
        self.max_model_len: int | None = None
        """None: not known before it is loaded for the first time."""
        self.num_users = 0
        """Requests that need it to stay loaded."""
        self.last_used = time.monotonic()
        self.is_leaving = False
        """Whether it is about to be unloaded, so that new requests have to wait until it is loaded again."""
        self._make = make
        self._llm: LLM | None = None
        self._preparing = ThreadPoolExecutor(_NUM_PREPARING_THREADS, "paged-backend preparing")
        self._stats: asyncio.Task[EngineStats] | None = None
        if llm is not None:
            self._take(llm)

    @property
    def llm(self) -> LLM:
        if self._llm is None:
            raise ApiError(503, "the model is not loaded yet; try again later", code="loading", retry=True)
        if self._llm.is_closed:
            raise ApiError(503, "the engine is closed", code="engine_dead")
        return self._llm

    @property
    def is_loaded(self) -> bool:
        """Whether there is an engine to ask, be it dead, and it may stay."""
        return self._llm is not None and not self.is_leaving

    @property
    def is_dead(self) -> bool:
        return self._llm is not None and self._llm.is_closed and not self.is_leaving

    async def load(self) -> None:
        """Make the LLM; raises what making it raises. The thread is a daemon, so that a server can stop meanwhile."""
        assert self._make is not None
        make = self._make
        loop = asyncio.get_running_loop()
        made: asyncio.Future[LLM] = loop.create_future()

        def run() -> None:
            try:
                llm, error = make(), None
            except Exception as caught:
                llm, error = None, caught
            with contextlib.suppress(RuntimeError):  # the loop has ended: nobody waits any more
                loop.call_soon_threadsafe(_settle, made, llm, error)

        threading.Thread(target=run, name="paged-backend loading", daemon=True).start()
        llm = await made
        try:
            for wanted in self.lora_modules.values():
                await self.prepare(llm.add_lora, wanted)
        except BaseException:
            llm.close()
            raise
        self._take(llm)

    async def unload(self) -> None:
        """Give the engine's memory back. Nobody may be using it."""
        assert self._llm is not None and self.num_users == 0
        self.is_leaving = True
        try:
            with contextlib.suppress(ApiError, EngineError):
                self.metrics.keep(await self.stats())
            llm, self._llm, self._stats = self._llm, None, None
            await asyncio.to_thread(llm.close)
            del llm  # or what it holds would not be given back
            await asyncio.to_thread(give_memory_back)
        finally:
            self.is_leaving = False

    def model_name(self, asked: str | None) -> str:
        return asked or self.model_names[0]

    def lora_request(self, name: str | None) -> LoRARequest | None:
        """The adapter that answers when a model is called so; None for the model itself."""
        return None if name is None else self.lora_modules.get(name)

    async def prepare(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """The result of a function that renders, tokenises or compiles, run in a thread."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._preparing, lambda: function(*args, **kwargs))

    async def stats(self) -> EngineStats:
        """The engine's counters; raises the 503 of one that does not answer. However many ask, one thread waits."""
        llm = self.llm
        if self._stats is None or self._stats.done():
            self._stats = asyncio.create_task(asyncio.to_thread(llm.stats))
        try:
            return await asyncio.wait_for(asyncio.shield(self._stats), _STATS_SECONDS)
        except TimeoutError:
            raise ApiError(503, f"the engine has not answered for {_STATS_SECONDS:g} s", code="engine_stuck") from None

    def close(self) -> None:
        """End what is unfinished and give the memory back."""
        self._preparing.shutdown(wait=False, cancel_futures=True)
        if self._llm is not None:
            self._llm.close()

    def _take(self, llm: LLM) -> None:
        self._llm, self.max_model_len, self.last_used = llm, llm.max_model_len, time.monotonic()


def _settle(future: asyncio.Future[LLM], llm: LLM | None, error: Exception | None) -> None:
    if future.done():
        return
    if llm is not None:
        future.set_result(llm)
    else:
        assert error is not None
        future.set_exception(error)
