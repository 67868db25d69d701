"""`PagedEmbedding`: LlamaIndex's embeddings on the engine that this process shares."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.bridge.pydantic import Field, model_validator

from llama_index.llms.paged.engine_user import EngineUser
from paged_backend import EmbeddingRequestOutput

Embedding = list[float]

_OPTIONS = (
    "pooling",
    "normalize",
    "dimensions",
    "truncate_prompt_tokens",
    "timeout",
    "priority",
    "cache_salt",
    "lora_request",
)


class PagedEmbedding(EngineUser, BaseEmbedding):
    """Vectors of texts, from an encoder or from any other model, which may answer questions at the same time.

    >>> from llama_index.core import Settings
    >>> Settings.embed_model = PagedEmbedding(model="sentence-transformers/all-MiniLM-L6-v2")

    The texts of one call are in the engine at once. See `EngineUser` for which engine that is.
    """

    embed_batch_size: int = Field(default=256, gt=0, le=2048)
    """LlamaIndex hands over at most this many texts at a time, and waits for them before the next. The engine chooses
    its batches itself, so that there is no reason for a small number."""
    query_instruction: str | None = None
    """Put before each query as it is, such as `"query: "`."""
    text_instruction: str | None = None
    """Put before each text as it is, such as `"passage: "`."""
    pooling: str | None = None
    """`"last"`, `"mean"` or, for encoders, `"cls"`. None: what the model was made for."""
    normalize: bool | None = None
    """Scale vectors to length 1. None: what the model was made for, else yes."""
    dimensions: int | None = None
    """Keep only the first so many components; for models that were trained to be cut."""
    truncate_prompt_tokens: int | None = -1
    """Longer texts are cut to so many tokens; -1: to what the model can take. None: they are refused."""
    timeout: float | None = None
    """Seconds until a request is given up with a TimeoutError."""
    priority: int | None = None
    """Lower is served first; None is 0."""
    cache_salt: str | None = None
    """Requests share cached prefixes only with requests of the same salt."""
    lora_request: Any = None
    """The LoRA adapter that answers: a `paged_backend.LoRARequest`. The engine needs `enable_lora=True`."""

    @model_validator(mode="after")
    def _tell_the_name(self) -> Self:
        """LlamaIndex's events and payloads name the model by this field."""
        self.model_name = self.model
        return self

    @classmethod
    def class_name(cls) -> str:
        return "PagedEmbedding"

    def _get_query_embedding(self, query: str) -> Embedding:
        return self._embed([query], self.query_instruction)[0]

    async def _aget_query_embedding(self, query: str) -> Embedding:
        return (await self._aembed([query], self.query_instruction))[0]

    def _get_text_embedding(self, text: str) -> Embedding:
        return self._embed([text], self.text_instruction)[0]

    async def _aget_text_embedding(self, text: str) -> Embedding:
        return (await self._aembed([text], self.text_instruction))[0]

    def _get_text_embeddings(self, texts: list[str]) -> list[Embedding]:
        return self._embed(texts, self.text_instruction)

    async def _aget_text_embeddings(self, texts: list[str]) -> list[Embedding]:
        return await self._aembed(texts, self.text_instruction)

    def _embed(self, texts: Sequence[str], instruction: str | None) -> list[Embedding]:
        return _vectors(self.engine.embed(_instructed(texts, instruction), use_tqdm=False, **self._options))

    async def _aembed(self, texts: Sequence[str], instruction: str | None) -> list[Embedding]:
        return _vectors(await (await self._aengine()).aembed(_instructed(texts, instruction), **self._options))

    @property
    def _options(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _OPTIONS if getattr(self, name) is not None}


def _instructed(texts: Sequence[str], instruction: str | None) -> list[str]:
    return [(instruction or "") + text for text in texts]


def _vectors(outputs: Sequence[EmbeddingRequestOutput]) -> list[Embedding]:
    return [output.outputs.embedding for output in outputs]
