"""The server's settings: frozen, and checked once, here."""

from __future__ import annotations

import dataclasses
import os
import ssl
from collections.abc import Mapping

from paged_backend import ConfigError

_MODEL_TIMEOUTS = ("model_idle_timeout", "model_unload_timeout")
LOG_LEVELS = ("critical", "error", "warning", "info", "debug")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """How the model is served; what is not about HTTP is in `EngineConfig`.

    Raises `ConfigError` that names the field, its value and its limit.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    """0 takes a free one."""
    uds: str | None = None
    """A unix socket's path, instead of host and port."""
    served_model_names: tuple[str, ...] = ()
    """What requests may call the model; the first is what answers call it. Empty: the model as it was given."""
    lora_modules: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """LoRA adapters by the names that requests call them, in place of the model's: the folder of each."""
    allow_lora_updating: bool = False
    """Whether clients may load and unload adapters, from any folder that the server can read."""
    api_keys: tuple[str, ...] = ()
    """Requests need one of them as their bearer token; empty: no key is asked for."""
    metrics_port: int | None = None
    """`/metrics` without a key, on a port of its own."""
    request_timeout: float | None = None
    """Seconds after which a request is given up; None: never."""
    shutdown_timeout: float = 30.0
    """Seconds that requests get to finish after the first SIGTERM."""
    stall_timeout: float = 60.0
    """Seconds without a byte after which a body that is being sent, or a stream that is being read, is given up."""
    model_idle_timeout: float | None = None
    """Seconds without a request after which a model is unloaded; the next one loads it again. None: never."""
    model_unload_timeout: float = 60.0
    """Seconds that another model waits for the requests of the one whose memory it needs."""
    otlp_endpoint: str | None = None
    """Where spans of requests go, as `http://host:4318`; None: nowhere."""
    max_body_bytes: int = 8 * 2**20
    """Largest request body."""
    cors_origins: tuple[str, ...] = ()
    """Web pages from these origins may use the API; `*` for all."""
    ui: bool = True
    """Serve the page at `/`, and the map of the KV cache that it shows."""
    root_path: str = ""
    """The path below which a proxy shows this server."""
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    log_level: str = "info"

    def __post_init__(self) -> None:
        for name in ("port", "metrics_port"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= 65535:
                raise ConfigError(f"{name}={value} is out of range: it must be from 0 to 65535")
        for name in ("request_timeout", "shutdown_timeout", "stall_timeout", "max_body_bytes", *_MODEL_TIMEOUTS):
            value = getattr(self, name)
            if value is not None and not value > 0 and not (name == "shutdown_timeout" and value == 0):
                raise ConfigError(f"{name}={value} is out of range: it must be > 0")
        if self.ssl_certfile is not None:
            _check_certificate(self.ssl_certfile, self.ssl_keyfile)
        elif self.ssl_keyfile is not None:
            raise ConfigError("ssl_keyfile is given without ssl_certfile; give both")
        if taken := next((name for name in self.lora_modules if name in self.served_model_names), None):
            raise ConfigError(f"lora_modules has the name {taken!r}, which is the model's; choose another one")
        if any(not key for key in self.api_keys):
            raise ConfigError("an API key is empty; it must have at least one character")
        if self.log_level not in LOG_LEVELS:
            raise ConfigError(
                f"log_level={self.log_level!r} is out of range: it must be one of {', '.join(LOG_LEVELS)}"
            )


def _check_certificate(certfile: str, keyfile: str | None) -> None:
    given = {"ssl_certfile": certfile, "ssl_keyfile": keyfile}
    for name, path in given.items():
        if path is not None and not os.access(path, os.R_OK):
            raise ConfigError(f"{name}={path!r} is no file that can be read; give a PEM file")
    try:
        # An empty password: OpenSSL would ask the terminal for that of an encrypted key.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certfile, keyfile, password="")
    except (OSError, ValueError) as error:
        what = " with ".join(f"{name}={path!r}" for name, path in given.items() if path is not None)
        raise ConfigError(
            f"{what} cannot be used ({error}); give a certificate and its key, unencrypted, in PEM form"
        ) from None
