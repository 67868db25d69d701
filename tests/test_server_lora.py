"""Adapters behind the HTTP API: they are called as models are."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from helpers_lora import greedy, merged, save_adapter
from helpers_models import make_model, make_tokenizer
from helpers_server import answered, refusal
from paged_backend import LLM, ConfigError
from paged_backend.cli.serve import _lora_modules, _servings
from paged_backend.server.app import create_app
from paged_backend.server.models import Models
from paged_backend.server.serving import Serving
from paged_backend.server.settings import ServerSettings

PROMPT = list(range(40, 60))
MODEL = make_model("llama")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_adapter(tmp_path_factory.mktemp("adapter"), MODEL)


@pytest.fixture(scope="module")
def models(folder: Path) -> Iterator[Models]:
    llm = LLM(MODEL, make_tokenizer(), kv_cache_memory="4MiB", enable_lora=True)
    settings = ServerSettings(lora_modules={"sql": str(folder)}, allow_lora_updating=True)
    yield Models(settings, [Serving(settings, model="base", llm=llm)])
    llm.close()


async def post(models: Models, path: str, **body: object) -> httpx.Response:
    transport = httpx.ASGITransport(create_app(models), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
        return await client.post(path, json=body)


async def completed(models: Models, model: str) -> list[int]:
    body = {"prompt": PROMPT, "temperature": 0, "max_tokens": 8, "ignore_eos": True, "return_token_ids": True}
    reply = answered(await post(models, "/v1/completions", model=model, **body))
    assert reply["model"] == model
    return list(reply["choices"][0]["token_ids"])


async def test_the_name_of_a_model_chooses_the_adapter(models: Models, folder: Path) -> None:
    with_adapter = greedy(merged(MODEL, folder), PROMPT, 8)
    assert await completed(models, "base") == greedy(MODEL, PROMPT, 8) != with_adapter
    assert await completed(models, "sql") == with_adapter


async def test_adapters_are_listed_as_models(models: Models, folder: Path) -> None:
    transport = httpx.ASGITransport(create_app(models))
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
        models = answered(await client.get("/v1/models"))["data"]
        one = answered(await client.get("/v1/models/sql"))
    assert [(model["id"], model["root"], model["parent"]) for model in models] == [
        ("base", "base", None),
        ("sql", str(folder), "base"),
    ]
    assert one == models[1]


async def test_chats_and_vectors_take_the_name_too(models: Models) -> None:
    chat = {"messages": [{"role": "user", "content": "hello"}], "temperature": 0, "max_tokens": 8, "ignore_eos": True}
    texts = [
        answered(await post(models, "/v1/chat/completions", model=model, **chat))["choices"][0]["message"]["content"]
        for model in ("base", "sql")
    ]
    vectors = [
        answered(await post(models, "/v1/embeddings", model=model, input=PROMPT))["data"][0]["embedding"]
        for model in ("base", "sql")
    ]
    assert texts[0] != texts[1] and vectors[0] != vectors[1]


async def test_adapters_come_and_go_while_the_server_runs(models: Models, folder: Path) -> None:
    new = {"lora_name": "new", "lora_path": str(folder)}
    answered(await post(models, "/v1/load_lora_adapter", **new))
    assert await completed(models, "new") == await completed(models, "sql")
    assert "in use" in refusal(await post(models, "/v1/load_lora_adapter", **new))["message"]
    answered(await post(models, "/v1/unload_lora_adapter", lora_name="new"))
    refusal(await post(models, "/v1/completions", model="new", prompt=PROMPT), 404)
    refusal(await post(models, "/v1/unload_lora_adapter", lora_name="new"), 404)
    bad = {"lora_name": "bad", "lora_path": str(folder.parent / "none")}
    assert "adapter_config.json" in refusal(await post(models, "/v1/load_lora_adapter", **bad))["message"]


@pytest.mark.parametrize("path", ["/nope", "a\0b", "~nobody-of-this-name/adapter", "x" * 5000])
async def test_a_folder_that_is_none_is_a_400(models: Models, path: str) -> None:
    error = refusal(await post(models, "/v1/load_lora_adapter", lora_name="other", lora_path=path))
    assert error["param"] == "lora_path"


async def test_clients_may_not_load_adapters_unless_that_is_allowed(models: Models, folder: Path) -> None:
    settings = ServerSettings()
    closed = Models(settings, [Serving(settings, model="base", llm=models.servings[0].llm)])
    response = await post(closed, "/v1/load_lora_adapter", lora_name="a", lora_path=str(folder))
    assert response.status_code == 404


def test_modules_are_given_as_in_vllm() -> None:
    assert _lora_modules(["a=/x=y", '{"name": "b", "path": "z"}']) == {"a": "/x=y", "b": "z"}
    for given in (["a"], ["=x"], ["a="], ["a=x", "a=y"], ['{"name": "a"}'], ["{"]):
        with pytest.raises(ConfigError, match="lora_modules"):
            _lora_modules(given)
    with pytest.raises(ConfigError, match="is the model's"):
        ServerSettings(served_model_names=("a",), lora_modules={"a": "x"})


async def test_a_server_whose_adapter_cannot_be_loaded_does_not_start(folder: Path) -> None:
    settings = ServerSettings(lora_modules={"bad": str(folder / "none")})

    def make() -> LLM:
        return LLM(MODEL, make_tokenizer(), kv_cache_memory="4MiB", enable_lora=True)

    models = Models(settings, [Serving(settings, model="base", make=make)])
    with pytest.raises(ValueError, match=r"adapter_config\.json"):
        await models.start()
    assert not models.is_ready
    await models.close()


def test_adapters_need_one_model() -> None:
    with pytest.raises(ConfigError, match="2 models cannot be served with lora_modules"):
        _servings(ServerSettings(lora_modules={"a": "x"}), ["one", "two"], {})
