"""`paged-backend serve`: which options and files of them reach the server and the engine."""

from __future__ import annotations

import asyncio
import inspect
from pathlib import Path
from typing import Any

import pytest
import yaml

from helpers_cli import Fakes, failed, run
from paged_backend.cli.options import ENGINE_OPTIONS
from paged_backend.cli.serve import serve
from paged_backend.server import lifecycle
from paged_backend.server.models import Models


@pytest.fixture
def served(fakes: Fakes, monkeypatch: pytest.MonkeyPatch) -> list[Models]:
    """What `serve` would serve."""
    served: list[Models] = []

    def note(models: Models) -> None:
        served.append(models)
        asyncio.run(models.start())
        asyncio.run(models.close())

    monkeypatch.setattr(lifecycle, "run", note)
    return served


def test_options_reach_the_server_and_the_engine(served: list[Models], fakes: Fakes, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("one\n\n two \n")
    arguments = ("--port", "9", "--api-key", "zero", "--api-key-file", str(tmp_path / "keys"), "--cors-origin", "*")
    engine = ("--max-num-seqs", "3", "--no-enable-prefix-caching", "--speculative-config", '{"method": "ngram"}')
    names = ("--served-model-name", "a", "--served-model-name", "b")
    assert run("serve", "m", *arguments, *engine, *names).exit_code == 0
    (models,) = served
    settings = models.settings
    assert (settings.port, settings.api_keys, settings.cors_origins) == (9, ("zero", "one", "two"), ("*",))
    assert models.names == ["a", "b"]
    assert fakes.made == [
        ("m", {"max_num_seqs": 3, "enable_prefix_caching": False, "speculative_config": {"method": "ngram"}})
    ]


def test_a_file_of_options_counts_unless_the_command_line_says_otherwise(
    served: list[Models], fakes: Fakes, tmp_path: Path
) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("model: m\nport: 9\nhost: 0.0.0.0\nserved-model-name: a\napi_key: [x, y]\nmax-num-seqs: 3\n")
    assert run("serve", "--config", str(config), "--port", "10").exit_code == 0
    (models,) = served
    settings = models.settings
    assert (settings.port, settings.host, settings.api_keys) == (10, "0.0.0.0", ("x", "y"))
    assert models.names == ["a"]
    assert fakes.made == [("m", {"max_num_seqs": 3})]


def test_a_file_of_options_may_say_what_is_not_wanted(served: list[Models], fakes: Fakes, tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("model: m\nno-ui: true\nno-enable-prefix-caching: true\nno-enable-lora: false\n")
    assert run("serve", "--config", str(config)).exit_code == 0
    assert fakes.made == [("m", {"enable_prefix_caching": False, "enable_lora": True})]
    assert not served[0].settings.ui


def test_several_models_have_a_name_each(served: list[Models], fakes: Fakes) -> None:
    arguments = ("--model-idle-timeout", "60", "--served-model-name", "x", "y", "--api-key", "k", "l", "--port", "9")
    assert run("serve", "a", "b", *arguments).exit_code == 0
    (models,) = served
    assert models.names == ["x", "y"] and fakes.made == []
    assert (models.settings.api_keys, models.settings.model_idle_timeout) == (("k", "l"), 60)
    assert run("serve", "a", "b").exit_code == 0
    assert served[1].names == ["a", "b"]


def test_several_models_may_stand_in_a_file(served: list[Models], tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("model: [a, b]\nserved-model-name: [x, y]\n")
    assert run("serve", "--config", str(config)).exit_code == 0
    assert served[0].names == ["x", "y"]


# A value other than the default for each option of `serve`, as in a file.
SERVER_OPTIONS: dict[str, Any] = {
    "host": "0.0.0.0",
    "port": 9,
    "uds": "/tmp/socket",
    "served_model_name": ["x", "y"],
    "model_idle_timeout": 60.0,
    "api_key": ["k", "l"],
    "metrics_port": 10,
    "otlp_endpoint": "http://localhost:4318",
    "request_timeout": 5.0,
    "shutdown_timeout": 6.0,
    "max_body_bytes": 1000,
    "cors_origin": ["*"],
    "ui": False,
    "root_path": "/api",
    "log_level": "debug",
}

ENGINE_VALUES: dict[str, Any] = {
    "dtype": "float32",
    "device": "cpu",
    "max_model_len": 100,
    "kv_cache_memory": "1GiB",
    "gpu_memory_utilization": 0.5,
    "attention_backend": "torch",
    "enforce_eager": True,
    "async_scheduling": False,
    "block_size": 8,
    "swap_space": 0.0,
    "tensor_parallel_size": 2,
    "num_gpu_blocks_override": 50,
    "enable_prefix_caching": False,
    "max_num_seqs": 3,
    "max_num_batched_tokens": 64,
    "max_num_queued_reqs": 5,
    "max_logprobs": 7,
    "speculative_config": {"method": "ngram"},
    "seed": 4,
    "trust_remote_code": True,
    "revision": "main",
    "chat_template": "{{ messages }}",
    "tool_call_parser": "hermes",
    "reasoning_parser": "qwen3",
    "generation_config": "none",
    "cache_dir": "/tmp/cache",
}

FILE_NAMES = {
    "served_model_name": "served_model_names",
    "api_key": "api_keys",
    "cors_origin": "cors_origins",
}
"""Options that settings have as lists."""


def test_every_option_may_stand_in_a_file(
    served: list[Models], fakes: Fakes, certificate: tuple[str, str], tmp_path: Path
) -> None:
    server_options = SERVER_OPTIONS | dict(zip(("ssl_certfile", "ssl_keyfile"), certificate, strict=True))
    (tmp_path / "keys").write_text("m")
    files = {"api_key_file": str(tmp_path / "keys"), "tokenizer": "other"}
    content = {"model": ["a"], **server_options, **ENGINE_VALUES, **files}
    options = set(inspect.signature(serve).parameters) - set(ENGINE_OPTIONS)
    others = {"config", "debug", "lora_modules", "allow_lora_updating"}  # adapters have tests of their own
    assert options - others == set(content) - set(ENGINE_OPTIONS), "an option has no value here"
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(content))
    result = run("serve", "--config", str(config))
    assert result.exit_code == 0, result.output
    (models,), ((model, engine),) = served, fakes.made
    assert (model, engine) == ("a", ENGINE_VALUES)
    for name, value in server_options.items():
        found = getattr(models.settings, FILE_NAMES.get(name, name))
        assert found == (tuple(value) if isinstance(value, list) else value) or name == "api_key"
    assert models.settings.api_keys == ("k", "l", "m")


@pytest.mark.parametrize("names", [("x",), ("x", "y", "z"), ("x", "x")])
def test_names_that_do_not_go_with_the_models_are_refused(fakes: Fakes, names: tuple[str, ...]) -> None:
    assert "served_model_names" in failed(run("serve", "a", "b", "--served-model-name", *names))


def test_a_file_of_keys_that_is_no_text_is_refused(fakes: Fakes, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_bytes(b"\xff\xfe")
    assert "is not UTF-8" in failed(run("serve", "m", "--api-key-file", str(keys)))
