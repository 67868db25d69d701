"""What LangChain's two kinds of language models have in common on an engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Self

from langchain_core.language_models import BaseLanguageModel
from langchain_core.runnables import RunnableConfig
from langchain_core.runnables.config import get_config_list, patch_config
from pydantic import model_validator

import paged_backend
from langchain_paged.call import given_sampling, settings_of_call
from langchain_paged.engine_user import EngineUser
from langchain_paged.settings import RequestSettings
from paged_backend import SamplingParams


class EngineLanguageModel(RequestSettings, EngineUser, BaseLanguageModel):  # type: ignore[type-arg]
    """A model that many ask at once, and whose settings are checked when it is made."""

    @model_validator(mode="after")
    def _check_settings(self) -> Self:
        """Raise now what would be raised at the first call."""
        SamplingParams(**{"max_tokens": None} | given_sampling(settings_of_call(self, None, {})))
        return self

    @model_validator(mode="after")
    def _set_paged_version(self) -> Self:
        self.metadata = _with_version(self.metadata)
        return self

    def get_token_ids(self, text: str) -> list[int]:
        """The model's own token ids, without special tokens around them. Loads the model if it is not in use yet."""
        if self.custom_get_token_ids is not None:
            return self.custom_get_token_ids(text)
        return self._engine(self.model).tokenizer.encode(text, add_special_tokens=False)

    def _all_at_once(
        self, config: RunnableConfig | Sequence[RunnableConfig] | None, num_inputs: int
    ) -> list[RunnableConfig]:
        """One config for each input. LangChain starts few threads, since it takes them for workers; ours only wait."""
        most = min(num_inputs, self._engine_config.max_num_seqs)
        return [
            one if one.get("max_concurrency") is not None else patch_config(one, max_concurrency=most)
            for one in get_config_list(config, num_inputs)
        ]

    def batch_as_completed(
        self,
        inputs: Sequence[Any],
        config: RunnableConfig | Sequence[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any,
    ) -> Iterator[tuple[int, Any]]:
        """`batch`, but each answer comes with its index as soon as it is there."""
        configs = self._all_at_once(config, len(inputs))
        answers: Iterator[tuple[int, Any]] = super().batch_as_completed(  # type: ignore[call-overload]
            inputs, configs, return_exceptions=return_exceptions, **kwargs
        )
        return answers


def _with_version(metadata: dict[str, Any] | None) -> dict[str, Any]:
    """Metadata of a model that names our version beside LangChain's own in the traces."""
    metadata = metadata or {}
    return {**metadata, "lc_versions": {**metadata.get("lc_versions", {}), "paged-backend": paged_backend.__version__}}
