"""What the attention libraries would compute, by the definition, for calls that their kernels would take."""

from __future__ import annotations

import importlib.machinery
import sys
import types
from typing import Any

import pytest
import torch
from torch import Tensor

from paged_kernels import reference


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Tensor:
    """flash-attn 2.8's, with a block table: k and v are [blocks, block size, K, D], of any strides but the last."""
    assert causal and softmax_scale is not None and block_table is not None and window_size[1] in (-1, 0)
    assert k.shape == v.shape and k.shape[1] % 256 == 0 and k.shape[3] % 8 == 0
    assert q.stride(2) == k.stride(3) == v.stride(3) == 1
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == block_table.dtype == torch.int32
    assert int(cu_seqlens_q[-1]) == len(q)
    seq_lens = cu_seqlens_k.diff()
    assert int(cu_seqlens_q.diff().max()) <= max_seqlen_q and int(seq_lens.max()) <= max_seqlen_k
    return reference.paged_attention(
        q,
        k.transpose(1, 2),
        v.transpose(1, 2),
        block_table,
        cu_seqlens_q,
        seq_lens,
        scale=softmax_scale,
        window=None if window_size[0] < 0 else window_size[0] + 1,
        softcap=softcap or None,
    )


class BatchPrefillWithPagedKVCacheWrapper:
    """flashinfer's; the arguments of `plan` may be on the host, but for the blocks' numbers."""

    def __init__(self, float_workspace_buffer: Tensor, kv_layout: str = "NHD") -> None:
        assert float_workspace_buffer.dtype == torch.uint8 and kv_layout == "HND"
        self.num_plans = 0

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: torch.dtype = torch.float16,
        kv_data_type: torch.dtype | None = None,
    ) -> None:
        tensors = (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        assert causal and all(tensor.dtype == torch.int32 for tensor in tensors)
        assert bool(((paged_kv_last_page_len >= 1) & (paged_kv_last_page_len <= page_size)).all())
        nums_blocks = paged_kv_indptr.diff()
        assert int(paged_kv_indptr[-1]) == len(paged_kv_indices)
        tables = torch.nn.utils.rnn.pad_sequence(
            list(torch.split(paged_kv_indices, nums_blocks.tolist())), batch_first=True
        )
        seq_lens = (nums_blocks - 1) * page_size + paged_kv_last_page_len
        self._shapes = (num_qo_heads, num_kv_heads, head_dim_qk, page_size)
        self._batch = (tables, qo_indptr, seq_lens.int())
        window = None if window_left < 0 else window_left + 1
        self._options: dict[str, Any] = {"scale": sm_scale, "window": window, "softcap": logits_soft_cap or None}
        self.num_plans += 1

    def run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor]) -> Tensor:
        keys, values = paged_kv_cache
        assert self._shapes == (q.shape[1], keys.shape[1], q.shape[2], keys.shape[2])
        assert keys.is_contiguous() and values.is_contiguous()
        return reference.paged_attention(q, keys, values, *self._batch, **self._options)


def install(patch: pytest.MonkeyPatch) -> None:
    """As if both libraries were there."""
    contents = {
        "flash_attn": {"flash_attn_varlen_func": flash_attn_varlen_func},
        "flashinfer": {"BatchPrefillWithPagedKVCacheWrapper": BatchPrefillWithPagedKVCacheWrapper},
    }
    for name, content in contents.items():
        module = types.ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        module.__dict__.update(content)
        patch.setitem(sys.modules, name, module)
