"""Multi-head latent attention: pages hold what keys and values are made of, a small vector per token.

A key head is `[W_key c, r]` and a value head `W_value c`, with the token's latent c and rotary part r the same for all
heads. So `q · k = [W_key^T q, q_rotary] · [c, r]`: queries are taken to the latents' space, where there is a single key
and value head, and what comes out is taken back by W_value. Keys and values of past tokens are never expanded. Among
latents the key of a token is `[c, r]` and its value c, the first numbers of the key: so keys are all that is stored.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}


class LatentShape(NamedTuple):
    """Sizes of a layer whose module has the matrix in `kv_b_proj`: per head, rows for the key, then for the value."""

    num_heads: int
    rank: int
    num_rotary: int
    key_size: int
    """Of a key head, without its rotary part."""
    value_size: int

    def absorb(self, module: nn.Module, query: Tensor, latent: Tensor, rotary: Tensor) -> tuple[Tensor, Tensor]:
        """query [B, H, S, key_size + rotary], latent [B, 1, S, rank], rotary [B, 1, S, rotary] -> query and key among
        latents: [B, H, S, rank + rotary] and [B, 1, S, rank + rotary]."""
        query, query_rotary = torch.split(query, [self.key_size, self.num_rotary], dim=-1)
        query = torch.matmul(query, self._weight(module)[:, : self.key_size])
        return torch.cat([query, query_rotary], dim=-1), torch.cat([latent, rotary.to(latent.dtype)], dim=-1)

    def expand(self, module: nn.Module, out: Tensor) -> Tensor:
        """[B, S, H, rank] -> [B, S, H, value_size]"""
        by_head = out.transpose(1, 2)
        return torch.matmul(by_head, self._weight(module)[:, self.key_size :].transpose(1, 2)).transpose(1, 2)

    def _weight(self, module: nn.Module) -> Tensor:
        """[H, key_size + value_size, rank]; read at each call, since it may be trained or moved."""
        projection: Any = module.kv_b_proj
        weight: Tensor = projection.weight
        return weight.view(self.num_heads, self.key_size + self.value_size, self.rank)

    @classmethod
    def of(cls, latent: Tensor, rotary: Tensor, key: Tensor, value: Tensor) -> Self:
        num_rotary = rotary.shape[3]
        return cls(key.shape[1], latent.shape[3], num_rotary, key.shape[3] - num_rotary, value.shape[3])


def latent_shape(module: nn.Module, latent: Tensor, rotary: Tensor, key: Tensor, value: Tensor) -> LatentShape | None:
    """What a layer is that gave its cache `latent` and `rotary` and then attended with `key` and `value`, if these were
    made as this module's docstring says; each [1, heads, T, size]."""
    projection = getattr(module, "kv_b_proj", None)
    weight = getattr(projection, "weight", None)
    shape = LatentShape.of(latent, rotary, key, value)
    num_rows = shape.num_heads * (shape.key_size + shape.value_size)
    if not isinstance(weight, Tensor) or weight.shape != (num_rows, shape.rank) or weight.dtype not in _TOLERANCE:
        return None
    if latent.shape[1] != 1 or rotary.shape[1] != 1 or getattr(projection, "bias", None) is not None:
        return None
    expanded = torch.einsum("btr,hnr->bhtn", latent[:, 0], weight.view(shape.num_heads, -1, shape.rank))
    right_key = torch.cat([expanded[..., : shape.key_size], rotary.expand(-1, shape.num_heads, -1, -1)], dim=-1)
    tolerance = _TOLERANCE[weight.dtype]
    is_so = _is_close(right_key, key, tolerance) and _is_close(expanded[..., shape.key_size :], value, tolerance)
    return shape if is_so else None


def _is_close(one: Tensor, other: Tensor, tolerance: float) -> bool:
    one, other = one.float(), other.float()
    return bool((one - other).abs().max() <= tolerance * other.abs().max())
