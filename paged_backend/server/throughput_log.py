"""A line in the log, every ten seconds, for each model that is busy."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import NamedTuple

from paged_backend import EngineError, EngineStats
from paged_backend.server.errors import ApiError
from paged_backend.server.models import Models
from paged_backend.server.serving import Serving

logger = logging.getLogger(__name__)


async def log_when_busy(models: Models, *, interval: float = 10.0) -> None:
    """For ever; a model in whose engine nothing has happened since the last line has none."""
    logs = {serving: _Log(serving) for serving in models.servings}
    while True:
        await asyncio.sleep(interval)
        for serving, log in logs.items():
            if serving.is_loaded:
                try:
                    log.write(await serving.stats())
                except (ApiError, EngineError) as error:
                    logger.warning("%s: %s", serving.model_names[0], error)


class _Counts(NamedTuple):
    time: float
    num_prompt_tokens: int
    num_generated_tokens: int
    num_queried: int
    num_hit: int

    @classmethod
    def of(cls, stats: EngineStats) -> _Counts:
        return cls(
            time.monotonic(),
            stats.num_computed_tokens - stats.num_generated_tokens,
            stats.num_generated_tokens,
            stats.num_prefix_queried_tokens,
            stats.num_prefix_hit_tokens,
        )


class _Log:
    """What a model's engine had done when the last line was written."""

    def __init__(self, serving: Serving) -> None:
        self._name = serving.model_names[0]
        self._last = _Counts.of(EngineStats())

    def write(self, stats: EngineStats) -> None:
        last, now = self._last, _Counts.of(stats)
        if now.num_generated_tokens < last.num_generated_tokens:  # another engine: it was unloaded meanwhile
            last = _Counts.of(EngineStats())._replace(time=last.time)
        self._last = now
        if now[1:] == last[1:] and not stats.num_running + stats.num_waiting:
            return
        seconds = max(now.time - last.time, 1e-6)
        logger.info(
            "%s: Avg prompt throughput: %.1f tokens/s, Avg generation throughput: %.1f tokens/s, Running: %d reqs, "
            "Waiting: %d reqs, KV cache usage: %.1f%%, Prefix cache hit rate: %.1f%%",
            self._name,
            max(now.num_prompt_tokens - last.num_prompt_tokens, 0) / seconds,
            (now.num_generated_tokens - last.num_generated_tokens) / seconds,
            stats.num_running,
            stats.num_waiting,
            100 * stats.kv_cache_usage,
            100 * (now.num_hit - last.num_hit) / max(now.num_queried - last.num_queried, 1),
        )
