"""What is refused, how that is said, and that it harms nobody else."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest

from helpers import SchedulerOutput, StepFailure
from helpers_server import JSON, ServerUnderTest, events_of, make_models, make_scripted_llm, make_server, refusal, user
from paged_backend import LLM, ConfigError
from paged_backend.server.app import create_app
from paged_backend.server.errors import encode_in_pieces, encode_json
from paged_backend.server.settings import ServerSettings

GENERATING = ("/v1/completions", "/v1/chat/completions")
KEYS = ("first key", "zwölf")
ROUTES = (
    *(("POST", path) for path in (*GENERATING, "/tokenize", "/detokenize")),
    *(("GET", path) for path in ("/v1/models", "/v1/models/fake", "/metrics", "/version", "/openapi.json", "/nope")),
)


@pytest.fixture(scope="module")
def one_server() -> Iterator[ServerUnderTest]:
    server = make_server(max_body_bytes=10_000, served_model_names=("fake", "the/alias"))
    yield server
    server.serving.close()


@pytest.fixture
def server(one_server: ServerUnderTest) -> ServerUnderTest:
    one_server.sampler.script = [*b"abcdefgh"]
    one_server.runner.on_step = lambda output: None
    return one_server


BAD_VALUES: list[tuple[str, Any]] = [
    *(("logit_bias", bias) for bias in ({"49152": 5}, {"-1": 5}, {"abc": 1}, {"5": 1000}, {"5": float("nan")}, [1])),
    *(("seed", seed) for seed in (2**64, -(2**63) - 1, "7", 1.5)),
    *(("top_k", k) for k in (0.5, -2)),
    *(("max_tokens", value) for value in (-1, "5", 1.5, True)),
    *(("n", n) for n in (0, 10**6)),
    *(("repetition_penalty", value) for value in (0, float("inf"))),
    *(("temperature", value) for value in (-1, float("nan"), 2.1, "hot")),
    *(("stop", value) for value in ([1], [""], 5, {}, ["x"] * 1000)),
    *(("structured_outputs", value) for value in ({}, {"json": {"$ref": "#"}})),
    *(("top_p", value) for value in (0, 1.1)),
    *(("stop_token_ids", value) for value in ([99999], ["a"], 3)),
    ("min_tokens", 100),
    ("allowed_token_ids", []),
    ("stream", "yes"),
    ("priority", "high"),
    ("cache_salt", ""),
]


@pytest.mark.parametrize("path", GENERATING)
@pytest.mark.parametrize(("field", "value"), BAD_VALUES)
async def test_a_bad_value_is_a_400_that_names_the_field(
    server: ServerUnderTest, path: str, field: str, value: Any
) -> None:
    error = refusal(await server.post(path, **body_for(path) | {"max_tokens": 5, field: value}))
    assert (error["param"], error["code"]) == (field, "invalid_value") and field in error["message"]


async def test_a_bad_request_leaves_its_neighbours_alone(server: ServerUnderTest) -> None:
    good, bad, also_good = await asyncio.gather(
        server.complete("one", max_tokens=30),
        server.post("/v1/completions", prompt="two", logit_bias={"49152": 5}),
        server.complete("three", max_tokens=30),
    )
    refusal(bad)
    assert good["choices"][0]["text"] == also_good["choices"][0]["text"] == ("abcdefgh" * 4)[:30]


@pytest.mark.parametrize("field", ["logprobs", "top_logprobs"])
async def test_more_logprobs_than_the_engine_gives_are_refused(server: ServerUnderTest, field: str) -> None:
    path = GENERATING[field == "top_logprobs"]
    fields = {"logprobs": True, field: 10**6} if field == "top_logprobs" else {field: 10**6}
    assert "max_logprobs" in refusal(await server.post(path, **body_for(path), **fields))["message"]


@pytest.mark.parametrize("path", GENERATING)
@pytest.mark.parametrize(
    "content",
    [b'{"broken', b"[]", b'"x"', b"null", b"", b"\xff", b'{"prompt": "\xff"}', b"[" * 5000, b'{"prompt": 1e999}'],
)
async def test_a_body_that_is_no_object_is_a_400(server: ServerUnderTest, path: str, content: bytes) -> None:
    async with server.client(headers=JSON) as client:
        refusal(await client.post(path, content=content))


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b'{"broken', "no JSON"),
        (b"[]", "must be a JSON object"),
        (b"null", "must be a JSON object"),
        (b'{"prompt": "\xff"}', "not UTF-8"),
        (b"[" * 5000, "nested too deeply"),
        (b'{"seed": ' + b"9" * 5000 + b"}", "too many digits"),
    ],
)
async def test_a_body_that_cannot_be_read_is_told_why(server: ServerUnderTest, content: bytes, reason: str) -> None:
    async with server.client(headers=JSON) as client:
        assert reason in refusal(await client.post("/v1/completions", content=content))["message"]


@pytest.mark.parametrize("headers", [{"Content-Type": "text/plain"}, {}])
async def test_a_body_that_is_not_called_json_is_told_how_to_be(
    server: ServerUnderTest, headers: dict[str, str]
) -> None:
    async with server.client(headers=headers) as client:
        error = refusal(await client.post("/v1/completions", content=b'{"prompt": "hi"}'))
    assert "application/json" in error["message"] and error["code"] == "invalid_content_type"


_DEEP: Any = json.loads('{"a":' * 300 + "1" + "}" * 300)
_DEEP_SCHEMA = {"type": "object", "properties": _DEEP}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"structured_outputs": {"json": _DEEP_SCHEMA}}),
        ("/v1/chat/completions", {"tools": [{"type": "function", "function": {"name": "f", "parameters": _DEEP}}]}),
        ("/v1/chat/completions", {"chat_template_kwargs": _DEEP}),
        ("/v1/responses", {"chat_template_kwargs": _DEEP}),
        ("/v1/responses", {"tools": [{"type": "function", "name": "f", "parameters": _DEEP_SCHEMA}]}),
        ("/v1/responses", {"text": {"format": {"type": "json_schema", "name": "s", "schema": _DEEP_SCHEMA}}}),
        ("/v1/messages", {"tools": [{"name": "f", "input_schema": _DEEP_SCHEMA}], "max_tokens": 1}),
        ("/v1/messages/count_tokens", {"tools": [{"name": "f", "input_schema": _DEEP_SCHEMA}]}),
        ("/tokenize", {"chat_template_kwargs": _DEEP}),
    ],
)
async def test_deep_nesting_is_never_our_mistake(server: ServerUnderTest, path: str, body: dict[str, Any]) -> None:
    asked = {"input": "hi"} if path == "/v1/responses" else {"messages": [user("hi")]}
    assert (await server.post(path, **asked, **body)).status_code in (200, 400)


async def test_a_wrong_path_or_method_is_named(server: ServerUnderTest) -> None:
    assert "/v1/nothing" in refusal(await server.get("/v1/nothing"), 404)["message"]
    response = await server.get("/v1/completions")
    assert "POST" in refusal(response, 405)["message"] and response.headers["allow"] == "POST"


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/batches"])
async def test_anthropics_clients_are_told_in_anthropics_shape(server: ServerUnderTest, path: str) -> None:
    error = (await server.get(path)).json()
    assert error["type"] == "error" and set(error["error"]) == {"type", "message"}


@pytest.mark.parametrize(
    "extra",
    [{"tools": []}, {"add_generation_prompt": True}, {"continue_final_message": True}, {"chat_template_kwargs": {}}],
)
async def test_a_plain_text_is_not_tokenised_with_what_is_for_chats(
    server: ServerUnderTest, extra: dict[str, Any]
) -> None:
    assert refusal(await server.post("/tokenize", prompt="hi", **extra))["param"] == next(iter(extra))


@pytest.mark.parametrize("text", ["\ud83d", "a\udc00b"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_lone_surrogate_is_a_400_wherever_it_is(server: ServerUnderTest, text: str, stream: bool) -> None:
    refusal(await server.post("/v1/completions", prompt=text, stream=stream))
    refusal(await server.post("/tokenize", prompt=text))
    assert (await server.post("/v1/completions", prompt="a", model=text)).status_code in (400, 404)


@pytest.mark.parametrize("path", GENERATING)
async def test_what_is_far_too_long_is_refused_before_it_is_tokenised(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = make_server(max_body_bytes=10**8)
    monkeypatch.setattr(server.llm.tokenizer, "encode", None)
    text = "x" * 5_000_000
    body = {"prompt": text} if path == "/v1/completions" else {"messages": [user(text)]}
    error = refusal(await server.post(path, **body))
    assert error["code"] == "context_length_exceeded" and "max_model_len=2048" in error["message"]
    server.serving.close()


async def test_nul_is_text(server: ServerUnderTest) -> None:
    assert (await server.complete("a\0b", max_tokens=1, echo=True))["choices"][0]["text"] == "a\0ba"


@pytest.mark.parametrize("announced", [True, False])
async def test_a_body_that_is_too_large_is_a_413(server: ServerUnderTest, announced: bool) -> None:
    async def parts() -> Any:
        for _ in range(20):
            yield b" " * 1000

    content = b" " * 20_000 if announced else parts()
    async with server.client(headers=JSON) as client:
        assert "max_body_bytes=10000" in refusal(await client.post("/v1/completions", content=content), 413)["message"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", GENERATING)
async def test_an_unknown_model_is_a_404(server: ServerUnderTest, path: str, stream: bool) -> None:
    error = refusal(await server.post(path, **body_for(path), model="nope", stream=stream), 404)
    assert (error["code"], error["param"]) == ("model_not_found", "model")


async def test_every_served_name_is_a_model(server: ServerUnderTest) -> None:
    listed = json.loads((await server.get("/v1/models")).content)
    assert json.loads((await server.get("/v1/models/")).content) == listed
    assert (listed["object"], [model["id"] for model in listed["data"]]) == ("list", ["fake", "the/alias"])
    for model in listed["data"]:
        assert model["object"] == "model" and isinstance(model["created"], int) and model["owned_by"]
        assert json.loads((await server.get(f"/v1/models/{model['id']}")).content) == model
        assert (await server.complete(model=model["id"], max_tokens=1))["model"] == model["id"]
    assert (await server.complete(max_tokens=1))["model"] == "fake"
    assert refusal(await server.get("/v1/models/nope"), 404)["code"] == "model_not_found"


@pytest.mark.parametrize("path", GENERATING)
async def test_what_fails_in_a_stream_is_its_last_event(server: ServerUnderTest, path: str) -> None:
    failing_after(server, 3)
    response = await server.post(path, **body_for(path), stream=True, max_tokens=50)
    *others, last = map(json.loads, events_of(response.text))
    assert response.status_code == 200 and others != [] and all("choices" in event for event in others)
    assert last["error"]["code"] == "engine_error" and last["error"]["type"] == "server_error"


@pytest.mark.parametrize("stream", [False, True])
async def test_what_fails_before_a_stream_is_an_answer(server: ServerUnderTest, stream: bool) -> None:
    failing_after(server, 0)
    response = await server.post("/v1/completions", prompt="hi", stream=stream)
    assert refusal(response, 500)["code"] == "engine_error"


async def test_nobody_is_told_of_our_mistakes(server: ServerUnderTest, monkeypatch: pytest.MonkeyPatch) -> None:
    def secret(*args: Any, **kwargs: Any) -> None:
        raise ValueError("secret")

    monkeypatch.setattr(server.llm.tokenizer, "encode", secret)
    assert "secret" not in refusal(await server.post("/tokenize", prompt="hi"), 500)["message"]


async def test_a_full_queue_is_a_429_that_says_when_to_come_back() -> None:
    server = make_server(engine={"max_num_queued_reqs": 2})
    response = await server.post("/v1/completions", prompt=["a", "b", "c"])
    assert (refusal(response, 429)["code"], response.headers["retry-after"]) == ("queue_full", "1")
    assert (await server.complete(["a", "b"], max_tokens=1))["choices"]
    metrics = (await server.get("/metrics")).text
    assert 'paged:admission_rejections_total{engine="0",model_name="fake",reason="max_num_queued_reqs"} 1.0' in metrics
    server.serving.close()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_that_takes_too_long_is_a_504(stream: bool) -> None:
    server = make_server(request_timeout=0.05, engine={"max_num_seqs": 1})
    release = asyncio.Event()
    loop = asyncio.get_running_loop()
    server.runner.on_step = lambda output: asyncio.run_coroutine_threadsafe(release.wait(), loop).result(10)
    long = "a" * 200  # of more than one step, so that there is no token yet when its time is over
    waiting = asyncio.create_task(server.post("/v1/completions", prompt=long, stream=stream))
    await asyncio.sleep(0.1)
    release.set()
    assert refusal(await waiting, 504)["code"] == "request_timeout"
    server.serving.close()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_closed_engine_is_a_503(stream: bool) -> None:
    server = make_server()
    server.llm.close()
    assert refusal(await server.post("/v1/completions", prompt="a", stream=stream), 503)["code"] == "engine_dead"
    assert refusal(await server.get("/health"), 503)["code"] == "engine_dead"
    refusal(await server.get("/ready"), 503)


async def test_while_the_model_is_loaded_everything_but_that_answers() -> None:
    llm, runner, sampler = make_scripted_llm()
    models = make_models(make=lambda: llm)
    server = ServerUnderTest(llm, runner, sampler, models, create_app(models))
    response = await server.post("/v1/completions", prompt="a")
    assert (refusal(response, 503)["code"], response.headers["retry-after"]) == ("loading", "1")
    refusal(await server.get("/ready"), 503)
    assert (await server.get("/version")).status_code == 200
    assert (await server.get("/metrics")).status_code == 200
    await models.start()
    assert (await server.get("/ready")).status_code == 200
    assert (await server.complete(max_tokens=1))["choices"]
    await models.close()


async def test_an_error_of_loading_is_raised() -> None:
    def make() -> LLM:
        raise ConfigError("no such model")

    with pytest.raises(ConfigError, match="no such model"):
        await make_models(make=make).start()


async def test_while_draining_new_requests_are_told_so() -> None:
    server = make_server()
    server.models.is_draining = True
    response = await server.post("/v1/completions", prompt="a")
    assert (refusal(response, 503)["code"], response.headers["retry-after"]) == ("draining", "1")
    refusal(await server.get("/ready"), 503)
    assert (await server.get("/health")).status_code == 200
    assert (await server.get("/metrics")).status_code == 200
    server.serving.close()


@pytest.fixture(scope="module")
def locked() -> Iterator[ServerUnderTest]:
    server = make_server(api_keys=KEYS)
    yield server
    server.serving.close()


BAD_KEYS: list[dict[str, Any]] = [
    {},
    *({"Authorization": value} for value in ("", "Bearer", "Bearer ", "Bearer wrong", "Basic first key", "first key")),
    {"Authorization": "Bearer \xff\xfe".encode("latin-1")},
    {"Authorization": "Bearer first key and more"},
    {"X-Api-Key": "wrong"},
]


@pytest.mark.parametrize(("method", "path"), ROUTES)
async def test_every_route_needs_a_key(locked: ServerUnderTest, method: str, path: str) -> None:
    async with locked.client() as client:
        for headers in BAD_KEYS:
            error = refusal(await client.request(method, path, headers=headers), 401)
            assert (error["code"], error["type"]) == ("invalid_api_key", "authentication_error")


@pytest.mark.parametrize("path", ["/health", "/ready"])
async def test_load_balancers_need_none(locked: ServerUnderTest, path: str) -> None:
    assert (await locked.get(path)).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"Authorization": "Bearer first key"},
        {"Authorization": "bearer first key"},
        {"Authorization": "Bearer   first key "},
        {"Authorization": "Bearer zwölf".encode()},
        {"X-Api-Key": "first key"},
    ],
)
async def test_any_of_the_keys_will_do(locked: ServerUnderTest, headers: dict[str, Any]) -> None:
    assert (await locked.get("/v1/models", headers=headers)).status_code == 200


async def test_pages_from_elsewhere_are_let_in_only_if_named() -> None:
    server = make_server(cors_origins=("https://page.example",), api_keys=("key",))
    asking = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    async with server.client() as client:
        for origin, allowed in (("https://page.example", "https://page.example"), ("https://other.example", None)):
            response = await client.options("/v1/chat/completions", headers={"Origin": origin, **asking})
            assert response.headers.get("access-control-allow-origin") == allowed
    server.serving.close()


def test_long_lists_are_the_same_json_in_pieces() -> None:
    content = {"a": list(range(10_000)), "b": ['é"', None, [1, 2]] * 3000, "c": [], "d": 1, "e": None, 'f"': {"g": [1]}}
    assert encode_in_pieces(content) == encode_json(content)


@pytest.mark.parametrize(
    "settings",
    [
        {"port": 70000},
        {"max_body_bytes": 0},
        {"request_timeout": -1.0},
        {"ssl_keyfile": "key.pem"},
        {"api_keys": ("",)},
        {"log_level": "loud"},
    ],
)
def test_impossible_settings_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(settings)) if "api_keys" not in settings else "API key"):
        ServerSettings(**settings)


def body_for(path: str) -> dict[str, Any]:
    return {"prompt": "hi"} if path == "/v1/completions" else {"messages": [user("hi")]}


def failing_after(server: ServerUnderTest, num_steps: int) -> None:
    left = num_steps

    def fail(output: SchedulerOutput) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise StepFailure("on purpose")

    server.runner.on_step = fail
