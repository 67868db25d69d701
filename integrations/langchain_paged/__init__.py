"""LangChain models and embeddings on a paged-backend engine in this process.

>>> from langchain_paged import ChatPaged
>>> ChatPaged(model="demo", max_tokens=30).invoke("Name a colour.").content
"""

from __future__ import annotations

from importlib.util import find_spec

from paged_backend import MissingExtraError

if find_spec("langchain_core") is None:
    raise MissingExtraError("langchain_paged", "langchain")

from langchain_paged.chat_models import ChatPaged
from langchain_paged.embeddings import PagedEmbeddings
from langchain_paged.llms import PagedLLM

__all__ = ["ChatPaged", "PagedEmbeddings", "PagedLLM"]
