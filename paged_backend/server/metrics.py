"""What Prometheus reads: vLLM's names, types and buckets, with the prefix `paged:`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from paged_backend import EngineStats, RequestOutput

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
LABELS = ("model_name", "engine")
_FIRST_TOKEN_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0),
    *(2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_TOKEN_BUCKETS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_REQUEST_BUCKETS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_COUNT_BUCKETS = tuple(float(step * 10**power) for power in range(6) for step in (1, 2, 5))
_N_BUCKETS = (1.0, 2.0, 5.0, 10.0, 20.0)

_HISTOGRAMS = {
    "time_to_first_token_seconds": ("From the arrival of a request to its first token.", _FIRST_TOKEN_BUCKETS),
    "inter_token_latency_seconds": ("Between two tokens of a streamed request.", _TOKEN_BUCKETS),
    "request_time_per_output_token_seconds": ("Mean time per token after the first.", _TOKEN_BUCKETS),
    "e2e_request_latency_seconds": ("From the arrival of a request to its end.", _REQUEST_BUCKETS),
    "request_queue_time_seconds": ("From the arrival of a request to its first step.", _REQUEST_BUCKETS),
    "request_inference_time_seconds": ("From the first step of a request to its end.", _REQUEST_BUCKETS),
    "request_prefill_time_seconds": ("From the first step of a request to its first token.", _REQUEST_BUCKETS),
    "request_decode_time_seconds": ("From the first token of a request to its last.", _REQUEST_BUCKETS),
    "request_prompt_tokens": ("Tokens of a prompt.", _COUNT_BUCKETS),
    "request_generation_tokens": ("Tokens generated for a request.", _COUNT_BUCKETS),
    "request_num_preemptions": ("How often a request was preempted.", _N_BUCKETS),
    "request_params_n": ("How many outputs a request asked for.", _N_BUCKETS),
}
_COUNTERS = {
    "prompt_tokens": "Tokens of the prompts of finished requests.",
    "prompt_tokens_cached": "Of these, found in the prefix cache.",
}


class Metrics:
    """Histograms and counters of the server's requests, and the engine's own counters as of the last scrape."""

    def __init__(self, model_name: str) -> None:
        self._labels = (model_name, "0")
        self._registry = CollectorRegistry()
        self._engine = _EngineCollector(self._labels)
        self._registry.register(self._engine)
        self._histograms = {
            name: Histogram(f"paged:{name}", text, LABELS, registry=self._registry, buckets=buckets).labels(
                *self._labels
            )
            for name, (text, buckets) in _HISTOGRAMS.items()
        }
        self._counters = {
            name: Counter(f"paged:{name}", text, LABELS, registry=self._registry).labels(*self._labels)
            for name, text in _COUNTERS.items()
        }
        self._rejections = Counter(
            "paged:admission_rejections",
            "Requests refused because the queue was full.",
            (*LABELS, "reason"),
            registry=self._registry,
        ).labels(*self._labels, "max_num_queued_reqs")

    def exposition(self, stats: EngineStats | None) -> bytes:
        """The text that Prometheus scrapes; without the engine's part if there is no engine to ask."""
        self._engine.stats = stats
        return generate_latest(self._registry)

    def rejected(self) -> None:
        self._rejections.inc()

    def observe_token(self, seconds: float) -> None:
        self._histograms["inter_token_latency_seconds"].observe(seconds)

    def observe(self, output: RequestOutput, num_output_tokens: int, n: int) -> None:
        """Count a finished request; `output` may be the last of its deltas."""
        self._histograms["request_params_n"].observe(n)
        self._counters["prompt_tokens"].inc(len(output.prompt_token_ids))
        self._counters["prompt_tokens_cached"].inc(output.num_cached_tokens)
        for name, value in _observations(output, num_output_tokens):
            self._histograms[name].observe(value)


def _observations(output: RequestOutput, num_output_tokens: int) -> Iterator[tuple[str, float]]:
    yield "request_prompt_tokens", len(output.prompt_token_ids)
    yield "request_generation_tokens", num_output_tokens
    times = output.metrics
    if times is None:
        return
    yield "request_num_preemptions", times.num_preemptions
    arrival, scheduled, first, end = (
        times.arrival_time,
        times.first_scheduled_time,
        times.first_token_time,
        times.finished_time,
    )
    if scheduled is not None:
        yield "request_queue_time_seconds", scheduled - arrival
    if first is not None:
        yield "time_to_first_token_seconds", first - arrival
    if end is None:
        return
    yield "e2e_request_latency_seconds", end - arrival
    if scheduled is not None:
        yield "request_inference_time_seconds", end - scheduled
    if scheduled is not None and first is not None:
        yield "request_prefill_time_seconds", first - scheduled
        yield "request_decode_time_seconds", end - first
        if num_output_tokens > 1:
            yield "request_time_per_output_token_seconds", (end - first) / (num_output_tokens - 1)


class _EngineCollector(Collector):
    """`EngineStats` as Prometheus' families."""

    def __init__(self, labels: tuple[str, ...]) -> None:
        self._labels = labels
        self.stats: EngineStats | None = None

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterator[Metric]:
        stats = self.stats
        if stats is None:
            return
        yield self._gauge("num_requests_running", "Sequences being computed.", stats.num_running)
        yield self._gauge("num_requests_waiting", "Sequences waiting for room.", stats.num_waiting)
        yield self._gauge("kv_cache_usage_perc", "Share of the KV cache's blocks that are held.", stats.kv_cache_usage)
        yield self._gauge(
            "kv_waste_ratio", "Slots of held blocks that hold nothing, over all steps.", stats.kv_waste_ratio
        )
        yield self._counter("prefix_cache_queries", "Prompt tokens looked up.", stats.num_prefix_queried_tokens)
        yield self._counter("prefix_cache_hits", "Prompt tokens found.", stats.num_prefix_hit_tokens)
        yield self._counter("num_preemptions", "Sequences that gave their blocks back.", stats.num_preemptions)
        yield self._counter("generation_tokens", "Tokens generated.", stats.num_generated_tokens)
        yield self._counter("spec_decode_num_draft_tokens", "Guesses checked.", stats.num_draft_tokens)
        yield self._counter("spec_decode_num_accepted_tokens", "Guesses that were right.", stats.num_accepted_tokens)
        yield self._by_reason("request_success", "Finished requests.", "finished_reason", stats.finished)
        yield self._by_reason("request_failure", "Requests that ended with an error.", "error", stats.failed)
        yield self._config(stats)

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"paged:{name}", text, labels=LABELS)
        family.add_metric(self._labels, value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(f"paged:{name}", text, labels=LABELS)
        family.add_metric(self._labels, value)
        return family

    def _by_reason(self, name: str, text: str, label: str, values: dict[str, int]) -> Metric:
        family = CounterMetricFamily(f"paged:{name}", text, labels=(*LABELS, label))
        for reason, value in values.items():
            family.add_metric((*self._labels, reason), value)
        return family

    def _config(self, stats: EngineStats) -> Metric:
        family = GaugeMetricFamily(
            "paged:cache_config_info", "The KV cache's sizes.", labels=(*LABELS, "block_size", "num_gpu_blocks")
        )
        family.add_metric((*self._labels, str(stats.block_size), str(stats.num_blocks)), 1)
        return family
