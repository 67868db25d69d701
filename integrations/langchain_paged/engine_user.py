"""What all of LangChain's classes here have in common: which engine they use, and that it is not part of them."""

from __future__ import annotations

import dataclasses
import os
from typing import Any, Self

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, model_validator

from langchain_paged.settings import warn_of_unknown
from paged_backend import LLM, EngineConfig


class EngineUser(BaseModel):
    """Names an engine, which is made at the first call, and is shared by all that name it alike.

    Making, copying and pickling it loads nothing.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)

    model: str = Field(default="", validation_alias=AliasChoices("model", "model_name"))
    """`"demo"`, a folder, a `.gguf` file or a hub id. An `LLM` given here is taken as `llm`."""
    engine_kwargs: dict[str, Any] = Field(default_factory=dict)
    """How the engine is made: fields of `paged_backend.EngineConfig`, such as `{"kv_cache_memory": "2GiB"}`."""
    llm: LLM | None = Field(default=None, exclude=True, repr=False)
    """An engine to use instead of the shared one. It answers for its own name: a copy or a call with another `model`
    uses the shared engine of that model."""

    @model_validator(mode="before")
    @classmethod
    def _read_arguments(cls, values: dict[str, Any]) -> dict[str, Any]:
        warn_of_unknown(cls, values)
        spelling = "model" if "model" in values else "model_name"
        model, llm = values.get(spelling), values.get("llm")
        if isinstance(model, LLM):
            model, llm = None, model
        if model is None and isinstance(llm, LLM):
            model = llm.model_name
        if isinstance(model, os.PathLike):
            model = os.fspath(model)
        if not isinstance(model, str) or not model:
            raise ValueError(
                "model must be a name or a path; for a loaded model give llm=LLM(model, tokenizer) instead"
            )
        return {**values, spelling: model, "llm": llm}

    @model_validator(mode="after")
    def _check_engine_kwargs(self) -> Self:
        """Raise now what would be raised at the first call."""
        EngineConfig(**self.engine_kwargs)
        return self

    def __getstate__(self) -> dict[Any, Any]:
        if self.llm is not None:
            raise TypeError(
                f"a {type(self).__name__} with llm=... cannot be pickled, since an engine lives in one process; with "
                "model=... and engine_kwargs=... it can, and finds its engine, or loads it, where it is used"
            )
        return super().__getstate__()

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        """Copies share the engine."""
        memo = {} if memo is None else memo
        memo[id(self.llm)] = self.llm
        return super().__deepcopy__(memo)

    @property
    def _engine_config(self) -> EngineConfig:
        own = self._own_engine(self.model)
        return EngineConfig(**self.engine_kwargs) if own is None else own.config

    @property
    def _engine_identity(self) -> dict[str, Any]:
        """What tells this engine from others, for traces and for the keys of LLM caches."""
        identity = {"model": self.model, "engine_kwargs": _differences_from_default(self._engine_config)}
        # Models that were loaded by hand may share a name.
        return identity if self.llm is None else identity | {"llm": self.llm.instance_id}

    def _own_engine(self, model: str) -> LLM | None:
        return self.llm if self.llm is not None and self.llm.model_name == model else None

    def _engine(self, model: str) -> LLM:
        return self._own_engine(model) or LLM.shared(model, **self.engine_kwargs)

    async def _aengine(self, model: str) -> LLM:
        return self._own_engine(model) or await LLM.ashared(model, **self.engine_kwargs)


def _differences_from_default(config: EngineConfig) -> dict[str, Any]:
    """The engine settings that somebody chose, always in the same order."""
    default = EngineConfig()
    names = [field.name for field in dataclasses.fields(config)]
    return {name: getattr(config, name) for name in names if getattr(config, name) != getattr(default, name)}
