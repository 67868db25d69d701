"""The common dense decoder on fused kernels: a second way to run models that are built like Llama.

RMSNorm, rotary positions, grouped-query attention and a gated MLP, with the options of the classes in `_CLASSES`. It is
built from the loaded transformers model and must agree with it (self_check.py); every other model runs on
transformers' own code.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM

from paged_backend.model.attention import LayerSpec, PagedLayers
from paged_backend.model.kv_cache import LayerCache
from paged_backend.model.linear import MOST_ROWS, Linear, PackedLinear
from paged_backend.model.mapped_files import MappedFiles, trim_heap
from paged_kernels import add_rms_norm, are_interpreted, rotary, silu_and_mul
from paged_kernels.stack import AttentionOfLayer, LayerStack, LayerWeights, Matrix, StackOptions

_CLASSES = (LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM)
_LINEARS = ("_proj", "lm_head")
_DTYPES = {
    "cpu": (torch.float32, torch.bfloat16),
    "cuda": (torch.float32, torch.bfloat16, torch.float16),
}
_FIXED_ROTATIONS = ("default", "linear", "llama3", "yarn")
"""Those that do not depend on how long a sequence is."""
_LEAST_ANGLES = 1024  # known at least
Apply = Callable[[Tensor], Tensor]
"""A linear layer."""
_MODULES = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "output": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}


@dataclasses.dataclass(frozen=True, slots=True)
class _Norm:
    weight: Tensor
    eps: float

    @classmethod
    def of(cls, module: Any) -> Self:
        return cls(module.weight, module.variance_epsilon)

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The sum of both, normalised, and the sum."""
        return add_rms_norm(x, residual, self.weight, self.eps)


@dataclasses.dataclass(frozen=True, slots=True)
class _Layer:
    head_size: int
    num_heads: list[int]
    """Of query, key and value."""
    attention_norm: _Norm
    qkv: Apply
    q_norm: _Norm | None
    k_norm: _Norm | None
    output: Apply
    mlp_norm: _Norm
    gate_up: Apply
    down: Apply

    def weights(self) -> LayerWeights | None:
        """As a stack of layers takes them, if our kernels multiply."""
        matrices = []
        for linear in (self.qkv, self.output, self.gate_up, self.down):
            if not isinstance(linear, Linear) or not linear.is_ours:
                return None
            matrices.append(Matrix(linear.weight, linear.bias))
        qkv, output, gate_up, down = matrices
        q_norm, k_norm = (None if norm is None else norm.weight for norm in (self.q_norm, self.k_norm))
        norms = self.attention_norm.weight, self.mlp_norm.weight
        return LayerWeights(norms[0], qkv, q_norm, k_norm, output, norms[1], gate_up, down)


