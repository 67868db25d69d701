"""What Prometheus reads."""

from __future__ import annotations

import json
import re
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from helpers_server import ServerUnderTest, make_server, user

# Peers' names and types; dashboards made for them work once the prefix is replaced.
GAUGES = (
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_perc",
    "cache_config_info",
    "kv_waste_ratio",
    "engine_sleep_state",
    "num_requests_waiting_by_reason",
    "lora_requests_info",
)
COUNTERS = (
    *("prompt_tokens", "generation_tokens", "prompt_tokens_cached", "prefix_cache_queries", "prefix_cache_hits"),
    *("spec_decode_num_drafts", "spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens"),
    "spec_decode_num_accepted_tokens_per_pos",
    *("prompt_tokens_by_source", "prompt_tokens_cached_by_source", "tool_call_parser_invocations"),
    *("num_preemptions", "request_success", "admission_rejections", "request_failure"),
)
HISTOGRAMS = (
    *("time_to_first_token_seconds", "inter_token_latency_seconds", "request_time_per_output_token_seconds"),
    *("e2e_request_latency_seconds", "request_queue_time_seconds", "request_inference_time_seconds"),
    *("request_prefill_time_seconds", "request_decode_time_seconds", "request_prompt_tokens"),
    *("request_generation_tokens", "request_num_preemptions", "request_params_n"),
    *("request_max_num_generation_tokens", "request_prefill_kv_computed_tokens"),
    *("request_params_max_tokens", "iteration_tokens_total"),
)
LABELS = {
    "num_requests_waiting_by_reason": {"reason": {"capacity", "deferred"}},
    "engine_sleep_state": {"sleep_state": {"awake", "weights_offloaded", "discard_all"}},
    "prompt_tokens_by_source": {"source": {"local_compute", "local_cache_hit"}},
    "prompt_tokens_cached_by_source": {"source": {"device"}},
    "admission_rejections": {"reason": {"max_num_queued_reqs"}},
    "request_success": {"finished_reason": {"length"}},
    "tool_call_parser_invocations": {
        "mode": {"streaming", "non_streaming"},
        "outcome": {"tool_call", "no_tool_call"},
        "request_type": {"chat_completions", "responses", "other"},
    },
}
"""Of families with labels besides the model's and the engine's, after a request."""
SECONDS = [0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680]
TOKENS = [step * 10**power for power in range(6) for step in (1, 2, 5)]
PER_TOKEN = [0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80]
BUCKETS = {
    "time_to_first_token_seconds": [
        *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
        *(1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560),
    ],
    "inter_token_latency_seconds": PER_TOKEN,
    "request_time_per_output_token_seconds": PER_TOKEN,
    **{
        f"{name}_seconds": SECONDS
        for name in (
            *("e2e_request_latency", "request_queue_time", "request_inference_time"),
            *("request_prefill_time", "request_decode_time"),
        )
    },
    **{
        f"request_{name}_tokens": TOKENS
        for name in ("prompt", "generation", "max_num_generation", "params_max", "prefill_kv_computed")
    },
    "request_params_n": [1, 2, 5, 10, 20],
    "request_num_preemptions": [1, 2, 5, 10, 20],
    "iteration_tokens_total": [1, *(8 << power for power in range(12))],
}


@pytest.fixture
def server() -> Iterator[ServerUnderTest]:
    server = make_server()
    server.sampler.script = [*b"abcdefgh"]
    yield server
    server.serving.close()


async def metrics_of(server: ServerUnderTest) -> dict[str, float]:
    """Samples by their name and, where it has one, their own label."""
    text = (await server.get("/metrics")).text
    values = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = {key: value for key, value in sample.labels.items() if key not in ("model_name", "engine")}
            assert sample.labels["model_name"] == "fake" and sample.labels["engine"] == "0"
            own = "".join(f"[{value}]" for value in labels.values())
            values[sample.name.removeprefix("paged:") + own] = sample.value
    return values


async def test_names_and_types_are_the_peers(server: ServerUnderTest) -> None:
    families = text_string_to_metric_families((await server.get("/metrics")).text)
    types = {family.name.removeprefix("paged:"): family.type for family in families if "_created" not in family.name}
    expected = {
        name: kind
        for names, kind in ((GAUGES, "gauge"), (COUNTERS, "counter"), (HISTOGRAMS, "histogram"))
        for name in names
    }
    assert types == expected


async def families_of(server: ServerUnderTest) -> dict[str, Metric]:
    families = text_string_to_metric_families((await server.get("/metrics")).text)
    return {family.name.removeprefix("paged:"): family for family in families}


async def test_buckets_are_the_peers(server: ServerUnderTest) -> None:
    await server.complete(max_tokens=2)
    families = await families_of(server)
    bounds = {
        name: [float(sample.labels["le"]) for sample in families[name].samples if "le" in sample.labels]
        for name in HISTOGRAMS
    }
    assert bounds == {name: [*expected, float("inf")] for name, expected in BUCKETS.items()}


async def test_labels_are_the_peers(server: ServerUnderTest) -> None:
    await server.complete(max_tokens=2)
    labels = {}
    for name, family in (await families_of(server)).items():
        values = defaultdict[str, set[str]](set)
        for sample in family.samples:
            for label, value in sample.labels.items():
                if label not in ("model_name", "engine", "le"):
                    values[label].add(value)
        if values and not name.endswith("_created") and name != "cache_config_info":
            labels[name] = values
    assert labels == LABELS


