"""What Prometheus reads: vLLM's names, types and buckets, with the prefix `paged:`."""

from __future__ import annotations

import functools
import itertools
import operator
import time
from collections import Counter as Counter_
from collections.abc import Iterable, Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client import Histogram as PrometheusHistogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from paged_backend import EngineStats, Histogram, RequestOutput

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
    "request_time_per_output_token_seconds": ("Mean time per token after the first.", _TOKEN_BUCKETS),
    "e2e_request_latency_seconds": ("From the arrival of a request to its end.", _REQUEST_BUCKETS),
    "request_queue_time_seconds": ("From the arrival of a request to its first step.", _REQUEST_BUCKETS),
    "request_inference_time_seconds": ("From the first step of a request to its end.", _REQUEST_BUCKETS),
    "request_prefill_time_seconds": ("From the first step of a request to its first token.", _REQUEST_BUCKETS),
    "request_decode_time_seconds": ("From the first token of a request to its last.", _REQUEST_BUCKETS),
    "request_prompt_tokens": ("Tokens of a prompt.", _COUNT_BUCKETS),
    "request_generation_tokens": ("Tokens generated for a request.", _COUNT_BUCKETS),
    "request_max_num_generation_tokens": ("Tokens of the longest of a request's outputs.", _COUNT_BUCKETS),
    "request_prefill_kv_computed_tokens": ("Tokens of a prompt that were computed.", _COUNT_BUCKETS),
    "request_num_preemptions": ("How often a request was preempted.", _N_BUCKETS),
    "request_params_max_tokens": ("The most tokens that a request's outputs may have.", _COUNT_BUCKETS),
    "request_params_n": ("How many outputs a request asked for.", _N_BUCKETS),
}
_COUNTERS = {
    "prompt_tokens": "Tokens of the prompts of finished requests.",
    "prompt_tokens_cached": "Of these, found in the prefix cache.",
}

_BY_SOURCE = ("local_compute", "local_cache_hit")
_MODES = ("streaming", "non_streaming")
_TOOL_USERS = ("chat_completions", "responses", "other")
_WAITING = ("capacity", "deferred")
"""Why a peer's requests may wait; ours wait for capacity."""
_SLEEP_STATES = ("awake", "weights_offloaded", "discard_all")
"""The peers' words; here a model is loaded or not."""
_ENGINE_COUNTERS = {
    "prefix_cache_queries": ("Prompt tokens looked up.", "num_prefix_queried_tokens"),
    "prefix_cache_hits": ("Prompt tokens found.", "num_prefix_hit_tokens"),
    "num_preemptions": ("Sequences that gave their blocks back.", "num_preemptions"),
    "generation_tokens": ("Tokens generated.", "num_generated_tokens"),
    "spec_decode_num_drafts": ("Times that guesses were checked, one or several at once.", "num_drafts"),
    "spec_decode_num_draft_tokens": ("Guesses checked.", "num_draft_tokens"),
    "spec_decode_num_accepted_tokens": ("Guesses that were right.", "num_accepted_tokens"),
}