class _Angles:
    """cos and sin [T, D] of positions, which on a CPU are looked up: what the model's module does costs a tenth of a
    millisecond at each step."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._is_fixed = getattr(module, "rope_type", None) in _FIXED_ROTATIONS
        self._known: tuple[Tensor, Tensor] | None = None

    def __call__(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Of the type of `x`."""
        if not self._is_fixed or x.device.type != "cpu":
            return self._computed(x, positions)
        end = int(positions.numpy().max()) + 1
        if self._known is None or len(self._known[0]) < end:
            self._known = self._computed(x, torch.arange(max(2 * end, _LEAST_ANGLES)))
        cos, sin = self._known
        return cos[positions], sin[positions]

    def _computed(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = self._module(x, positions[None])
        return cos[0], sin[0]


class FusedDecoder:
    """Runs a packed step with one weight for query, key and value, one for gate and up, and fused small operations.

    The merged weights take the place of the separate ones, which become views of them, so nothing is held twice.
    """

    def __init__(self, model: Any) -> None:
        decoder, config = model.model, model.config
        self._embed: nn.Module = decoder.embed_tokens
        self._angles = _Angles(decoder.rotary_emb)
        self._norm = _Norm.of(decoder.norm)
        self._lm_head: Apply = Linear.of(model.lm_head)
        self._activation = _ACTIVATIONS[config.hidden_act]
        files = MappedFiles()
        self._layers = [_layer(layer, files) for layer in decoder.layers]
        self._stack: LayerStack | None = None

    def stack_layers(self, specs: Sequence[LayerSpec], kv_cache: Sequence[LayerCache]) -> None:
        """From now on compute all layers in one call, over this cache, if they are alike and our kernels multiply."""
        weights = [weights for layer in self._layers if (weights := layer.weights()) is not None]
        if are_interpreted() or len(weights) < len(self._layers) or not LayerStack.can_hold(weights):
            return
        attention = [_attention_of(spec, cache) for spec, cache in zip(specs, kv_cache, strict=True)]
        layer = self._layers[0]
        num_heads, num_kv_heads, _ = layer.num_heads
        options = StackOptions(num_heads, num_kv_heads, layer.head_size, self._norm.eps, self._activation)
        self._stack = LayerStack(weights, attention, self._norm.weight, options)

    @staticmethod
    def can_run(model: Any) -> bool:
        """Whether the model is of a class, and its tensors are of a kind, that this code knows."""
        return (
            type(model) in _CLASSES
            and model.dtype in _DTYPES.get(model.device.type, ())
            and model.config.hidden_act in _ACTIVATIONS
            and all(
                type(module) in (nn.Linear, PackedLinear)
                for name, module in model.named_modules()
                if name.endswith(_LINEARS)
            )
            and all(map(Linear.can_merge, (part for layer in model.model.layers for part in _merged_parts(layer))))
        )

    def with_linears(self, replacement: Callable[[Apply, list[str], bool], Apply]) -> Self:
        """A decoder on the same weights, each of whose linear layers is what is made of the one here, of the names of
        the modules that it stands for, and of whether it sees the rows that are kept only; `lm_head` sees those that
        have logits."""
        decoder = copy.copy(self)
        decoder._stack = None
        decoder._lm_head = replacement(self._lm_head, ["lm_head"], False)
        decoder._layers = []
        for index, layer in enumerate(self._layers):
            changed: dict[str, Any] = {
                name: replacement(
                    getattr(layer, name),
                    [f"model.layers.{index}.{module}" for module in modules],
                    index == len(self._layers) - 1 and name != "qkv",
                )
                for name, modules in _MODULES.items()
            }
            decoder._layers.append(dataclasses.replace(layer, **changed))
        return decoder

    def __call__(self, layers: PagedLayers, input_ids: Tensor, positions: Tensor, keep: Tensor) -> Tensor:
        """Ids [T], positions [T], rows wanted [R] -> their last hidden states [R, E]."""
        x: Tensor = self._embed(input_ids)
        cos, sin = self._angles(x, positions)
        if self._stack is not None and x.shape[0] <= MOST_ROWS:
            return self._stack(x, cos, sin, layers.metadata, keep)
        residual: Tensor | None = None
        for layer in self._layers:
            x, residual = layer.attention_norm(x, residual)
            qkv = layer.qkv(x).view(x.shape[0], -1, layer.head_size)
            query, key, value = torch.split(qkv, layer.num_heads, dim=1)
            query, key = _normed(layer.q_norm, query), _normed(layer.k_norm, key)
            rotary(query, key, cos, sin)
            x = layers.attend_packed(query, key, value).flatten(1)
            if layer is self._layers[-1]:
                x, residual = x[keep], residual[keep]
            x, residual = layer.mlp_norm(layer.output(x), residual)
            x = layer.down(silu_and_mul(layer.gate_up(x), activation=self._activation))
        x, _ = self._norm(x, residual)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states [R, E] -> logits [R, V]."""
        return self._lm_head(hidden)


def _attention_of(spec: LayerSpec, cache: LayerCache) -> AttentionOfLayer:
    keys, values, key_scales, value_scales = cache
    assert values is not None
    visible = spec.scale, spec.window, spec.chunk, spec.softcap
    return AttentionOfLayer(keys, values, key_scales, value_scales, *visible, spec.group)


def _normed(norm: _Norm | None, heads: Tensor) -> Tensor:
    """[T, H, D] with each head normalised, in models that do so."""
    return heads if norm is None else norm(heads.reshape(-1, heads.shape[-1]))[0].view(heads.shape)


def _merged_parts(layer: Any) -> tuple[list[Any], list[Any]]:
    """What becomes one product: query, key and value; gate and up."""
    attention, mlp = layer.self_attn, layer.mlp
    return [attention.q_proj, attention.k_proj, attention.v_proj], [mlp.gate_proj, mlp.up_proj]


def _stored(module: nn.Linear | PackedLinear) -> list[Tensor]:
    """The tensors that hold its weight."""
    return [module.packed.values, module.packed.scales] if isinstance(module, PackedLinear) else [module.weight]


def _layer(layer: Any, files: MappedFiles) -> _Layer:
    attention, mlp = layer.self_attn, layer.mlp
    projections, gate_and_up = _merged_parts(layer)
    num_query_heads, num_kv_heads, _ = (linear.out_features // attention.head_dim for linear in projections)
    separate = [tensor for module in (*projections, *gate_and_up) for tensor in _stored(module)]
    fused = _Layer(
        head_size=attention.head_dim,
        num_heads=[num_query_heads, num_kv_heads, num_kv_heads],
        attention_norm=_Norm.of(layer.input_layernorm),
        qkv=Linear.merged(projections),
        q_norm=_Norm.of(attention.q_norm) if hasattr(attention, "q_norm") else None,
        k_norm=_Norm.of(attention.k_norm) if hasattr(attention, "k_norm") else None,
        output=Linear.of(attention.o_proj),
        mlp_norm=_Norm.of(layer.post_attention_layernorm),
        gate_up=Linear.merged(gate_and_up),
        down=Linear.of(mlp.down_proj),
    )
    files.let_go(separate)
    if isinstance(attention.q_proj, PackedLinear):
        trim_heap()  # the merged weights do not fit in where the separate ones were
    return fused
