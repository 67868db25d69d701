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
from paged_kernels.packing import PackedWeight, quantize_rows

LARGEST_STORED = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
"""The types of caches with scales, and what the largest number of each token's head becomes."""


def store_kv(
    key: Tensor,
    value: Tensor | None,
    k_cache: Tensor,
    v_cache: Tensor | None,
    slot_mapping: Tensor,
    *,
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
) -> None:
    """Write the keys and values of new tokens into their slots of the paged cache.

    With scales the cache is int8, float8_e4m3fn or float8_e5m2: each token's head is divided by its largest absolute
    value / the largest number of that type (127, 448 or 57344), rounded to bfloat16, and rounded to the type, ties to
    even.

    Args:
        key: [T, K, D]
        value: [T, K, Dv], or None if values are the first numbers of their keys, and stored with them.
        k_cache: [num_blocks, K, block_size, D]; one head's slots in a block are contiguous.
        v_cache: [num_blocks, K, block_size, Dv], or None if `value` is.
        slot_mapping: [T] int64, `block_id * block_size + offset` of each token; -1 writes nothing.
        k_scales: [num_blocks, K, block_size] bfloat16, what the numbers of each slot are multiples of.
        v_scales: likewise
    """
    block_size = k_cache.shape[2]
    written = slot_mapping >= 0
    slots = slot_mapping[written]
    for given, cache, scales in ((key, k_cache, k_scales), (value, v_cache, v_scales)):
        if given is None or cache is None:
            continue
        rows = given[written]
        if scales is not None:
            wide, largest = rows.float(), LARGEST_STORED[cache.dtype]
            of_rows = (wide.abs().amax(2) / largest).to(scales.dtype)
            scales[slots // block_size, :, slots % block_size] = of_rows
            divisors = torch.where(of_rows == 0, 1.0, of_rows.float())
            rows = (wide / divisors[..., None]).clamp(-largest, largest)
            rows = (rows.round() if cache.dtype == torch.int8 else rows).to(cache.dtype)
        _as_bytes(cache)[slots // block_size, :, slots % block_size] = _as_bytes(rows)


def paged_attention(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor | None,
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
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
    value_size: int | None = None,
) -> Tensor:
    """Causal attention of each sequence's last tokens to all its cached ones, themselves included.

    Cache slots and block table entries of positions that no query can see are never read.

    Args:
        query: [T, H, D], the sequences one after the other. H is a multiple of K.
        k_cache: [num_blocks, K, block_size, D]
        v_cache: [num_blocks, K, block_size, Dv], or None: the first `value_size` numbers of a key are its value.
        block_tables: [S, max_blocks] int32
        query_start_loc: [S + 1] int32; sequence s has the queries from entry s up to entry s + 1, perhaps none.
        seq_lens: [S] int32, the cached tokens of each sequence, those of this step's queries included.
        scale: factor of the logits.
        window: a query sees the key at its own position and the `window - 1` before it.
        chunk: a query sees only keys of its own chunk, where chunks are `chunk` positions long and start at 0.
        softcap: bound of the scaled logits x, which become `softcap * tanh(x / softcap)`.
        sinks: [H], a logit per head that takes part in the softmax and has no value.
        alibi_slopes: [H], adds `slope * (key position - query position)` to the logits.
        k_scales: [num_blocks, K, block_size] bfloat16, by which an int8 or float8 cache is multiplied.
        v_scales: likewise; None if `v_cache` is.
        value_size: Dv if `v_cache` is None, at most D.

    Returns:
        [T, H, Dv] in the type of `query`; softmax and sums are float32.
    """
    num_heads, num_kv_heads = query.shape[1], k_cache.shape[1]
    if v_cache is None:
        v_cache, v_scales = k_cache[..., :value_size], k_scales
    out = query.new_empty(query.shape[0], num_heads, v_cache.shape[3])
    starts = query_start_loc.tolist()
    for s, seq_len in enumerate(seq_lens.tolist()):
        num_queries = starts[s + 1] - starts[s]
        if num_queries == 0:
            continue
        q_pos = torch.arange(seq_len - num_queries, seq_len, device=query.device)
        first = _first_visible(q_pos, window, chunk)
        k_pos = torch.arange(int(first[0]), seq_len, device=query.device)
        k = _gather(k_cache, k_scales, block_tables[s], k_pos).repeat_interleave(num_heads // num_kv_heads, 0)
        v = _gather(v_cache, v_scales, block_tables[s], k_pos).repeat_interleave(num_heads // num_kv_heads, 0)
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


def packed_linear(x: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> Tensor:
    """`linear` with packed weights; if they are rounded, on inputs that are rounded to 8 bits, row by row.

    Args:
        x: [M, K]; bfloat16 if the weights are.
        weight: [N, K]
        bias: [N]

    Returns:
        [M, N] in the type of `x`
    """
    if weight.bits == 16:
        return linear(x, weight.unpack(), bias)
    numbers, row_scales = quantize_rows(x, weight)
    columns = weight.numbers.view(-1, weight.num_groups, numbers.shape[2])
    sums = torch.einsum("tgk,ngk->tng", numbers.double(), columns.double()).float()
    y = (sums * row_scales[..., 0][:, None] * weight.column_scales).sum(-1)[:, : weight.shape[0]]
    return (y if bias is None else y + bias.float()).to(x.dtype)


def _first_visible(q_pos: Tensor, window: int | None, chunk: int | None) -> Tensor:
    """The first key position that the query at each position sees."""
    first = torch.zeros_like(q_pos)
    if window is not None:
        first = torch.maximum(first, q_pos - window + 1)
    if chunk is not None:
        first = torch.maximum(first, q_pos // chunk * chunk)
    return first


def _as_bytes(tensor: Tensor) -> Tensor:
    """The same memory, if its numbers have 8 bits: float8 has few operations on devices."""
    return tensor.view(torch.uint8) if tensor.itemsize == 1 else tensor


def _gather(cache: Tensor, scales: Tensor | None, block_table: Tensor, positions: Tensor) -> Tensor:
    """One sequence's rows of the cache at these positions, [K, positions, head size] in float32."""
    block_size = cache.shape[2]
    blocks = block_table[positions // block_size].long()
    rows = _as_bytes(cache)[blocks, :, positions % block_size].view(cache.dtype).float()
    if scales is not None:
        rows = rows * scales[blocks, :, positions % block_size].float()[..., None]
    return rows.transpose(0, 1)


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


def penalise(logits: Tensor, rows: Tensor, ids: Tensor, repetition: Tensor, subtracted: Tensor) -> None:
    """Penalise N tokens, in place: positive logits are divided by `repetition` and negative ones multiplied with it,
    as in CTRL (arXiv:1909.05858), then `subtracted` is subtracted.

    Args:
        logits: [S, V] float32
        rows: [N] int64, the row of each token.
        ids: [N] int64, each once in a row.
        repetition: [N] float32
        subtracted: [N] float32
    """
    values = logits[rows, ids]
    values = torch.where(values < 0, values * repetition, values / repetition)
    logits[rows, ids] = values - subtracted


def draw(logits: Tensor, temperatures: Tensor, min_p: Tensor, top_k: Tensor, top_p: Tensor, shares: Tensor) -> Tensor:
    """A token per row, each as likely as its softmax among those that `min_p`, then `top_k`, then `top_p` keep.

    `min_p` keeps tokens at least that share as likely as the best one; `top_k` the best so many, and all that tie with
    the last of these; `top_p` the fewest of them that add up to this share of what these two left, of equal tokens the
    lower ids. Where no token is taken away, the draw goes through them in the order of ids, else in that of falling
    logits. A row of NaN gives some token.

    Args:
        logits: [S, V] of any float type.
        temperatures: [S] float64, what logits are divided by; 0 takes the best token, the lowest id of equal ones, as
            do a `top_k` of 1 and a `min_p` of 1.
        min_p: [S] float64; 0 keeps all.
        top_k: [S] int64; 0 or less, or V or more, keeps all.
        top_p: [S] float64; 1 or more keeps all.
        shares: [S] float64 in [0, 1], where each draw falls in what its row keeps.

    Returns:
        [S] int64
    """
    values = logits.double()
    vocab_size = values.shape[1]
    top_k = torch.where((top_k <= 0) | (top_k > vocab_size), vocab_size, top_k)[:, None]
    is_greedy = (temperatures == 0) | (top_k[:, 0] == 1) | (min_p == 1)
    keeps_all = (top_k[:, 0] == vocab_size) & (min_p == 0) & (top_p >= 1)

    ordered, order = values.sort(dim=1, descending=True, stable=True)
    scaled = (ordered - ordered[:, :1]) / torch.where(is_greedy, 1.0, temperatures)[:, None]
    weights = scaled.exp()
    weights = torch.where(weights < min_p[:, None], 0.0, weights)
    weights = torch.where(ordered < ordered.gather(1, top_k - 1), 0.0, weights)
    before = weights.cumsum(1) - weights
    is_in_nucleus = (before < top_p[:, None] * weights.sum(1, keepdim=True)) | (top_p[:, None] >= 1)
    is_in_nucleus[:, 0] = True
    weights = torch.where(is_in_nucleus, weights, 0.0)

    by_id = order.argsort(dim=1)
    order = torch.where(keeps_all[:, None], torch.arange(vocab_size, device=order.device), order)
    weights = torch.where(keeps_all[:, None], weights.gather(1, by_id), weights)
    columns = _first_above(weights.cumsum(1), shares)
    drawn = order.gather(1, columns[:, None])[:, 0]
    return torch.where(is_greedy, values.argmax(1), drawn)


def _first_above(cumulative: Tensor, shares: Tensor) -> Tensor:
    """Per row, the first column whose cumulative weight exceeds the row's share of the last one.

    Such a column adds to the sum, so one of weight 0 is never returned, however the product rounds.
    """
    totals = cumulative[:, -1]
    targets = torch.minimum(shares * totals, totals.nextafter(torch.zeros_like(totals)))
    return (cumulative > targets[:, None]).to(torch.uint8).argmax(dim=1)


def best_logits(logits: Tensor, chosen: Tensor, num: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What log-probabilities are made from: `logits - normaliser` is the log-softmax of a row.

    Args:
        logits: [S, V] of any float type.
        chosen: [S] int64, a token per row.
        num: how many of the best tokens to find, at most V.

    Returns:
        The normalisers [S] float64; the rank of each chosen token, 1 + how many have a larger logit, [S] int64; the
        largest logits, falling, [S, num] float32, and their ids, [S, num] int64, of equal ones the lower ids first.
    """
    values = logits.float()
    ranks = 1 + (values > values.gather(1, chosen[:, None])).sum(1)
    ordered, order = values.sort(dim=1, descending=True, stable=True)
    return values.double().logsumexp(1), ranks, ordered[:, :num], order[:, :num]