class Metrics:
    """Histograms and counters of a model's requests, and its engine's own counters as of the last scrape.

    They go on where they were when the engine is unloaded and loaded again.
    """

    def __init__(self, model_name: str) -> None:
        self.model_name = model_name
        self._labels = (model_name, "0")
        self._registry = CollectorRegistry()
        self._token_seconds = Histogram(_TOKEN_BUCKETS)
        """Our own, since it counts every token of every stream."""
        self._engine = _EngineCollector(self._labels, self._token_seconds)
        self._registry.register(self._engine)
        self._histograms = {
            name: PrometheusHistogram(f"paged:{name}", text, LABELS, registry=self._registry, buckets=buckets).labels(
                *self._labels
            )
            for name, (text, buckets) in _HISTOGRAMS.items()
        }
        self._counters = {name: self._counter(name, text).labels(*self._labels) for name, text in _COUNTERS.items()}
        self._by_source = self._counter(
            "prompt_tokens_by_source",
            "Tokens of the prompts of finished requests, computed or found in the prefix cache.",
            "source",
        )
        for source in _BY_SOURCE:
            self._by_source.labels(*self._labels, source)
        self._cached_by_source = self._counter(
            "prompt_tokens_cached_by_source",
            "Cached tokens of the prompts of finished requests, by where they were found.",
            "source",
        ).labels(*self._labels, "device")
        self._tool_calls = self._counter(
            "tool_call_parser_invocations",
            "Outputs of requests with tools, with and without a call.",
            *("mode", "outcome", "request_type"),
        )
        for labels in itertools.product(_MODES, ("tool_call", "no_tool_call"), _TOOL_USERS):
            self._tool_calls.labels(*self._labels, *labels)
        self._rejections = self._counter(
            "admission_rejections", "Requests refused because the queue was full.", "reason"
        ).labels(*self._labels, "max_num_queued_reqs")

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"paged:{name}", text, (*LABELS, *labels), registry=self._registry)

    def families(self, stats: EngineStats | None) -> Iterator[Metric]:
        """What Prometheus scrapes; `stats` is None if there is no engine to ask."""
        self._engine.stats = stats
        yield from self._registry.collect()

    def keep(self, stats: EngineStats) -> None:
        """Count what an engine has done that is about to be unloaded."""
        self._engine.past.append(stats)

    def rejected(self) -> None:
        self._rejections.inc()

    def observe_tokens(self, seconds: float, num_tokens: int) -> None:
        """So many tokens of a stream have come, so many seconds after each other."""
        self._token_seconds.observe(seconds, num_tokens)

    def tools_considered(self, mode: str, request_type: str, *, has_called: bool) -> None:
        """An output of a request with tools has ended."""
        outcome = "tool_call" if has_called else "no_tool_call"
        self._tool_calls.labels(*self._labels, mode, outcome, request_type).inc()

    def observe(self, output: RequestOutput, nums_output_tokens: Sequence[int], max_tokens: int) -> None:
        """Count a finished request, whose outputs have so many tokens of `max_tokens`; `output` may be the last of its
        deltas."""
        num_cached = output.num_cached_tokens
        num_computed = len(output.prompt_token_ids) - num_cached
        self._histograms["request_params_n"].observe(len(nums_output_tokens))
        self._histograms["request_params_max_tokens"].observe(max_tokens)
        self._histograms["request_max_num_generation_tokens"].observe(max(nums_output_tokens, default=0))
        self._histograms["request_prefill_kv_computed_tokens"].observe(num_computed)
        self._counters["prompt_tokens"].inc(num_computed + num_cached)
        self._counters["prompt_tokens_cached"].inc(num_cached)
        self._cached_by_source.inc(num_cached)
        for source, num_tokens in zip(_BY_SOURCE, (num_computed, num_cached), strict=True):
            self._by_source.labels(*self._labels, source).inc(num_tokens)
        for name, value in _observations(output, sum(nums_output_tokens)):
            self._histograms[name].observe(value)


def exposition(of_each: Iterable[tuple[Metrics, EngineStats | None]]) -> bytes:
    """The text that Prometheus scrapes: each family once, with the samples of all models."""
    merged: dict[str, Metric] = {}
    for metrics, stats in of_each:
        for family in metrics.families(stats):
            merged.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            merged[family.name].samples += family.samples
    return generate_latest(_Families(list(merged.values())))


