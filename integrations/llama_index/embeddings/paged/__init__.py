"""LlamaIndex embeddings from a paged-backend engine in this process.

>>> from llama_index.embeddings.paged import PagedEmbedding
>>> PagedEmbedding(model="demo").get_text_embedding("a red apple")
"""

from __future__ import annotations

from importlib.util import find_spec

from paged_backend import MissingExtraError

if find_spec("llama_index.core") is None:
    raise MissingExtraError("llama_index.embeddings.paged", "llama-index")

from llama_index.embeddings.paged.base import PagedEmbedding

__all__ = ["PagedEmbedding"]
