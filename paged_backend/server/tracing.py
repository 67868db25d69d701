"""OpenTelemetry spans: one per HTTP request, and below it one per request of the engine, with its phases as events.

Names of attributes are those of OpenTelemetry for generative models, and of vLLM where that has none.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import paged_backend
from paged_backend import ConfigError, MissingExtraError, RequestMetrics, RequestOutput

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

_TRACES_PATH = "/v1/traces"
_EXPORT_SECONDS = 5.0
_SERVER_ERROR = 500
_UNTRACED = frozenset({"/health", "/ready", "/metrics", "/version"})
"""What is asked again and again, by machines."""
_EVENTS = {"first_scheduled_time": "scheduled", "first_token_time": "first_token"}

_current: ContextVar[Tracing | None] = ContextVar("current tracing", default=None)


class Tracing:
    """Sends spans to a collector, in the background. Closing it sends what is left."""

    def __init__(self, endpoint: str) -> None:
        url = traces_url(endpoint)
        try:
            from opentelemetry import propagate, trace
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError as error:
            raise MissingExtraError("--otlp-endpoint", "otlp") from error
        resource = Resource.create({"service.name": "paged-backend", "service.version": paged_backend.__version__})
        self._provider: TracerProvider = TracerProvider(resource=resource)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(url, timeout=_EXPORT_SECONDS)))
        self._tracer = self._provider.get_tracer("paged_backend")
        self._trace, self._extract = trace, propagate.extract

    @contextmanager
    def http_request(self, method: str, path: str, headers: Mapping[str, str]) -> Iterator[Any]:
        """The span of an HTTP request, a child of the one that its `traceparent` names."""
        with self._tracer.start_as_current_span(
            f"{method} {path}",
            context=self._extract(headers),
            kind=self._trace.SpanKind.SERVER,
            attributes={"http.request.method": method, "url.path": path},
        ) as span:
            token = _current.set(self)
            try:
                yield span
            finally:
                _current.reset(token)

    def note_status(self, span: Any, status: int) -> None:
        span.set_attribute("http.response.status_code", status)
        if status >= _SERVER_ERROR:
            span.set_status(self._trace.StatusCode.ERROR)

    def llm_request(self, model: str, output: RequestOutput, nums_output_tokens: Sequence[int]) -> None:
        """The span of a request that has just finished."""
        times = output.metrics
        if times is None:
            return
        offset = time.time() - time.monotonic()
        span = self._tracer.start_span(
            "llm_request",
            start_time=_nanoseconds(times.arrival_time + offset),
            attributes={
                "gen_ai.request.id": output.request_id,
                "gen_ai.request.model": model,
                "gen_ai.request.n": len(nums_output_tokens),
                "gen_ai.usage.prompt_tokens": len(output.prompt_token_ids),
                "gen_ai.usage.cached_tokens": output.num_cached_tokens,
                "gen_ai.usage.completion_tokens": sum(nums_output_tokens),
                "gen_ai.response.finish_reasons": [part.finish_reason or "" for part in output.outputs],
                **_latencies(times),
            },
        )
        for name, event in _EVENTS.items():
            if (moment := getattr(times, name)) is not None:
                span.add_event(event, timestamp=_nanoseconds(moment + offset))
        end = times.finished_time
        span.end(None if end is None else _nanoseconds(end + offset))

    def close(self) -> None:
        self._provider.shutdown()


def traced(model: str, output: RequestOutput, nums_output_tokens: Sequence[int]) -> None:
    """Tell of a finished request whose HTTP request is traced, if it is."""
    if (tracing := _current.get()) is not None:
        tracing.llm_request(model, output, nums_output_tokens)


class TraceRequests:
    """A span for each HTTP request, until its answer has been sent."""

    def __init__(self, app: ASGIApp, *, tracing: Tracing) -> None:
        self._app = app
        self._tracing = tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in _UNTRACED:
            await self._app(scope, receive, send)
            return
        with self._tracing.http_request(scope["method"], scope["path"], Headers(scope=scope)) as span:

            async def noting(message: Message) -> None:
                if message["type"] == "http.response.start":
                    self._tracing.note_status(span, message["status"])
                await send(message)

            await self._app(scope, receive, noting)


def traces_url(endpoint: str) -> str:
    """Where a collector takes spans; a bare address gets the path that OpenTelemetry has for them."""
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ConfigError(f"otlp_endpoint={endpoint!r} must be an address as http://localhost:4318")
    return endpoint if parts.path.strip("/") else endpoint.rstrip("/") + _TRACES_PATH


def _latencies(times: RequestMetrics) -> dict[str, float]:
    scheduled, first, end = times.first_scheduled_time, times.first_token_time, times.finished_time
    spans = {
        "gen_ai.latency.time_in_queue": (times.arrival_time, scheduled),
        "gen_ai.latency.time_to_first_token": (times.arrival_time, first),
        "gen_ai.latency.e2e": (times.arrival_time, end),
        "gen_ai.latency.time_in_model_prefill": (scheduled, first),
        "gen_ai.latency.time_in_model_decode": (first, end),
    }
    return {name: end - begin for name, (begin, end) in spans.items() if begin is not None and end is not None}


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)
