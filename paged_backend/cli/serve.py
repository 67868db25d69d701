"""`paged-backend serve`."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import paged_backend
from paged_backend import ConfigError, EngineConfig
from paged_backend.cli import of_the_extra
from paged_backend.cli.options import Engine, command, start_logging
from paged_backend.server.settings import LOG_LEVELS, ServerSettings

if TYPE_CHECKING:
    from paged_backend.server.serving import Serving

_DEFAULTS = ServerSettings()


@command
def serve(
    model: Annotated[
        list[str],
        typer.Argument(help="demo, a folder, a .gguf file or a hub id. Several are loaded when they are asked for."),
    ],
    *,
    engine: Engine,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for all.")] = _DEFAULTS.host,
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes a free one.")] = _DEFAULTS.port,
    uds: Annotated[str | None, typer.Option(help="A unix socket, instead of host and port.")] = None,
    served_model_name: Annotated[
        list[str] | None,
        typer.Option(help="What requests call the model; may be repeated. Of several models: one for each, in order."),
    ] = None,
    model_idle_timeout: Annotated[
        float | None, typer.Option(help="Seconds without a request after which a model is unloaded.")
    ] = None,
    lora_modules: Annotated[
        list[str] | None,
        typer.Option(help="A LoRA adapter, name=path, that requests call by its name; may be repeated."),
    ] = None,
    allow_lora_updating: Annotated[
        bool, typer.Option("--allow-lora-updating", help="Let clients load and unload adapters.")
    ] = False,
    api_key: Annotated[list[str] | None, typer.Option(help="A key that requests need; may be repeated.")] = None,
    api_key_file: Annotated[Path | None, typer.Option(help="A file with such keys, one a line.")] = None,
    metrics_port: Annotated[int | None, typer.Option(help="/metrics without a key, on a port of its own.")] = None,
    otlp_endpoint: Annotated[
        str | None,
        typer.Option(
            "--otlp-endpoint",
            "--otlp-traces-endpoint",
            help="Where OpenTelemetry spans of requests are sent, as http://localhost:4318.",
        ),
    ] = None,
    request_timeout: Annotated[float | None, typer.Option(help="Seconds after which a request is given up.")] = None,
    shutdown_timeout: Annotated[
        float, typer.Option(help="Seconds that requests get to finish after SIGTERM.")
    ] = _DEFAULTS.shutdown_timeout,
    max_body_bytes: Annotated[int, typer.Option(help="Largest request body.")] = _DEFAULTS.max_body_bytes,
    cors_origin: Annotated[
        list[str] | None, typer.Option(help="Web pages from here may use the API; * for all; may be repeated.")
    ] = None,
    ui: Annotated[
        bool, typer.Option("--ui/--no-ui", help="A page at / to try the model and to watch its KV cache.")
    ] = _DEFAULTS.ui,
    root_path: Annotated[str, typer.Option(help="The path below which a proxy shows this server.")] = "",
    ssl_certfile: Annotated[str | None, typer.Option(help="Certificate, for https.")] = None,
    ssl_keyfile: Annotated[str | None, typer.Option(help="Its private key.")] = None,
    log_level: Annotated[str, typer.Option(help=", ".join(LOG_LEVELS) + ".")] = _DEFAULTS.log_level,
) -> None:
    """Serve one or several models over the OpenAI HTTP API.

    The port is open at once; /ready answers 200 when the model is loaded. Of several models, each is loaded when a
    request asks for it, and unloaded if others need its memory. SIGTERM and Ctrl-C let running requests finish, a
    second one ends them.
    """
    settings = ServerSettings(
        host=host,
        port=port,
        uds=uds,
        served_model_names=tuple(served_model_name or ()),
        lora_modules=_lora_modules(lora_modules or ()),
        allow_lora_updating=allow_lora_updating,
        model_idle_timeout=model_idle_timeout,
        api_keys=(*(api_key or ()), *_keys_of(api_key_file)),
        metrics_port=metrics_port,
        otlp_endpoint=otlp_endpoint,
        request_timeout=request_timeout,
        shutdown_timeout=shutdown_timeout,
        max_body_bytes=max_body_bytes,
        cors_origins=tuple(cors_origin or ()),
        ui=ui,
        root_path=root_path,
        ssl_certfile=ssl_certfile,
        ssl_keyfile=ssl_keyfile,
        log_level=log_level,
    )
    start_logging(settings.log_level)
    with of_the_extra():  # here, since it takes a second
        from paged_backend.server.lifecycle import run
        from paged_backend.server.models import Models

    run(Models(settings, _servings(settings, model, engine)))


def _servings(settings: ServerSettings, models: list[str], engine: dict[str, Any]) -> list[Serving]:
    """Of each model one, under names of its own. A bad option ends the command before anything listens."""
    from paged_backend.server.memory import num_bytes_needed
    from paged_backend.server.serving import Serving

    tokenizer = engine.pop("tokenizer", None)
    if settings.lora_modules or settings.allow_lora_updating:
        if len(models) > 1:
            raise ConfigError(f"{len(models)} models cannot be served with lora_modules; serve one")
        engine = {"enable_lora": True} | engine
    config = EngineConfig(**engine)
    names = settings.served_model_names or tuple(models)
    if len(models) == 1:
        names_of_each = [names]
    elif len(names) == len(models):
        names_of_each = [(name,) for name in names]
    else:
        raise ConfigError(f"{len(models)} models have {len(names)} served_model_names; give one for each, in order")
    if len(set(names)) < len(names):
        raise ConfigError(f"served_model_names={' '.join(names)} has a name twice; names must differ")
    return [
        Serving(
            settings,
            model=model,
            names=its_names,
            make=functools.partial(paged_backend.LLM, model, tokenizer, **engine),
            num_bytes_needed=functools.partial(num_bytes_needed, model, config),
        )
        for model, its_names in zip(models, names_of_each, strict=True)
    ]


def _lora_modules(given: Iterable[str]) -> dict[str, str]:
    """Of `name=path`, or of vLLM's `{"name": ..., "path": ...}`."""
    modules: dict[str, str] = {}
    for text in given:
        name, path = _name_and_path(text)
        if not name or not path or name in modules:
            raise ConfigError(f"lora_modules={text!r} must be name=path, with another name for each adapter")
        modules[name] = path
    return modules


def _name_and_path(text: str) -> tuple[str, str]:
    if not text.startswith("{"):
        name, _, path = text.partition("=")
        return name, path
    try:
        content = json.loads(text)
        return str(content["name"]), str(content["path"])
    except (ValueError, KeyError):
        raise ConfigError(f'lora_modules={text!r} must have "name" and "path"') from None


def _keys_of(path: Path | None) -> list[str]:
    if path is None:
        return []
    try:
        keys = [line.strip() for line in path.read_text(encoding="utf-8-sig").splitlines() if line.strip()]
    except UnicodeDecodeError:
        raise ConfigError(f"api_key_file={str(path)!r} is not UTF-8; give a text file with one key a line") from None
    if not keys:
        raise ConfigError(f"api_key_file={str(path)!r} has no key; give one a line")
    return keys
