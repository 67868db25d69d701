"""`/paged/kv_map`: who holds which block of the KV cache, for the page and for whoever else watches."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections import defaultdict
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel
from starlette.responses import Response

from paged_backend import LLM, KVMap
from paged_backend.server.errors import ApiError, JSONReply
from paged_backend.server.models import Models
from paged_backend.server.serving import Serving

PATH = "/paged/kv_map"
MAX_CELLS = 2048
_FRESH_SECONDS = 0.1
_WAIT_SECONDS = 10.0


class KVCellsReply(BaseModel):
    owners: list[int]
    num_held: list[int]
    num_shared: list[int]
    num_cached: list[int]
    num_filled_slots: list[int]


class KVRequestReply(BaseModel):
    number: int
    is_running: bool
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    num_blocks: int
    num_sequences: int


class KVStatsReply(BaseModel):
    num_running: int
    num_waiting: int
    num_blocks: int
    block_size: int
    num_layer_groups: int
    num_free_blocks: int
    num_cached_blocks: int
    num_evictions: int
    num_steps: int
    num_computed_tokens: int
    num_generated_tokens: int
    num_prefix_queried_tokens: int
    num_prefix_hit_tokens: int
    num_preemptions: int
    kv_waste_ratio: float


class KVMapReply(BaseModel):
    object: str
    model: str
    time: float
    kv_waste: float
    blocks_per_cell: int
    cells: KVCellsReply
    requests: list[KVRequestReply]
    stats: KVStatsReply


def add_kv_map(app: FastAPI, models: Models) -> None:
    watched: defaultdict[Serving, _Watched] = defaultdict(_Watched)

    @app.get(PATH, response_class=JSONReply, response_model=KVMapReply)
    async def kv_map(model: str | None = None) -> Response:
        """The KV cache of a model between two steps. Nothing is gathered while nobody asks, and nothing is loaded."""
        serving = models.find(model)
        return JSONReply(_reply(serving.model_names[0], await watched[serving].latest(serving.llm)))


class _Watched:
    """The latest map of an engine. However many ask at once, and soon after each other, the engine is asked once."""

    def __init__(self) -> None:
        self._of: LLM | None = None
        self._asked_at = 0.0
        self._map: asyncio.Task[KVMap] | None = None

    async def latest(self, llm: LLM) -> KVMap:
        """Raises the 503 of an engine that does not answer."""
        if self._map is None or self._of is not llm or self._is_stale(self._map):
            self._of, self._asked_at = llm, time.monotonic()
            self._map = asyncio.create_task(asyncio.to_thread(llm.kv_map, MAX_CELLS))
        try:
            return await asyncio.wait_for(asyncio.shield(self._map), _WAIT_SECONDS)
        except TimeoutError:
            raise ApiError(503, f"the engine has not answered for {_WAIT_SECONDS:g} s", code="engine_stuck") from None

    def _is_stale(self, shown: asyncio.Task[KVMap]) -> bool:
        return shown.done() and (shown.exception() is not None or time.monotonic() - self._asked_at > _FRESH_SECONDS)


def _reply(model: str, shown: KVMap) -> dict[str, Any]:
    stats = dataclasses.asdict(shown.stats)
    return {
        "object": "kv_map",
        "model": model,
        "time": shown.time,
        "kv_waste": shown.kv_waste,
        "blocks_per_cell": shown.blocks_per_cell,
        "cells": dataclasses.asdict(shown.cells),
        "requests": [dataclasses.asdict(request) for request in shown.requests],
        "stats": {name: stats[name] for name in KVStatsReply.model_fields},
    }
