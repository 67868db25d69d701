"""Several models in one server: loaded when they are asked for, unloaded when nobody does or others need their room."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest

from helpers import WAIT_SECONDS, FakeRunner
from helpers_server import JSON, answered, events_of, make_scripted_llm, refusal, user
from paged_backend import LLM, ConfigError, EngineConfig, ModelError
from paged_backend.server.app import create_app
from paged_backend.server.memory import num_bytes_needed
from paged_backend.server.models import Models
from paged_backend.server.replies import ModelList
from paged_backend.server.serving import Serving
from paged_backend.server.settings import ServerSettings
from paged_backend.server.throughput_log import log_when_busy

SCRIPTS = {"a": b"aaaa", "b": b"bbbb", "c": b"cccc"}
PATH = "/v1/completions"


class Garage:
    """A machine with room for so many models, and a server of the models `a`, `b` and `c`."""

    def __init__(self, *, room: int = 3, tells_room: bool = True, **settings: Any) -> None:
        self.num_loads = dict.fromkeys(SCRIPTS, 0)
        self.loaded: dict[str, LLM] = {}
        self.runners: dict[str, FakeRunner] = {}
        self.may_load = threading.Event()
        self.may_load.set()
        self.error: Exception | None = None
        self.on_step: Callable[[Any], object] = lambda output: None
        self._room = room
        checked = ServerSettings(**settings)
        servings = [
            Serving(
                checked,
                model=f"model-{name}",
                names=(name,),
                make=lambda name=name: self._make(name),  # type: ignore[misc]
                num_bytes_needed=lambda: 1 if tells_room else 0,
            )
            for name in SCRIPTS
        ]
        self.models = Models(checked, servings, free_memory=self._free_memory)
        self.app = create_app(self.models)

    def is_loaded(self, name: str) -> bool:
        return name in self.loaded and not self.loaded[name].is_closed

    @contextlib.asynccontextmanager
    async def client(self) -> AsyncIterator[httpx.AsyncClient]:
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            yield client
        await self.models.close()

    async def ask(self, client: httpx.AsyncClient, name: str, **body: Any) -> httpx.Response:
        content = json.dumps({"model": name, "prompt": "hi", "max_tokens": 4} | body)
        return await asyncio.wait_for(client.post(PATH, content=content, headers=JSON), WAIT_SECONDS)

    def _free_memory(self) -> int:
        return self._room - sum(map(self.is_loaded, self.loaded))

    def _make(self, name: str) -> LLM:
        assert self.may_load.wait(WAIT_SECONDS)
        if self.error is not None:
            raise self.error
        if self._free_memory() < 1:
            raise ConfigError("a KV cache does not fit in the memory that is free")
        self.num_loads[name] += 1
        self.loaded[name], runner, sampler = make_scripted_llm()
        sampler.script, runner.on_step = [*SCRIPTS[name]], lambda output: self.on_step(output)
        return self.loaded[name]


def text_of(response: httpx.Response) -> str:
    return str(answered(response)["choices"][0]["text"])


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_SECONDS):
        while not condition():
            await asyncio.sleep(0.005)


async def test_each_model_is_loaded_once_when_it_is_asked_for() -> None:
    garage = Garage()
    async with garage.client() as client:
        assert (await client.get("/ready")).status_code == (await client.get("/health")).status_code == 200
        assert garage.loaded == {}
        answers = await asyncio.gather(*(garage.ask(client, name) for name in "abababab"))
        assert [text_of(answer) for answer in answers] == ["aaaa", "bbbb"] * 4
        assert garage.num_loads == {"a": 1, "b": 1, "c": 0}
        assert answered(await client.post(PATH, json={"prompt": "hi", "max_tokens": 1}))["model"] == "a"
        chat = await client.post("/v1/chat/completions", json={"model": "b", "messages": [user("hi")], "max_tokens": 4})
        assert answered(chat)["choices"][0]["message"]["content"] == "bbbb"


async def test_all_models_are_listed_and_others_are_not_known() -> None:
    garage = Garage()
    async with garage.client() as client:
        listed = answered(await client.get("/v1/models"))["data"]
        assert [(model["id"], model["max_model_len"]) for model in listed] == [("a", None), ("b", None), ("c", None)]
        assert ModelList.model_validate({"object": "list", "data": listed})  # as the OpenAPI document says
        await garage.ask(client, "b")
        assert answered(await client.get("/v1/models/b"))["max_model_len"] == 2048
        error = refusal(await garage.ask(client, "model-a"), 404)
        assert error["code"] == "model_not_found" and "a, b, c" in error["message"]


@pytest.mark.parametrize("tells_room", [True, False], ids=["known_before", "found_out_by_loading"])
async def test_the_least_recently_used_model_makes_room(tells_room: bool) -> None:
    garage = Garage(room=2, tells_room=tells_room)
    async with garage.client() as client:
        for name in ("a", "b", "a", "c"):
            assert text_of(await garage.ask(client, name)) == SCRIPTS[name].decode()
        assert (garage.is_loaded("a"), garage.is_loaded("b"), garage.is_loaded("c")) == (True, False, True)
        assert text_of(await garage.ask(client, "b")) == "bbbb"
        assert garage.num_loads == {"a": 1, "b": 2, "c": 1} and not garage.is_loaded("a")


async def test_a_model_in_use_finishes_before_it_makes_room() -> None:
    garage = Garage(room=1)
    garage.on_step = lambda output: time.sleep(0.005)
    async with garage.client() as client:
        await garage.ask(client, "a")
        long = asyncio.create_task(garage.ask(client, "a", max_tokens=60, stream=True))
        await until(lambda: garage.models.find("a").num_users == 1)
        other = asyncio.create_task(garage.ask(client, "b"))
        await until(lambda: garage.models.find("a").is_leaving)
        again = asyncio.create_task(garage.ask(client, "a"))
        assert text_of(await other) == "bbbb" and text_of(await again) == "aaaa"
        *events, done = events_of((await long).text)
        assert "".join(json.loads(event)["choices"][0]["text"] for event in events) == "a" * 60 and done == "[DONE]"
        assert garage.num_loads == {"a": 2, "b": 1, "c": 0}


async def test_requests_for_more_models_than_fit_are_all_answered() -> None:
    garage = Garage(room=1)
    async with garage.client() as client:
        names = "abcabcbca" * 3
        answers = await asyncio.gather(*(garage.ask(client, name) for name in names))
        assert [text_of(answer) for answer in answers] == [SCRIPTS[name].decode() for name in names]
        assert all(serving.num_users == 0 for serving in garage.models.servings)


async def test_a_model_that_stays_in_use_is_a_503_for_the_other() -> None:
    garage = Garage(room=1, model_unload_timeout=0.05)
    release = threading.Event()
    garage.on_step = lambda output: release.wait(WAIT_SECONDS)
    async with garage.client() as client:
        busy = asyncio.create_task(garage.ask(client, "a"))
        await until(lambda: garage.models.find("a").num_users == 1)
        refused = await garage.ask(client, "b")
        assert (refusal(refused, 503)["code"], refused.headers["retry-after"]) == ("model_not_loaded", "1")
        release.set()
        assert text_of(await busy) == "aaaa"
        assert text_of(await garage.ask(client, "b")) == "bbbb"


async def test_an_idle_model_is_unloaded_and_its_counters_go_on() -> None:
    garage = Garage(model_idle_timeout=0.05)
    async with garage.client() as client:
        unloading = asyncio.create_task(garage.models.unload_idle())
        for number in (1, 2):
            assert text_of(await garage.ask(client, "a")) == "aaaa"
            await until(lambda: not garage.is_loaded("a") and not garage.models.find("a").is_loaded)
            metrics = (await client.get("/metrics")).text
            assert f'paged:generation_tokens_total{{engine="0",model_name="a"}} {4 * number}.0' in metrics
            assert (
                f'paged:request_success_total{{engine="0",finished_reason="length",model_name="a"}} {number}.0'
                in metrics
            )
            assert 'engine_sleep_state{engine="0",model_name="a",sleep_state="discard_all"} 1.0' in metrics
            assert (await client.get("/health")).status_code == (await client.get("/ready")).status_code == 200
        assert garage.num_loads["a"] == 2
        unloading.cancel()


async def test_a_model_in_use_is_not_idle() -> None:
    garage = Garage(model_idle_timeout=0.02)
    garage.on_step = lambda output: time.sleep(0.01)
    async with garage.client() as client:
        unloading = asyncio.create_task(garage.models.unload_idle())
        assert text_of(await garage.ask(client, "a", max_tokens=40)) == "a" * 40
        assert garage.num_loads["a"] == 1
        unloading.cancel()


async def test_who_stops_waiting_for_a_model_does_not_stop_the_others() -> None:
    garage = Garage()
    garage.may_load.clear()
    async with garage.client() as client:
        leaving, staying = (asyncio.create_task(garage.ask(client, "a")) for _ in range(2))
        await until(lambda: garage.models.num_active == 2)
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        garage.may_load.set()
        assert text_of(await staying) == "aaaa"
        assert garage.num_loads["a"] == 1
        await until(lambda: garage.models.find("a").num_users == 0)


async def test_a_model_that_cannot_be_loaded_is_a_503_and_tried_again() -> None:
    garage = Garage()
    garage.error = ModelError("model='/secret/path' cannot be loaded")
    async with garage.client() as client:
        answers = await asyncio.gather(garage.ask(client, "a"), garage.ask(client, "a", stream=True))
        for answer in answers:
            error = refusal(answer, 503)
            assert error["code"] == "model_not_loaded" and "secret" not in error["message"]
        assert (await client.get("/health")).status_code == 200
        garage.error = None
        assert text_of(await garage.ask(client, "a")) == "aaaa"


async def test_nobody_waits_longer_for_a_model_than_its_request_may_take() -> None:
    garage = Garage(request_timeout=0.05)
    garage.may_load.clear()
    async with garage.client() as client:
        assert refusal(await garage.ask(client, "a"), 504)["code"] == "request_timeout"
        garage.may_load.set()
        await until(lambda: garage.is_loaded("a"))
        assert text_of(await garage.ask(client, "a", max_tokens=4)) == "aaaa"


async def test_closing_the_server_ends_those_who_wait_for_a_model() -> None:
    garage = Garage()
    garage.may_load.clear()
    async with garage.client() as client:
        waiting = asyncio.create_task(garage.ask(client, "a"))
        await until(lambda: garage.models.num_active == 1)
        await garage.models.close()
        assert refusal(await waiting, 503)["code"] == "engine_dead"
    garage.may_load.set()


async def test_every_metric_has_the_samples_of_each_model_in_one_family() -> None:
    garage = Garage()
    async with garage.client() as client:
        await asyncio.gather(*(garage.ask(client, name) for name in "aab"))
        text = (await client.get("/metrics")).text
    assert text.count("# TYPE paged:prompt_tokens_total counter") == 1
    assert 'paged:e2e_request_latency_seconds_count{engine="0",model_name="a"} 2.0' in text
    assert 'paged:e2e_request_latency_seconds_count{engine="0",model_name="b"} 1.0' in text
    assert 'paged:num_requests_running{engine="0",model_name="c"}' not in text


async def test_a_busy_models_throughput_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "paged_backend.server.throughput_log")
    garage = Garage()
    async with garage.client() as client:
        logging = asyncio.create_task(log_when_busy(garage.models, interval=0.02))
        await garage.ask(client, "a")
        await until(lambda: len(caplog.messages) == 1)
        await asyncio.sleep(0.1)
        logging.cancel()
    (line,) = caplog.messages
    assert line.startswith("a: Avg prompt throughput: ") and "Running: 0 reqs, Waiting: 0 reqs, KV cache" in line


def test_what_a_model_needs_is_read_off_its_files(tmp_path: Any) -> None:
    (tmp_path / "one.safetensors").write_bytes(bytes(600))
    (tmp_path / "two.safetensors").write_bytes(bytes(400))
    (tmp_path / "pytorch_model.bin").write_bytes(bytes(5000))
    assert num_bytes_needed(str(tmp_path), EngineConfig()) == 1200
    assert num_bytes_needed(str(tmp_path), EngineConfig(kv_cache_memory="1KiB")) == 1200 + 1024
    assert num_bytes_needed(str(tmp_path / "pytorch_model.bin"), EngineConfig()) == 6000
    assert num_bytes_needed("owner/name", EngineConfig()) == 0
