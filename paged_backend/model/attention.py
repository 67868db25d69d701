"""How transformers' own modelling code reaches the paged KV cache: one function, registered with AttentionInterface."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from paged_backend.errors import ModelError
from paged_backend.model.attention_backends import AttentionBackend, StepAttention
from paged_backend.model.latents import LatentShape, latent_shape
from paged_kernels import reference
from paged_kernels.transfers import to_device

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
    source: int | None = None
    """The layer whose keys and values this one attends to as well, so that it has none of its own."""
    latent: LatentShape | None = None
    """Keys and values are kept as latents: one head, keys of which the values are the first part."""
    has_sinks: bool = False
    group: int = 0
    """Whose block tables it uses."""

    @property
    def is_stored(self) -> bool:
        return self.source is None

    @property
    def has_own_values(self) -> bool:
        return self.latent is None

    def kernel_options(self, sinks: Tensor | None) -> dict[str, Any]:
        return {
            "scale": self.scale,
            "window": self.window,
            "chunk": self.chunk,
            "softcap": self.softcap,
            "sinks": sinks,
            "value_size": None if self.has_own_values else self.value_head_size,
        }


class BatchShape(NamedTuple):
    """What kernels' launches may depend on."""

    num_decodes: int
    """How many of the first sequences compute one token each."""
    max_query_len: int
    """No sequence computes more tokens than this."""
    max_seq_len: int
    """No sequence has more tokens than this."""


class HostBatch(NamedTuple):
    """What AttentionMetadata holds, where no device has to be waited for."""

    block_tables: npt.NDArray[np.int32]
    query_start_loc: npt.NDArray[np.int32]
    seq_lens: npt.NDArray[np.int32]

    @property
    def shape(self) -> BatchShape:
        lengths = np.diff(self.query_start_loc)
        num_decodes = len(lengths) if (lengths == 1).all() else int((lengths != 1).argmax())
        return BatchShape(num_decodes, int(lengths.max()), int(self.seq_lens.max()))


@dataclasses.dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """Where the tokens of one step are for the layers of one group. T tokens of S sequences, packed one sequence after
    the other."""

    slot_mapping: Tensor
    """[T] int64: where each token's key and value go."""
    block_tables: Tensor
    """[S, most blocks] int32, padded with 0."""
    query_start_loc: Tensor
    """[S + 1] int32: where each sequence's tokens begin in the pack."""
    seq_lens: Tensor
    """[S] int32: tokens of each sequence so far, those of this step included."""
    batch: HostBatch | BatchShape
    """Only its shape where a graph is captured, which knows no requests."""
    group: int = 0
    """Its number."""

    @property
    def shape(self) -> BatchShape:
        return self.batch if isinstance(self.batch, BatchShape) else self.batch.shape

    @property
    def host(self) -> HostBatch:
        assert isinstance(self.batch, HostBatch)
        return self.batch


@dataclasses.dataclass(frozen=True, slots=True)
class StepMetadata:
    """Where the tokens of one step are, for the layers of all G groups; see AttentionMetadata."""

    slot_mapping: Tensor
    """[G, T]"""
    block_tables: Tensor
    """[G, S, most blocks]"""
    query_start_loc: Tensor
    seq_lens: Tensor
    groups: list[AttentionMetadata]
    """The same for each of them."""

    @classmethod
    def of(
        cls,
        slot_mapping: npt.NDArray[np.int64],
        block_tables: npt.NDArray[np.int32],
        query_start_loc: npt.NDArray[np.int32],
        seq_lens: npt.NDArray[np.int32],
        device: torch.device,
    ) -> Self:
        slots, tables, starts, lengths = (
            to_device(array, device) for array in (slot_mapping, block_tables, query_start_loc, seq_lens)
        )
        batches = [HostBatch(table, query_start_loc, seq_lens) for table in block_tables]
        return cls.shared(slots, tables, starts, lengths, batches)

    @classmethod
    def shared(
        cls,
        slot_mapping: Tensor,
        block_tables: Tensor,
        query_start_loc: Tensor,
        seq_lens: Tensor,
        batches: Sequence[HostBatch | BatchShape],
    ) -> Self:
        """Of tensors on the device, and what is known of each group on the host."""
        others = query_start_loc, seq_lens
        groups = [
            AttentionMetadata(slot_mapping[group], block_tables[group], *others, batch, group)
            for group, batch in enumerate(batches)
        ]
        return cls(slot_mapping, block_tables, *others, groups)


