"""Many requests of a file at once, and the bar that shows how they get on."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from typing import TYPE_CHECKING, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

if TYPE_CHECKING:
    from paged_backend import LLM

T = TypeVar("T")
R = TypeVar("R")
_REFRESH_SECONDS = 1.0


async def as_they_finish(items: Iterable[T], work: Callable[[T], Awaitable[R]], *, at_once: int) -> AsyncIterator[R]:
    """The results of `work`, at most `at_once` running. An item is taken when there is room: there may be millions."""
    left, running, done = iter(items), set[asyncio.Future[R]](), set[asyncio.Future[R]]()
    try:
        while True:
            while len(running) < at_once and (item := next(left, None)) is not None:
                running.add(asyncio.ensure_future(work(item)))
            if not running:
                return
            done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                yield task.result()
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, *done, return_exceptions=True)


def at_once(llm: LLM, limit: int | None) -> int:
    """Enough to fill the batches and have the next ones waiting, within the limit of the queue."""
    enough = 2 * llm.config.max_num_seqs
    return min(enough, limit or enough)


class Bar:
    """Lines done of all, tokens per second since the start, and the share of the KV cache in use."""

    def __init__(self, progress: Progress, total: int, done: int) -> None:
        self._progress = progress
        self._task = progress.add_task("", total=total, completed=done, rate="", kv="")
        self._start = time.monotonic()
        self._num_tokens = 0

    def advance(self, num_tokens: int) -> None:
        self._num_tokens += num_tokens
        seconds = max(time.monotonic() - self._start, 1e-6)
        self._progress.update(self._task, advance=1, rate=f"{self._num_tokens / seconds:.0f} tokens/s")

    async def watch(self, llm: LLM) -> None:
        """Show how full the KV cache is, again and again."""
        while True:
            stats = await asyncio.to_thread(llm.stats)
            self._progress.update(self._task, kv=f"KV {stats.kv_cache_usage:.0%}")
            await asyncio.sleep(_REFRESH_SECONDS)


@contextlib.contextmanager
def progress_bar(total: int, done: int) -> Iterator[Bar]:
    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]} {task.fields[kv]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        yield Bar(progress, total, done)


@contextlib.asynccontextmanager
async def watched(bar: Bar, llm: LLM) -> AsyncIterator[None]:
    watching = asyncio.create_task(bar.watch(llm))
    try:
        yield
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
