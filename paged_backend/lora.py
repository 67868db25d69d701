"""`LoRARequest`: which adapter answers a request."""

from __future__ import annotations

import dataclasses
import os
from typing import Any, Protocol

from paged_backend.errors import InvalidRequestError


@dataclasses.dataclass(frozen=True, slots=True, init=False)
class LoRARequest:
    """An adapter, by a name of the caller's and the folder it lies in: `LoRARequest("sql", "adapters/sql")`.

    vLLM's `LoRARequest("sql", 1, "adapters/sql")` is understood too; the number decides nothing here, since adapters
    are told apart by what is in their files.
    """

    lora_name: str
    lora_int_id: int | None
    lora_path: str

    def __init__(
        self, lora_name: str, lora_int_id: int | str | os.PathLike[str] | None = None, lora_path: Any = None
    ) -> None:
        if isinstance(lora_int_id, (str, os.PathLike)):
            if lora_path is not None:
                message = f"LoRARequest has two paths: {lora_int_id!r} and {lora_path!r}; give one"
                raise InvalidRequestError(message, field="lora_path")
            lora_int_id, lora_path = None, lora_int_id
        if not isinstance(lora_name, str) or not lora_name:
            raise InvalidRequestError(f"lora_name={lora_name!r} must be a string that is not empty", field="lora_name")
        if not isinstance(lora_path, (str, os.PathLike)) or not os.fspath(lora_path):
            message = f"lora_path={lora_path!r} must be the folder of a PEFT checkpoint"
            raise InvalidRequestError(message, field="lora_path")
        if lora_int_id is not None and (isinstance(lora_int_id, bool) or not isinstance(lora_int_id, int)):
            message = f"lora_int_id={lora_int_id!r} must be an integer, or left out"
            raise InvalidRequestError(message, field="lora_int_id")
        object.__setattr__(self, "lora_name", lora_name)
        object.__setattr__(self, "lora_int_id", lora_int_id)
        object.__setattr__(self, "lora_path", os.fspath(lora_path))


class Adapter(Protocol):
    """A loaded adapter, as the engine knows it."""

    @property
    def adapter_id(self) -> int:
        """Another one for other weights, and never given twice, so that prefixes are shared under it."""
        ...

    @property
    def name(self) -> str:
        """What it was called when it was loaded."""
        ...


class Adapters(Protocol):
    """The adapters of one engine. Called from any thread."""

    def get(self, wanted: LoRARequest) -> Adapter:
        """Load it if it is not loaded; raises InvalidRequestError for what cannot be loaded, or does not fit."""
        ...

    def remove(self, name: str) -> bool:
        """Let go of all adapters of this name, which unfinished requests keep until their end."""
        ...

    def names(self) -> list[str]:
        """Of the adapters that are loaded; the one that would make room first is first."""
        ...
