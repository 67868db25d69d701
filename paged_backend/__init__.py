"""Batched, paged LLM inference inside the LangChain, LlamaIndex and Hugging Face code you already have.

>>> from paged_backend import LLM, SamplingParams
>>> llm = LLM("demo")
>>> llm.chat([{"role": "user", "content": "Name a colour."}], SamplingParams(max_tokens=20))[0].outputs[0].text

Importing this package is quick: torch and transformers are imported when the first model is loaded.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_MODULE_OF = {
    "LLM": "llm",
    "AsyncStream": "async_stream",
    "Backend": "backend",
    "BeamSearchParams": "beam_search_params",
    "ClassificationOutput": "outputs",
    "ClassificationSupport": "pooling_params",
    "CompletionOutput": "outputs",
    "ConfigError": "errors",
    "EmbeddingOutput": "outputs",
    "EmbeddingRequestOutput": "outputs",
    "EmbeddingSupport": "pooling_params",
    "EncoderBackend": "backend",
    "EngineConfig": "config",
    "EngineDeadError": "errors",
    "EngineError": "errors",
    "EngineStats": "engine.metrics",
    "GrammarError": "errors",
    "Histogram": "histogram",
    "InvalidRequestError": "errors",
    "InvalidToolCall": "outputs",
    "KVCells": "engine.kv_map",
    "KVMap": "engine.kv_map",
    "KVRequest": "engine.kv_map",
    "LoRARequest": "lora",
    "Logprob": "outputs",
    "MissingExtraError": "errors",
    "ModelError": "errors",
    "OverloadedError": "errors",
    "PagedBackendError": "errors",
    "PairScoreOutput": "outputs",
    "PoolingParams": "pooling_params",
    "RepetitionDetection": "sampling_params",
    "RequestHandle": "handle",
    "RequestMetrics": "outputs",
    "RequestOutput": "outputs",
    "RequestOutputKind": "sampling_params",
    "RequestTimeoutError": "errors",
    "RerankOutput": "outputs",
    "SamplingParams": "sampling_params",
    "ScoreOutput": "outputs",
    "SpeculativeConfig": "config",
    "StructuredOutputsParams": "structured_outputs",
    "ToolCall": "outputs",
    "Verdict": "model.ways",
    "available_memory": "model.kv_cache",
    "check_model": "checking",
    "demo_folder": "model.demo",
    "unknown_name": "errors",
}

__all__ = [
    "LLM",
    "AsyncStream",
    "Backend",
    "BeamSearchParams",
    "ClassificationOutput",
    "ClassificationSupport",
    "CompletionOutput",
    "ConfigError",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "EmbeddingSupport",
    "EncoderBackend",
    "EngineConfig",
    "EngineDeadError",
    "EngineError",
    "EngineStats",
    "GrammarError",
    "Histogram",
    "InvalidRequestError",
    "InvalidToolCall",
    "KVCells",
    "KVMap",
    "KVRequest",
    "LoRARequest",
    "Logprob",
    "MissingExtraError",
    "ModelError",
    "OverloadedError",
    "PagedBackendError",
    "PairScoreOutput",
    "PoolingParams",
    "RepetitionDetection",
    "RequestHandle",
    "RequestMetrics",
    "RequestOutput",
    "RequestOutputKind",
    "RequestTimeoutError",
    "RerankOutput",
    "SamplingParams",
    "ScoreOutput",
    "SpeculativeConfig",
    "StructuredOutputsParams",
    "ToolCall",
    "Verdict",
    "available_memory",
    "check_model",
    "demo_folder",
    "unknown_name",
]

if TYPE_CHECKING:
    from paged_backend.async_stream import AsyncStream
    from paged_backend.backend import Backend, EncoderBackend
    from paged_backend.beam_search_params import BeamSearchParams
    from paged_backend.checking import check_model
    from paged_backend.config import EngineConfig, SpeculativeConfig
    from paged_backend.engine.kv_map import KVCells, KVMap, KVRequest
    from paged_backend.engine.metrics import EngineStats
    from paged_backend.errors import (
        ConfigError,
        EngineDeadError,
        EngineError,
        GrammarError,
        InvalidRequestError,
        MissingExtraError,
        ModelError,
        OverloadedError,
        PagedBackendError,
        RequestTimeoutError,
        unknown_name,
    )
    from paged_backend.handle import RequestHandle
    from paged_backend.histogram import Histogram
    from paged_backend.llm import LLM
    from paged_backend.lora import LoRARequest
    from paged_backend.model.demo import demo_folder
    from paged_backend.model.kv_cache import available_memory
    from paged_backend.model.ways import Verdict
    from paged_backend.outputs import (
        ClassificationOutput,
        CompletionOutput,
        EmbeddingOutput,
        EmbeddingRequestOutput,
        InvalidToolCall,
        Logprob,
        PairScoreOutput,
        RequestMetrics,
        RequestOutput,
        RerankOutput,
        ScoreOutput,
        ToolCall,
    )
    from paged_backend.pooling_params import ClassificationSupport, EmbeddingSupport, PoolingParams
    from paged_backend.sampling_params import RepetitionDetection, RequestOutputKind, SamplingParams
    from paged_backend.structured_outputs import StructuredOutputsParams


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