async def test_steps_are_counted_by_their_tokens(server: ServerUnderTest) -> None:
    await server.complete("x" * 100, max_tokens=4)  # in chunks of 64 tokens at most, then one by one
    values = await metrics_of(server)
    assert values["iteration_tokens_total_count"] == 2 + 3
    assert values["iteration_tokens_total_sum"] == 100 + 3
    counts = {key: value for key, value in values.items() if key.startswith("iteration_tokens_total_bucket")}
    assert counts["iteration_tokens_total_bucket[1.0]"] == 3
    assert counts["iteration_tokens_total_bucket[64.0]"] == counts["iteration_tokens_total_bucket[+Inf]"] == 5


async def test_every_token_of_a_stream_is_timed_once(server: ServerUnderTest) -> None:
    server.runner.on_step = lambda output: time.sleep(0.02)
    await server.chunks("/v1/completions", prompt="hi", max_tokens=6, n=2)
    values = await metrics_of(server)
    assert values["inter_token_latency_seconds_count"] == 2 * 5
    assert 0.1 < values["inter_token_latency_seconds_sum"] < 5
    assert values["inter_token_latency_seconds_bucket[0.01]"] <= 2


async def test_most_tokens_are_those_asked_for_or_what_there_is_room_for(server: ServerUnderTest) -> None:
    await server.complete("hi", max_tokens=3)
    await server.complete("hi", max_tokens=None, stop="c")
    assert (await metrics_of(server))["request_params_max_tokens_sum"] == 3 + 16
    await server.chat("hi", stop="c")  # a chat without parameters runs to the model's end
    assert (await metrics_of(server))["request_params_max_tokens_sum"] > 1000


async def test_guesses_are_counted_by_their_place() -> None:
    server = make_server(engine={"speculative_config": {"method": "ngram", "prompt_lookup_min": 1}})
    server.sampler.script = [*b"abcdefgh"]
    await server.complete("abcdefghabcdefgh", max_tokens=40)
    values = await metrics_of(server)
    positions = {key: value for key, value in values.items() if "per_pos" in key}
    accepted = values["spec_decode_num_accepted_tokens_total"]
    assert sum(positions.values()) == accepted > 20
    by_place = [positions[f"spec_decode_num_accepted_tokens_per_pos_total[{index}]"] for index in range(len(positions))]
    assert by_place == sorted(by_place, reverse=True) and len(by_place) > 1
    assert by_place[0] <= values["spec_decode_num_drafts_total"] <= values["spec_decode_num_draft_tokens_total"]
    server.serving.close()


@pytest.mark.parametrize("stream", [False, True])
async def test_every_request_is_counted_once(server: ServerUnderTest, stream: bool) -> None:
    server.runner.on_step = lambda output: time.sleep(0.005)
    for _ in range(2):
        await server.post("/v1/completions", prompt=["hello world", "hello there"], n=2, max_tokens=5, stream=stream)
    await server.post("/v1/chat/completions", messages=[user("hi")], max_tokens=3, stream=stream)
    values = await metrics_of(server)
    assert values["request_success_total[length]"] == 5
    assert values["generation_tokens_total"] == 2 * 2 * 2 * 5 + 3
    assert values["request_generation_tokens_sum"] == values["generation_tokens_total"]
    assert values["prompt_tokens_total"] == values["request_prompt_tokens_sum"] == 4 * 11 + 20
    assert values["request_max_num_generation_tokens_sum"] == 2 * 2 * 5 + 3
    assert values["prompt_tokens_by_source_total[local_cache_hit]"] == values["prompt_tokens_cached_total"]
    computed = values["prompt_tokens_by_source_total[local_compute]"]
    assert computed == values["request_prefill_kv_computed_tokens_sum"]
    assert computed + values["prompt_tokens_cached_total"] == values["prompt_tokens_total"]
    assert values["prompt_tokens_cached_total"] == values["prefix_cache_hits_total"] > 0
    for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds"):
        assert values[f"{name}_count"] == 5
    assert values["request_params_n_sum"] == 4 * 2 + 1
    assert (values["inter_token_latency_seconds_count"] > 0) == stream
    assert values["num_requests_running"] == values["num_requests_waiting"] == values["kv_cache_usage_perc"] == 0


async def test_a_refused_request_is_not_counted(server: ServerUnderTest) -> None:
    await server.post("/v1/completions", prompt="hi", temperature=9)
    values = await metrics_of(server)
    assert values["prompt_tokens_total"] == values["e2e_request_latency_seconds_count"] == 0


async def test_the_dashboard_shows_metrics_that_there_are(server: ServerUnderTest) -> None:
    dashboard = json.loads((Path(__file__).parents[1] / "docs" / "grafana-dashboard.json").read_text())
    texts = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    texts += [json.dumps(variable) for variable in dashboard["templating"]["list"]]
    await server.complete(max_tokens=2)
    await server.post("/v1/completions", prompt="x" * 5000)
    families = list(text_string_to_metric_families((await server.get("/metrics")).text))
    samples = {sample.name: sample.labels for family in families for sample in family.samples}
    samples |= {f"{family.name}_total": {} for family in families if family.type == "counter"}
    shown = {name for text in texts for name in re.findall(r"paged:\w+", text)}
    assert len(shown) > 12 and shown <= set(samples), shown - set(samples)
    panels = [panel["gridPos"] for panel in dashboard["panels"]]
    assert len({(place["x"], place["y"]) for place in panels}) == len(panels)
    for text in texts:
        for name, label, _ in re.findall(r"(paged:\w+)\{(\w+)(=~?)", text):
            assert label == "model_name" and (not samples[name] or label in samples[name])
