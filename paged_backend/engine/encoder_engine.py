"""The engine of models that have no next token: a prompt is one forward, and its result a vector."""

from __future__ import annotations

import bisect
import logging
import operator
import time
from collections import Counter
from typing import Protocol

from paged_backend.engine.engine import EngineOutput, engine_error, timeout_error
from paged_backend.engine.kv_map import KVMap
from paged_backend.engine.metrics import STEP_TOKENS_BOUNDS, EngineStats
from paged_backend.engine.request import FinishReason, Request, Status
from paged_backend.histogram import Histogram
from paged_backend.outputs import CompletionOutput

logger = logging.getLogger(__name__)

_order = operator.attrgetter("order")


class EncoderRunner(Protocol):
    """Runs an encoder on prompts, padded to the longest of them."""

    def embed(self, requests: list[Request]) -> list[list[float]]:
        """The vector of each request's prompt."""
        ...


class EncoderEngine:
    """Owns the requests from their admission to their end; used by one thread. It has no KV cache.

    Requests are taken in the order of their priority and arrival, `max_num_seqs` at a time. These are sorted by length
    and cut into batches of at most `max_num_batched_tokens` tokens, padding included, one for each step: so little is
    padded, and yet nobody is overtaken for ever. A longer prompt is a batch of its own.
    """

    def __init__(self, runner: EncoderRunner, *, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        self._runner = runner
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._requests: dict[str, Request] = {}
        self._waiting: list[Request] = []
        self._batches: list[list[Request]] = []
        """The next steps."""
        self._num_arrivals = 0
        self._counts: Counter[str] = Counter()
        self._step_seconds = 0.0
        self._step_tokens = Histogram(STEP_TOKENS_BOUNDS)
        self._largest_batch = 0
        self._finished: Counter[str] = Counter()
        self._failed: Counter[str] = Counter()

    def close(self) -> None:
        """There is nothing to end."""

    @property
    def has_work(self) -> bool:
        return bool(self._requests)

    def add_request(self, request: Request) -> None:
        (sequence,) = request.sequences
        sequence.order = (request.priority, self._num_arrivals, 0)
        self._num_arrivals += 1
        self._requests[request.request_id] = request
        bisect.insort(self._waiting, request, key=lambda one: _order(one.sequences[0]))

    def abort(self, request_id: str) -> list[EngineOutput]:
        """End a request; unknown and finished ids are fine."""
        request = self._requests.get(request_id)
        return [] if request is None else [self._finish(request, FinishReason.ABORT)]

    def step(self) -> list[EngineOutput]:
        """Run the next batch and return the news."""
        outputs = self._expire()
        batch = self._next_batch()
        if not batch:
            return outputs
        start = time.monotonic()
        for request in batch:
            request.metrics.first_scheduled_time = request.metrics.first_scheduled_time or start
        try:
            vectors = self._runner.embed(batch)
        except Exception as error:
            logger.exception("a step of %d prompts failed", len(batch))
            return outputs + [self._fail(request, engine_error("the step failed with", error)) for request in batch]
        self._count(batch, time.monotonic() - start)
        for request, vector in zip(batch, vectors, strict=True):
            request.embedding = vector
            outputs.append(self._finish(request, FinishReason.LENGTH))
        return outputs

    def fail_all(self, error: Exception) -> list[EngineOutput]:
        """End every request with `error`."""
        return [self._fail(request, error) for request in list(self._requests.values())]

    def reset_prefix_cache(self) -> None:
        """There is none."""

    def stats(self) -> EngineStats:
        return EngineStats(
            num_waiting=len(self._requests),
            num_steps=self._counts["steps"],
            step_seconds=self._step_seconds,
            num_computed_tokens=self._counts["tokens"],
            step_tokens=self._step_tokens.copy(),
            largest_batch=self._largest_batch,
            finished=dict(self._finished),
            failed=dict(self._failed),
        )

    def kv_map(self, max_cells: int) -> KVMap:
        """It is empty."""
        return KVMap(stats=self.stats())

    def _next_batch(self) -> list[Request]:
        while self._batches or self._waiting:
            if not self._batches:
                window, self._waiting = self._waiting[: self._max_num_seqs], self._waiting[self._max_num_seqs :]
                self._batches = self._cut(sorted(filter(_is_alive, window), key=_length))
                continue
            batch = list(filter(_is_alive, self._batches.pop(0)))
            if batch:
                return batch
        return []

    def _cut(self, requests: list[Request]) -> list[list[Request]]:
        """Batches of requests that are sorted by length, so that the last of a batch is its longest."""
        batches: list[list[Request]] = []
        for request in requests:
            if not batches or (len(batches[-1]) + 1) * _length(request) > self._max_num_batched_tokens:
                batches.append([])
            batches[-1].append(request)
        return batches

    def _expire(self) -> list[EngineOutput]:
        now = time.monotonic()
        late = [one for one in self._requests.values() if one.deadline is not None and one.deadline <= now]
        return [self._fail(request, timeout_error(request, now)) for request in late]

    def _count(self, batch: list[Request], seconds: float) -> None:
        self._counts["steps"] += 1
        num_tokens = sum(map(_length, batch))
        self._counts["tokens"] += num_tokens
        self._step_tokens.observe(num_tokens)
        self._step_seconds += seconds
        self._largest_batch = max(self._largest_batch, len(batch))

    def _finish(self, request: Request, reason: FinishReason) -> EngineOutput:
        self._end(request, reason)
        request.metrics.finished_time = time.monotonic()
        self._finished[reason.value] += 1
        return EngineOutput(request, CompletionOutput(0, finish_reason=reason.value))

    def _fail(self, request: Request, error: Exception) -> EngineOutput:
        self._end(request, FinishReason.ERROR)
        self._failed[type(error).__name__] += 1
        return EngineOutput(request, error)

    def _end(self, request: Request, reason: FinishReason) -> None:
        (sequence,) = request.sequences
        sequence.status, sequence.finish_reason = Status.FINISHED, reason
        del self._requests[request.request_id]


def _length(request: Request) -> int:
    return len(request.prompt_token_ids)


def _is_alive(request: Request) -> bool:
    return not request.is_finished
