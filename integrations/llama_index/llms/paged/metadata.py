"""What LlamaIndex may know of a model before it is loaded, and what has to wait."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llama_index.core.base.llms.types import LLMMetadata
from llama_index.core.bridge.pydantic import PrivateAttr, model_serializer


class PagedMetadata(LLMMetadata):
    """Metadata whose `context_window` is found out when it is read.

    Agents and chat engines ask on the event loop whether a model chats; that must not wait for the model to be loaded.
    A dump holds what is known by then.
    """

    _find_context_window: Callable[[], int] | None = PrivateAttr(default=None)

    @classmethod
    def make(cls, find_context_window: Callable[[], int], **known: Any) -> PagedMetadata:
        metadata = cls(**known)
        del metadata.__dict__["context_window"]
        metadata._find_context_window = find_context_window
        return metadata

    def __getattr__(self, name: str) -> Any:
        """Called only for what is not there, which the context window is at first."""
        if name != "context_window":
            return super().__getattr__(name)  # type: ignore[misc]
        assert self._find_context_window is not None
        self.context_window = self._find_context_window()
        return self.context_window

    @model_serializer
    def _what_is_known(self) -> dict[str, Any]:
        return dict(self.__dict__)
