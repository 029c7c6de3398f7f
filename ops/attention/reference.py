"""Attention in plain PyTorch: the back-end of CPUs, and what the others are tested against.

One sequence after the other through scaled_dot_product_attention. Only slots that hold tokens of
the sequence are read.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tp_runtime.ops.attention.backend import AttentionBackend
from tp_runtime.ops.attention.metadata import DecodeMetadata, PrefillMetadata


class ReferenceBackend(AttentionBackend):
    """Any device, dtype, head size, block size and window. Reads lengths on the host."""

    name = "reference"
    graph_safe = False

    @classmethod
    def supports(
        cls,
        head_size: int,
        dtype: torch.dtype,
        block_size: int | None,
        window: int | None,
        device: torch.device,
    ) -> str | None:
        return None

    @classmethod
    def default_block_size(cls) -> int:
        return 16

    def prefill(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        meta: PrefillMetadata,
        scale: float,
        window: int | None,
    ) -> Tensor:
        out = q.new_zeros(q.shape)
        starts = meta.cu_seqlens_q.tolist()
        for index, context in enumerate(meta.context_lens.tolist()):
            new = slice(starts[index], starts[index + 1])
            if new.start == new.stop:
                continue
            keys, values = k[new], v[new]
            if meta.block_tables is not None:
                keys = cached_tokens(k_cache, meta.block_tables[index], 0, context)
                values = cached_tokens(v_cache, meta.block_tables[index], 0, context)
            out[new] = causal_attention(q[new], keys, values, scale, window)
        return out

    def decode(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        meta: DecodeMetadata,
        scale: float,
        window: int | None,
    ) -> Tensor:
        out = q.new_zeros(q.shape)
        grouped = q.unflatten(1, (k_cache.shape[2], -1))
        for row, context in enumerate(meta.context_lens.tolist()):
            if context == 0:
                continue
            first = 0 if window is None else max(0, context - window)
            keys = cached_tokens(k_cache, meta.block_tables[row], first, context)
            values = cached_tokens(v_cache, meta.block_tables[row], first, context)
            # The query heads of a group take the place of positions: [1, KV, group, D].
            out[row] = F.scaled_dot_product_attention(
                grouped[row].unsqueeze(0),
                keys.transpose(0, 1).unsqueeze(0),
                values.transpose(0, 1).unsqueeze(0),
                scale=scale,
            ).flatten(0, 2)
        return out


def causal_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
    """One sequence: q [Lq, H, D] are the last of the Lk tokens of k and v [Lk, KV, D].

    Returns [Lq, H, D]."""
    length_q, length_k = q.shape[0], k.shape[0]
    mask = None
    if length_q != length_k or (window is not None and window < length_k):
        at = torch.arange(length_k - length_q, length_k, device=q.device)[:, None]
        to = torch.arange(length_k, device=q.device)[None, :]
        mask = to <= at
        if window is not None:
            mask &= to > at - window
    out = F.scaled_dot_product_attention(
        q.transpose(0, 1).unsqueeze(0),
        k.transpose(0, 1).unsqueeze(0),
        v.transpose(0, 1).unsqueeze(0),
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return out.squeeze(0).transpose(0, 1)


def cached_tokens(cache: Tensor, block_table: Tensor, start: int, stop: int) -> Tensor:
    """Tokens start .. stop of one sequence: [stop - start, kv_heads, head_dim].

    cache [blocks, block_size, kv_heads, head_dim], block_table [max_blocks] int32."""
    size = cache.shape[1]
    first = start // size
    blocks = cache.index_select(0, block_table[first : -(-stop // size)])
    return blocks.flatten(0, 1)[start - first * size : stop - first * size]
