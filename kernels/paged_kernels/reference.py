"""What every kernel of this package computes, in plain torch: the definition that the fast ones are tested against.

Shapes use one set of letters: T tokens, S sequences, H query heads, K key/value heads, D size of a query or key head,
Dv size of a value head, E size of a hidden state, I size of one inside an MLP.
"""

import functools
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import gelu, silu

from paged_kernels.adapters import LowRankAdapters, RowIndex


def store_kv(key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """Write the keys and values of new tokens into their slots of the paged cache.

    Args:
        key: [T, K, D]
        value: [T, K, Dv]
        k_cache: [num_blocks, K, block_size, D]; one head's slots in a block are contiguous.
        v_cache: [num_blocks, K, block_size, Dv]
        slot_mapping: [T] int64, `block_id * block_size + offset` of each token; -1 writes nothing.
    """
    block_size = k_cache.shape[2]
    written = slot_mapping >= 0
    slots = slot_mapping[written]
    k_cache[slots // block_size, :, slots % block_size] = key[written]
    v_cache[slots // block_size, :, slots % block_size] = value[written]


def paged_attention(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    *,
    scale: float,
    window: int | None = None,
    chunk: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
) -> Tensor:
    """Causal attention of each sequence's last tokens to all its cached ones, themselves included.

    Cache slots and block table entries of positions that no query can see are never read.

    Args:
        query: [T, H, D], the sequences one after the other. H is a multiple of K.
        k_cache: [num_blocks, K, block_size, D]
        v_cache: [num_blocks, K, block_size, Dv]
        block_tables: [S, max_blocks] int32
        query_start_loc: [S + 1] int32; sequence s has the queries from entry s up to entry s + 1, perhaps none.
        seq_lens: [S] int32, the cached tokens of each sequence, those of this step's queries included.
        scale: factor of the logits.
        window: a query sees the key at its own position and the `window - 1` before it.
        chunk: a query sees only keys of its own chunk, where chunks are `chunk` positions long and start at 0.
        softcap: bound of the scaled logits x, which become `softcap * tanh(x / softcap)`.
        sinks: [H], a logit per head that takes part in the softmax and has no value.
        alibi_slopes: [H], adds `slope * (key position - query position)` to the logits.

    Returns:
        [T, H, Dv] in the type of `query`; softmax and sums are float32.
    """
    num_heads, num_kv_heads = query.shape[1], k_cache.shape[1]
    out = query.new_empty(query.shape[0], num_heads, v_cache.shape[3])
    starts = query_start_loc.tolist()
    for s, seq_len in enumerate(seq_lens.tolist()):
        num_queries = starts[s + 1] - starts[s]
        if num_queries == 0:
            continue
        q_pos = torch.arange(seq_len - num_queries, seq_len, device=query.device)
        first = _first_visible(q_pos, window, chunk)
        k_pos = torch.arange(int(first[0]), seq_len, device=query.device)
        k = _gather(k_cache, block_tables[s], k_pos).repeat_interleave(num_heads // num_kv_heads, 0)
        v = _gather(v_cache, block_tables[s], k_pos).repeat_interleave(num_heads // num_kv_heads, 0)
        q = query[starts[s] : starts[s + 1]].float().transpose(0, 1)

        logits = q @ k.transpose(1, 2) * scale  # [H, queries, keys]
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        if alibi_slopes is not None:
            logits = logits + alibi_slopes.float()[:, None, None] * (k_pos - q_pos[:, None])
        hidden = (k_pos > q_pos[:, None]) | (k_pos < first[:, None])
        logits = logits.masked_fill(hidden, float("-inf"))
        if sinks is not None:
            sink = sinks.float()[:, None, None].expand(-1, num_queries, 1)
            logits = torch.cat([logits, sink], dim=-1)
        weights = logits.softmax(dim=-1)[..., : len(k_pos)]
        out[starts[s] : starts[s + 1]] = (weights @ v).transpose(0, 1).to(out.dtype)
    return out


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x @ weight.T + bias`, with float32 products and sums whatever the types, rounded once, to the type of `x`.

    Args:
        x: [M, K]
        weight: [N, K]; on a CPU it has to be contiguous.
        bias: [N]

    Returns:
        [M, N]
    """
    y = x.float() @ weight.float().T
    return (y if bias is None else y + bias.float()).to(x.dtype)


def add_low_rank(out: Tensor, x: Tensor, adapters: LowRankAdapters, rows: RowIndex) -> None:
    """Add to the rows of `out`, each with the pieces of its own adapter, `x @ shrink.T @ expand`.

    Products and sums are float32's whatever the types, and rounded once, to the type of `out`; where many rows are
    multiplied together, the low-rank product may be rounded too.

    Args:
        out: [M, N], changed in place; its rows may be further apart than they are long.
        x: [M, K]
        adapters: at least one of which has a piece.
        rows: of length M.
    """
    for number, pieces in enumerate(adapters.pieces):
        chosen = torch.from_numpy(np.flatnonzero(rows.index == number)).to(x.device)
        for first, shrink, expand in pieces:
            columns = out[:, first : first + expand.shape[1]]
            added = (x[chosen].float() @ shrink.float().T) @ expand.float()
            columns[chosen] = (columns[chosen].float() + added).to(out.dtype)


def _first_visible(q_pos: Tensor, window: int | None, chunk: int | None) -> Tensor:
    """The first key position that the query at each position sees."""
    first = torch.zeros_like(q_pos)
    if window is not None:
        first = torch.maximum(first, q_pos - window + 1)
    if chunk is not None:
        first = torch.maximum(first, q_pos // chunk * chunk)
    return first


def _gather(cache: Tensor, block_table: Tensor, positions: Tensor) -> Tensor:
    """One sequence's rows of the cache at these positions, [K, positions, head size] in float32."""
    block_size = cache.shape[2]
    blocks = block_table[positions // block_size].long()
    return cache[blocks, :, positions % block_size].float().transpose(0, 1)


def add_rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, *, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """The sum of `x` and `residual`, and that sum divided by its root mean square and scaled.

    The sum is rounded before it is used. With an offset of 0 the quotient is rounded before it is scaled, as Llama has
    it; with another one only the result is, as Gemma has it with 1.

    Args:
        x: [..., E]; None of its leading sizes matters.
        residual: as `x`, contiguous, or None for zero. It is overwritten with the sum.
        weight: [E], what the quotient is scaled by, less `offset`.
        eps: is added to the mean square.

    Returns:
        The scaled quotient, new, and the sum: `residual`, or `x` itself if that is None.
    """
    total = x if residual is None else residual.add_(x)
    wide = total.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if offset == 0:
        normed = normed.to(x.dtype).float()
    return (normed * (offset + weight.float())).to(x.dtype), total


def rotary(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> None:
    """Turn the first R numbers of each head by the angles of its token, in place: `x * cos + turned(x) * sin`.

    Rounded once, where eager models round each product.

    Args:
        query: [T, H, D]; the numbers of a head are contiguous.
        key: [T, K, D], likewise.
        cos: [T, R], of any type. R is even.
        sin: [T, R]
        interleaved: number 2i is turned with number 2i + 1 (as in Cohere), not number i with number i + R/2 (Llama).
    """
    for heads in (query, key):
        part = heads[..., : cos.shape[1]]
        x = part.float()
        if interleaved:
            turned = torch.stack([-x[..., 1::2], x[..., ::2]], dim=-1).flatten(-2)
        else:
            low, high = x.chunk(2, dim=-1)
            turned = torch.cat([-high, low], dim=-1)
        part.copy_(x * cos.float()[:, None] + turned * sin.float()[:, None])


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": silu,
    "gelu_tanh": functools.partial(gelu, approximate="tanh"),
}


def silu_and_mul(gate_up: Tensor, *, activation: str = "silu") -> Tensor:
    """The activation of the first half of each row, times the second half; rounded once where eager models round twice.

    Args:
        gate_up: [T, 2 * I]
        activation: "silu" or "gelu_tanh", GELU with its approximation by tanh.

    Returns:
        [T, I] in the type of `gate_up`.
    """
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (_ACTIVATIONS[activation](gate) * up).to(gate_up.dtype)


def mask_logits(logits: Tensor, rows: Tensor, bitmask: Tensor) -> None:
    """Make the logits of what is not allowed minus infinity, in place.

    Args:
        logits: [S, V] float32
        rows: [R] int64, the rows to change, each once.
        bitmask: [R, W] int32 with 32 * W >= V: token t of a row is allowed if bit t % 32 of number t // 32 is set.
    """
    bits = bitmask.to(logits.device)[:, :, None] >> torch.arange(32, device=logits.device)
    banned = (bits & 1 == 0).flatten(1)[:, : logits.shape[1]]
    rows = rows.to(logits.device)
    logits[rows] = logits[rows].masked_fill(banned, -torch.inf)
