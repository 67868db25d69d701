"""`PagedEmbeddings`: LangChain's embeddings on the engine that this process shares."""

from __future__ import annotations

from typing import Any, Self

from langchain_core.embeddings import Embeddings
from pydantic import model_validator

from langchain_paged.engine_user import EngineUser
from paged_backend import EmbeddingRequestOutput, PoolingParams


class PagedEmbeddings(EngineUser, Embeddings):
    """Vectors of texts, from an encoder or from the same model that chats, computed in this process.

    All texts of a call, and those of others who call at the same time, share the engine's batches. Making, copying and
    pickling a PagedEmbeddings loads nothing.

    Setup:
        ```bash
        pip install 'paged-backend[langchain]'
        ```

    Instantiate:
        ```python
        from langchain_paged import PagedEmbeddings

        embeddings = PagedEmbeddings(model="path/to/all-MiniLM-L6-v2")
        ```

    Embed:
        ```python
        vectors = embeddings.embed_documents(["a red apple", "a green pear"])
        vector = embeddings.embed_query("fruit")
        ```

    Async:
        ```python
        vectors = await embeddings.aembed_documents(["a red apple", "a green pear"])
        ```

        Cancelling the task ends its requests.
    """

    pooling: str | None = None
    """`"last"`, `"mean"` or, for encoders, `"cls"`. None: what the model was made for, as far as its files say so."""
    normalize: bool | None = None
    """Whether vectors are scaled to length 1. None: what the model was made for, else True."""
    dimensions: int | None = None
    """The first so many components only; for models that were trained to be cut."""
    query_instruction: str = ""
    """Put before each query, as the model's authors recommend, such as `"query: "`."""
    embed_instruction: str = ""
    """Put before each document, such as `"passage: "`."""
    truncate_prompt_tokens: int | None = None
    """Cut longer texts to so many tokens, -1: to the model's limit. None: they are refused."""
    timeout: float | None = None
    """Seconds until a call is given up with a TimeoutError."""
    lora_request: Any = None
    """The LoRA adapter that computes the vectors: a `paged_backend.LoRARequest`."""

    @model_validator(mode="after")
    def _check_settings(self) -> Self:
        """Raise now what would be raised at the first call."""
        normalize = True if self.normalize is None else self.normalize
        PoolingParams(pooling=self.pooling or "mean", normalize=normalize, dimensions=self.dimensions)
        return self

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        """A vector for each text, in order."""
        return self._embed([self.embed_instruction + text for text in texts])

    def embed_query(self, text: str) -> list[float]:
        """The vector of a text that documents are looked for with."""
        return self._embed([self.query_instruction + text])[0]

    async def aembed_documents(self, texts: list[str]) -> list[list[float]]:
        """`embed_documents` for event loops."""
        return await self._aembed([self.embed_instruction + text for text in texts])

    async def aembed_query(self, text: str) -> list[float]:
        """`embed_query` for event loops."""
        return (await self._aembed([self.query_instruction + text]))[0]

    @property
    def _options(self) -> dict[str, Any]:
        names = ("pooling", "normalize", "dimensions", "truncate_prompt_tokens", "timeout", "lora_request")
        return {name: getattr(self, name) for name in names}

    def _embed(self, texts: list[str]) -> list[list[float]]:
        return _vectors(self._engine(self.model).embed(texts, use_tqdm=False, **self._options))

    async def _aembed(self, texts: list[str]) -> list[list[float]]:
        llm = await self._aengine(self.model)
        return _vectors(await llm.aembed(texts, **self._options))


def _vectors(outputs: list[EmbeddingRequestOutput]) -> list[list[float]]:
    return [output.outputs.embedding for output in outputs]