class AttentionLayers(Protocol):
    """What an attention layer calls, once per layer in the order the model runs them."""

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        """query [B, H, S, D], key [B, K, S, D], value [B, K, S, Dv] -> [B, S, H, Dv]."""
        ...

    def update(self, layer_idx: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """What a model with a cache gives it before it attends, [B, K, S, D] each, and what it goes on with."""
        ...


class LayerRecorder:
    """Attends densely to one sequence, and writes down what each layer asked for."""

    def __init__(self, *, latents: bool = True) -> None:
        """`latents`: whether layers may keep these in the place of keys and values."""
        self._keeps_latents = latents
        self.specs: list[LayerSpec] = []
        self._seen: list[tuple[Tensor, Tensor]] = []
        """All keys and values, kept so that no two of them are in the same memory by chance."""
        self._latents: tuple[Tensor, Tensor] | None = None

    def update(self, layer_idx: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        self._latents = (key, value) if self._keeps_latents else None
        return key, value

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        spec = _layer_spec(module, query, key, value, options)
        latents, self._latents = self._latents, None
        latent = latents and latent_shape(module, *latents, key, value)
        self.specs.append(latent_spec(spec, latent) if latent else spec._replace(source=self._source(key, value)))
        self._seen.append((key, value))
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

    def _source(self, key: Tensor, value: Tensor) -> int | None:
        """The layer that stores these very tensors, if one does."""
        for index, seen in enumerate(self._seen):
            if _is_same(seen[0], key) and _is_same(seen[1], value):
                return index
        return None


class PagedLayers:
    """Stores each layer's keys and values in the KV cache, then attends to them through the block tables."""

    def __init__(
        self,
        specs: list[LayerSpec],
        kv_cache: list[LayerCache],
        metadata: StepMetadata,
        backend: AttentionBackend,
    ) -> None:
        self.metadata = metadata
        steps = [backend.step(group) for group in metadata.groups]
        self._layers = zip(specs, kv_cache, [steps[spec.group] for spec in specs], strict=True)
        self._latents: tuple[Tensor, Tensor] | None = None

    def update(self, layer_idx: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        self._latents = (key, value)
        return key, value

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        # Sinks are a parameter of the model, which may be trained or moved, so they are read at each call.
        spec, cache, step = next(self._layers)
        batch_size, _, num_tokens, _ = query.shape
        if spec.latent is None:
            out = _attend(spec, cache, step, _packed(query), _packed(key), _packed(value), _sinks(options))
            return out.view(batch_size, num_tokens, *out.shape[1:])
        assert self._latents is not None
        query, key = spec.latent.absorb(module, query, *self._latents)
        out = _attend(spec, cache, step, _packed(query), _packed(key), None, _sinks(options))
        return spec.latent.expand(module, out.view(batch_size, num_tokens, *out.shape[1:]))

    def attend_packed(self, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None = None) -> Tensor:
        """query [T, H, D], key [T, K, D], value [T, K, Dv] -> [T, H, Dv]; sinks [H]."""
        return _attend(*next(self._layers), query, key, value, sinks)


def _attend(
    spec: LayerSpec,
    cache: LayerCache,
    step: StepAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    sinks: Tensor | None,
) -> Tensor:
    if spec.is_stored:
        if cache.key_scales is None:  # some models compute rotary positions, and so keys, in float32
            dtype = cache.keys.dtype
            key, value = key.to(dtype), None if value is None else value.to(dtype)
        step.store(cache, key, value)
    return step.attend(spec, cache, query, sinks)


def _packed(heads: Tensor) -> Tensor:
    """[B, H, S, D] -> [T, H, D]"""
    return heads.transpose(1, 2).flatten(0, 1)


def _is_same(one: Tensor, other: Tensor) -> bool:
    return one.data_ptr() == other.data_ptr() and one.shape == other.shape and one.stride() == other.stride()


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
    return _layers.get().attend(module, query, key, value, attention_mask=attention_mask, **options), None


AttentionInterface.register(PAGED, _forward)


def latent_spec(spec: LayerSpec, latent: LatentShape) -> LayerSpec:
    """A layer's, once its keys and values are kept as latents."""
    return spec._replace(
        num_kv_heads=1, head_size=latent.rank + latent.num_rotary, value_head_size=latent.rank, latent=latent
    )


def _layer_spec(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]) -> LayerSpec:
    for name in ("attention_mask", "position_bias", "indices", "block_indices"):
        if options.get(name) is not None:
            raise ModelError(f"{type(module).__name__} wants attention with its own {name}")
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
        has_sinks=_sinks(options) is not None,
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
