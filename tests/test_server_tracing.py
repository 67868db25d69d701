"""Spans of requests, as a collector gets them."""

from __future__ import annotations

import gzip
import http.server
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from helpers import WAIT_SECONDS
from helpers_server import ServerUnderTest, answered, make_models, make_scripted_llm, user
from paged_backend import ConfigError
from paged_backend.server.app import create_app
from paged_backend.server.tracing import Tracing, traces_url
from test_server_errors import failing_after

TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Collector:
    """Takes spans over HTTP, as OpenTelemetry's collector does."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        collector = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                content = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    content = gzip.decompress(content)
                assert self.path == "/v1/traces"
                for resource in ExportTraceServiceRequest.FromString(content).resource_spans:
                    for scope in resource.scope_spans:
                        collector.spans += scope.spans
                self.send_response(200)
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def named(self, name: str) -> list[Any]:
        return [span for span in self.spans if span.name == name]


@pytest.fixture
def collector() -> Iterator[Collector]:
    collector = Collector()
    thread = threading.Thread(target=collector.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    yield collector
    collector.server.shutdown()
    collector.server.server_close()
    thread.join(WAIT_SECONDS)


@pytest.fixture
def tracing(collector: Collector) -> Tracing:
    return Tracing(collector.url)


@pytest.fixture
def server(tracing: Tracing) -> Iterator[ServerUnderTest]:
    llm, runner, sampler = make_scripted_llm()
    sampler.script = [*b"abcdefgh"]
    models = make_models(llm=llm)
    yield ServerUnderTest(llm, runner, sampler, models, create_app(models, tracing))
    tracing.close()
    llm.close()


def attributes_of(span: Any) -> dict[str, Any]:
    return {
        item.key: getattr(item.value, item.value.WhichOneof("value"))
        for item in span.attributes
        if item.value.WhichOneof("value") != "array_value"
    }


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_is_a_span_below_that_of_its_client(
    server: ServerUnderTest, tracing: Tracing, collector: Collector, stream: bool
) -> None:
    body = {"messages": [user("hi")], "max_tokens": 4, "stream": stream, "n": 2}
    async with server.client(headers={"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01"}) as client:
        assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
        await client.get("/health")
    tracing.close()
    (outer,), (inner,) = collector.named("POST /v1/chat/completions"), collector.named("llm_request")
    assert (outer.trace_id.hex(), outer.parent_span_id.hex()) == (TRACE_ID, PARENT_ID)
    assert (inner.trace_id.hex(), inner.parent_span_id) == (TRACE_ID, outer.span_id)
    assert attributes_of(outer)["http.response.status_code"] == 200
    attributes = attributes_of(inner)
    assert (attributes["gen_ai.request.model"], attributes["gen_ai.request.n"]) == ("fake", 2)
    assert attributes["gen_ai.usage.completion_tokens"] == 8 and attributes["gen_ai.usage.prompt_tokens"] > 0
    assert 0 < attributes["gen_ai.latency.time_to_first_token"] <= attributes["gen_ai.latency.e2e"]
    assert [event.name for event in inner.events] == ["scheduled", "first_token"]
    times = [inner.start_time_unix_nano, *(event.time_unix_nano for event in inner.events), inner.end_time_unix_nano]
    assert times == sorted(times)
    assert len(collector.spans) == 2


async def test_each_prompt_of_a_request_has_a_span(
    server: ServerUnderTest, tracing: Tracing, collector: Collector
) -> None:
    await server.complete(["a", "b"], max_tokens=2)
    tracing.close()
    spans = collector.named("llm_request")
    assert len(spans) == 2 and len({attributes_of(span)["gen_ai.request.id"] for span in spans}) == 2


async def test_a_failed_request_is_marked(server: ServerUnderTest, tracing: Tracing, collector: Collector) -> None:
    failing_after(server, 0)
    assert (await server.post("/v1/completions", prompt="hi")).status_code == 500
    assert (await server.post("/v1/completions", prompt="hi", temperature=9)).status_code == 400
    tracing.close()
    spans = {attributes_of(span)["http.response.status_code"]: span for span in collector.spans}
    assert (spans[500].status.code, spans[400].status.code) == (2, 0)


async def test_a_collector_that_is_not_there_harms_nobody() -> None:
    tracing = Tracing("http://127.0.0.1:9")
    llm, _, sampler = make_scripted_llm()
    sampler.script = [*b"ab"]
    models = make_models(llm=llm)
    server = ServerUnderTest(llm, None, sampler, models, create_app(models, tracing))  # type: ignore[arg-type]
    assert answered(await server.post("/v1/completions", prompt="hi", max_tokens=2))["choices"][0]["text"] == "ab"
    llm.close()
    tracing.close()


def test_the_address_of_a_collector_may_be_bare() -> None:
    assert (
        traces_url("http://localhost:4318") == traces_url("http://localhost:4318/") == "http://localhost:4318/v1/traces"
    )
    assert traces_url("https://host/otlp/traces") == "https://host/otlp/traces"
    with pytest.raises(ConfigError, match="otlp_endpoint='localhost:4318'"):
        traces_url("localhost:4318")
