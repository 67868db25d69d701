"""What LlamaIndex's classes here have in common: which engine they use, and that it is not part of them."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any, Self

from llama_index.core.bridge.pydantic import BaseModel, ConfigDict, Field, model_validator

from paged_backend import LLM, EngineConfig, unknown_name


class EngineUser(BaseModel):
    """Names an engine, which is made at the first call and is the one that `LLM.shared` returns, so that all who name
    it alike share it, whatever framework they use.

    Making, copying and pickling it loads nothing.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)

    model: str
    """`"demo"`, a folder, a `.gguf` file or a hub id. A loaded model given here is taken as `loaded`, an `LLM` as
    `llm`. `model_name` is understood too."""
    tokenizer_name: str | None = None
    """Another tokenizer than the model's own; `tokenizer` in the constructor may be a name too."""
    engine_kwargs: dict[str, Any] = Field(default_factory=dict)
    """How the engine is made: fields of `paged_backend.EngineConfig`, such as `{"kv_cache_memory": "2GiB"}`."""
    loaded: tuple[Any, Any] | None = Field(default=None, exclude=True, repr=False)
    """A loaded model and its tokenizer."""
    llm: LLM | None = Field(default=None, exclude=True, repr=False)
    """An engine to use instead of the shared one."""

    @model_validator(mode="before")
    @classmethod
    def _read_arguments(cls, values: dict[str, Any]) -> dict[str, Any]:
        known = cls._argument_names()
        for name in values:
            if name not in known:
                raise ValueError(unknown_name(cls.__name__, name, known))
        values = dict(values)
        name = values.pop("model_name", None)
        model = values.pop("model", None) or name
        return {**values, **_source(model, values.pop("tokenizer", None), values.get("llm"))}

    @model_validator(mode="after")
    def _check_engine_kwargs(self) -> Self:
        """Raise now what would be raised at the first call."""
        EngineConfig(**self.engine_kwargs)
        return self

    @classmethod
    def _argument_names(cls) -> set[str]:
        """All that the constructor understands."""
        return {*cls.model_fields, "model_name", "tokenizer"}

    @property
    def engine(self) -> LLM:
        """The engine that answers. Loads the model if it is not in use yet."""
        return self.llm or LLM.shared(*self._source, **self.engine_kwargs)

    async def _aengine(self) -> LLM:
        return self.llm or await LLM.ashared(*self._source, **self.engine_kwargs)

    @property
    def _source(self) -> tuple[Any, Any]:
        return self.loaded or (self.model, self.tokenizer_name)

    @property
    def tokenizer(self) -> Callable[[str], list[int]]:
        """Text to the model's own ids, without special tokens: for `Settings.tokenizer`, `TokenCountingHandler` and
        text splitters, which else count with another model's."""
        return functools.partial(self.engine.tokenizer.encode, add_special_tokens=False)

    def __getstate__(self) -> dict[Any, Any]:
        if self.llm is not None or self.loaded is not None:
            raise TypeError(
                f"a {type(self).__name__} with llm=... or a loaded model cannot be pickled, since an engine lives in "
                "one process; with a model's name and engine_kwargs=... it can, and finds its engine, or loads it, "
                "where it is used"
            )
        return super().__getstate__()

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        """Copies share the engine, and the loaded model."""
        memo = {} if memo is None else memo
        memo |= {id(shared): shared for shared in (self.llm, self.loaded)}
        return super().__deepcopy__(memo)


def _source(model: Any, tokenizer: Any, llm: Any) -> dict[str, Any]:
    """Whatever was given as `model`, `tokenizer` and `llm`, as fields that fit each other."""
    if isinstance(model, LLM):
        model, llm = None, model
    if isinstance(llm, LLM):
        return {"model": model or llm.model_name, "llm": llm}
    if isinstance(model, os.PathLike):
        model = os.fspath(model)
    if isinstance(model, str) and model:
        return {"model": model} | ({"tokenizer_name": tokenizer} if tokenizer is not None else {})
    if hasattr(model, "config") and hasattr(model, "forward"):
        return {"model": str(model.config._name_or_path or type(model).__name__), "loaded": (model, tokenizer)}
    raise ValueError(f"model={model!r} must be a name, a path, a loaded model (with tokenizer=...) or an LLM")
