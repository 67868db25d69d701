"""How transformers' own modelling code reaches the paged KV cache: one function, registered with AttentionInterface."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

import paged_kernels
from paged_backend.errors import ModelError
from paged_kernels import reference

if TYPE_CHECKING:
    from paged_backend.model.kv_cache import LayerCache

PAGED = "paged"


class LayerSpec(NamedTuple):
    """What one attention layer needs, resolved once, when the model is loaded."""

    num_kv_heads: int
    head_size: int
    value_head_size: int
    scale: float
    window: int | None
    """Sliding window in tokens, the query's own included."""
    chunk: int | None
    """Chunked attention: tokens see their own chunk of this many only."""
    softcap: float | None

    def kernel_options(self, sinks: Tensor | None) -> dict[str, Any]:
        return {
            "scale": self.scale,
            "window": self.window,
            "chunk": self.chunk,
            "softcap": self.softcap,
            "sinks": sinks,
        }


@dataclasses.dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """Where the tokens of one step are. T tokens of S sequences, packed one sequence after the other."""

    slot_mapping: Tensor
    """[T] int64: where each token's key and value go."""
    block_tables: Tensor
    """[S, most blocks] int32, padded with 0."""
    query_start_loc: Tensor
    """[S + 1] int32: where each sequence's tokens begin in the pack."""
    seq_lens: Tensor
    """[S] int32: tokens of each sequence so far, those of this step included."""


class AttentionLayers(Protocol):
    """What an attention layer calls, once per layer in the order the model runs them."""

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        """query [1, H, T, D], key [1, K, T, D], value [1, K, T, Dv] -> [1, T, H, Dv]."""
        ...


class LayerRecorder:
    """Attends densely to one sequence, and writes down what each layer asked for."""

    def __init__(self) -> None:
        self.specs: list[LayerSpec] = []

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        spec = _layer_spec(module, query, key, value, options)
        self.specs.append(spec)
        T, K, D = query.shape[2], spec.num_kv_heads, spec.head_size
        # One block that holds the whole sequence turns the paged definition into a dense one.
        return reference.paged_attention(
            query[0].transpose(0, 1),
            key.reshape(1, K, T, D),
            value.reshape(1, K, T, spec.value_head_size),
            torch.zeros(1, 1, dtype=torch.int32, device=query.device),
            torch.tensor([0, T], dtype=torch.int32, device=query.device),
            torch.tensor([T], dtype=torch.int32, device=query.device),
            **spec.kernel_options(_sinks(options)),
        )[None]


class PagedLayers:
    """Stores each layer's keys and values in the KV cache, then attends to them through the block tables."""

    def __init__(self, specs: list[LayerSpec], kv_cache: list[LayerCache], metadata: AttentionMetadata) -> None:
        self._metadata = metadata
        self._layers = zip(specs, kv_cache, strict=True)

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        # Sinks are a parameter of the model, which may be trained or moved, so they are read at each call.
        query, key, value = (heads[0].transpose(0, 1) for heads in (query, key, value))
        return self.attend_packed(query, key, value, _sinks(options))[None]

    def attend_packed(self, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None = None) -> Tensor:
        """query [T, H, D], key [T, K, D], value [T, K, Dv] -> [T, H, Dv]; sinks [H]."""
        spec, cache = next(self._layers)
        metadata = self._metadata
        if cache.key_scales is None:  # some models compute rotary positions, and so keys, in float32
            key, value = key.to(cache.keys.dtype), value.to(cache.values.dtype)
        paged_kernels.store_kv(key, value, cache.keys, cache.values, metadata.slot_mapping, **cache.scales)
        return paged_kernels.paged_attention(
            query,
            cache.keys,
            cache.values,
            metadata.block_tables,
            metadata.query_start_loc,
            metadata.seq_lens,
            **spec.kernel_options(sinks),
            **cache.scales,
        )


_layers: ContextVar[AttentionLayers] = ContextVar("paged_attention_layers")


@contextlib.contextmanager
def attention_layers(layers: AttentionLayers) -> Iterator[None]:
    """What the attention layers of a model with attention implementation `paged` call inside this block."""
    token = _layers.set(layers)
    try:
        yield
    finally:
        _layers.reset(token)


def _forward(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """AttentionInterface's signature. Some models drop keyword arguments given to forward(), so the step comes from a
    context variable. No mask function is registered beside it, so that no mask is built."""
    return _layers.get().attend(module, query, key, value, **options), None


AttentionInterface.register(PAGED, _forward)


def _layer_spec(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]) -> LayerSpec:
    for name in ("position_bias", "indices", "block_indices"):
        if options.get(name) is not None:
            raise ModelError(f"{type(module).__name__} wants attention with {name}, which the engine does not have")
    window, chunk = _window_and_chunk(module, options.get("sliding_window"))
    scale = options.get("scaling")
    return LayerSpec(
        num_kv_heads=key.shape[1],
        head_size=key.shape[3],
        value_head_size=value.shape[3],
        scale=query.shape[3] ** -0.5 if scale is None else float(scale),
        window=window,
        chunk=chunk,
        softcap=options.get("softcap"),
    )


def _window_and_chunk(module: nn.Module, window: int | None) -> tuple[int | None, int | None]:
    """The argument first, then `config.layer_types`. `config.sliding_window` alone decides nothing: some models have
    the field and do not use it."""
    config, index = getattr(module, "config", None), getattr(module, "layer_idx", None)
    types = getattr(config, "layer_types", None)
    kind = types[index] if types is not None and isinstance(index, int) and index < len(types) else None
    if window is None and kind in ("sliding_attention", "hybrid_sliding"):
        window = getattr(config, "sliding_window", None)
    chunk = getattr(config, "attention_chunk_size", None) if kind == "chunked_attention" else None
    return window, chunk


def _sinks(options: dict[str, Any]) -> Tensor | None:
    sinks: Tensor | None = options.get("s_aux")
    return options.get("sinks") if sinks is None else sinks
