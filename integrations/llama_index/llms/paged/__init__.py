"""LlamaIndex on a paged-backend engine in this process.

>>> from llama_index.llms.paged import Paged
>>> Paged(model="demo", max_tokens=30).complete("Name a colour.").text
"""

from __future__ import annotations

from importlib.util import find_spec

from paged_backend import MissingExtraError

if find_spec("llama_index.core") is None:
    raise MissingExtraError("llama_index.llms.paged", "llama-index")

from llama_index.llms.paged.base import Paged

__all__ = ["Paged"]
