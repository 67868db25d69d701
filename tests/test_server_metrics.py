"""What Prometheus reads."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
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
)
COUNTERS = (
    *("prompt_tokens", "generation_tokens", "prompt_tokens_cached", "prefix_cache_queries", "prefix_cache_hits"),
    *("spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens"),
    "prompt_tokens_by_source",
    *("num_preemptions", "request_success", "admission_rejections", "request_failure"),
)
HISTOGRAMS = (
    *("time_to_first_token_seconds", "inter_token_latency_seconds", "request_time_per_output_token_seconds"),
    *("e2e_request_latency_seconds", "request_queue_time_seconds", "request_inference_time_seconds"),
    *("request_prefill_time_seconds", "request_decode_time_seconds", "request_prompt_tokens"),
    *("request_generation_tokens", "request_num_preemptions", "request_params_n"),
    *("request_max_num_generation_tokens", "request_prefill_kv_computed_tokens"),
)


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