class _Families(Collector):
    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        yield from self._families


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
    """`EngineStats` as Prometheus' families; counters include those of the engines before. And the times between
    tokens, which the server takes."""

    def __init__(self, labels: tuple[str, ...], token_seconds: Histogram) -> None:
        self._labels = labels
        self._token_seconds = token_seconds
        self.stats: EngineStats | None = None
        self.past: list[EngineStats] = []

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterator[Metric]:
        stats = self.stats
        yield self._histogram(
            "inter_token_latency_seconds", "Between two tokens of a streamed request.", self._token_seconds
        )
        yield self._states("awake" if stats is not None else "discard_all")
        if stats is None and not self.past:
            return
        now = stats or EngineStats()
        yield self._gauge("num_requests_running", "Sequences being computed.", now.num_running)
        yield self._gauge("num_requests_waiting", "Sequences waiting for room.", now.num_waiting)
        yield self._waiting_by_reason(now)
        yield self._loras(now)
        yield self._gauge("kv_cache_usage_perc", "Share of the KV cache's blocks that are held.", now.kv_cache_usage)
        yield self._gauge(
            "kv_waste_ratio", "Slots of held blocks that hold nothing, over all steps.", now.kv_waste_ratio
        )
        for name, (text, field) in _ENGINE_COUNTERS.items():
            yield self._counter(name, text, sum(getattr(each, field) for each in self._all()))
        yield self._accepted_by_position()
        step_tokens = functools.reduce(operator.add, (each.step_tokens for each in self._all()))
        yield self._histogram("iteration_tokens_total", "Tokens that a step computed.", step_tokens)
        yield self._by_reason("request_success", "Finished requests.", "finished_reason", "finished")
        yield self._by_reason("request_failure", "Requests that ended with an error.", "error", "failed")
        if stats is not None:
            yield self._config(stats)

    def _all(self) -> list[EngineStats]:
        return [*self.past, *([] if self.stats is None else [self.stats])]

    def _states(self, current: str) -> Metric:
        family = GaugeMetricFamily(
            "paged:engine_sleep_state", "Whether the model is loaded.", labels=(*LABELS, "sleep_state")
        )
        for state in _SLEEP_STATES:
            family.add_metric((*self._labels, state), float(state == current))
        return family

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"paged:{name}", text, labels=LABELS)
        family.add_metric(self._labels, value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(f"paged:{name}", text, labels=LABELS)
        family.add_metric(self._labels, value)
        return family

    def _histogram(self, name: str, text: str, values: Histogram) -> Metric:
        family = HistogramMetricFamily(f"paged:{name}", text, labels=LABELS)
        bounds = [*map(floatToGoString, values.bounds), "+Inf"]
        buckets = list(zip(bounds, itertools.accumulate(values.counts), strict=True))
        family.add_metric(self._labels, buckets, values.total)
        return family

    def _waiting_by_reason(self, stats: EngineStats) -> Metric:
        family = GaugeMetricFamily(
            "paged:num_requests_waiting_by_reason", "Sequences waiting, by why they do.", labels=(*LABELS, "reason")
        )
        for reason, value in zip(_WAITING, (stats.num_waiting, 0), strict=True):
            family.add_metric((*self._labels, reason), value)
        return family

    def _loras(self, stats: EngineStats) -> Metric:
        names = ("max_lora", "waiting_lora_adapters", "running_lora_adapters")
        family = GaugeMetricFamily(
            "paged:lora_requests_info",
            "LoRA adapters in use, as labels; the value is the time.",
            labels=(*LABELS, *names),
        )
        waiting, running = ",".join(stats.waiting_loras), ",".join(stats.running_loras)
        if stats.max_loras:
            family.add_metric((*self._labels, str(stats.max_loras), waiting, running), time.time())
        return family

    def _accepted_by_position(self) -> Metric:
        family = CounterMetricFamily(
            "paged:spec_decode_num_accepted_tokens_per_pos",
            "Guesses that were right, by their place among those checked at once.",
            labels=(*LABELS, "position"),
        )
        of_each = [each.num_accepted_by_position for each in self._all()]
        for position, values in enumerate(itertools.zip_longest(*of_each, fillvalue=0)):
            family.add_metric((*self._labels, str(position)), sum(values))
        return family

    def _by_reason(self, name: str, text: str, label: str, field: str) -> Metric:
        family = CounterMetricFamily(f"paged:{name}", text, labels=(*LABELS, label))
        values: Counter_[str] = Counter_()
        for stats in self._all():
            values.update(getattr(stats, field))
        for reason, value in values.items():
            family.add_metric((*self._labels, reason), value)
        return family

    def _config(self, stats: EngineStats) -> Metric:
        family = GaugeMetricFamily(
            "paged:cache_config_info", "The KV cache's sizes.", labels=(*LABELS, "block_size", "num_gpu_blocks")
        )
        family.add_metric((*self._labels, str(stats.block_size), str(stats.num_blocks)), 1)
        return family
