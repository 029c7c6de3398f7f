"""Attention in plain PyTorch: the back-end of CPUs, and what the others are tested against.

Prefill runs one sequence after the other through scaled_dot_product_attention; decode gathers the
keys of a few rows at a time. Only slots that hold tokens are read.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tp_runtime.ops.attention.backend import AttentionBackend
from tp_runtime.ops.attention.metadata import DecodeMetadata, PrefillMetadata

_GATHER_ELEMENTS = 1 << 22
"""Key elements gathered at a time in decode: 16 MB of float32, so that a large batch with a long
context does not need a second cache's worth of memory."""


class ReferenceBackend(AttentionBackend):
    """Any device, dtype, head size, block size and window; not fast."""

    name = "reference"

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
        out = torch.empty_like(q)
        starts = meta.cu_seqlens_q.tolist()
        contexts = meta.context_lens.tolist()
        for index, context in enumerate(contexts):
            new = slice(starts[index], starts[index + 1])
            if new.start == new.stop:
                continue
            keys, values = k[new], v[new]
            if meta.block_tables is not None:
                keys = _cached(k_cache, meta.block_tables[index], context)
                values = _cached(v_cache, meta.block_tables[index], context)
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
        rows = q.shape[0]
        span = min(meta.max_context_len, window or meta.max_context_len)
        if rows == 0 or span == 0:
            return torch.zeros_like(q)
        per_row = span * k_cache.shape[2] * k_cache.shape[3]
        step = max(1, _GATHER_ELEMENTS // per_row)
        parts = [
            _decode_rows(
                q[first : first + step],
                k_cache,
                v_cache,
                meta.context_lens[first : first + step],
                meta.block_tables[first : first + step],
                span,
                scale,
            )
            for first in range(0, rows, step)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


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


def _cached(cache: Tensor, block_table: Tensor, context: int) -> Tensor:
    """The first `context` tokens of one sequence: [context, kv_heads, head_dim]."""
    blocks = -(-context // cache.shape[1])
    return cache[block_table[:blocks].long()].flatten(0, 1)[:context]


def _decode_rows(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    context_lens: Tensor,
    block_tables: Tensor,
    span: int,
    scale: float,
) -> Tensor:
    """Each row attends to its last `span` tokens (fewer where it has fewer)."""
    contexts = context_lens.long()[:, None]
    offset = torch.arange(span, device=q.device)[None, :]
    position = (contexts - span).clamp_min(0) + offset  # [B, span]
    valid = position < contexts
    position = position.masked_fill(~valid, 0)
    block_size = k_cache.shape[1]
    blocks = block_tables.long().gather(1, position // block_size)
    slots = (blocks * block_size + position % block_size).masked_fill_(~valid, 0)
    keys = k_cache.flatten(0, 1)[slots]  # [B, span, KV, D]
    values = v_cache.flatten(0, 1)[slots]
    hidden = ~valid[:, :, None, None]
    keys = keys.masked_fill_(hidden, 0)  # a slot that was never set may hold NaN
    values = values.masked_fill_(hidden, 0)
    grouped = q.unflatten(1, (k_cache.shape[2], -1))  # [B, KV, G, D]
    scores = torch.einsum("bkgd,bskd->bkgs", grouped.float() * scale, keys.float())
    scores = scores.masked_fill_(~valid[:, None, None, :], float("-inf"))
    # A padding row has nothing to attend to: softmax gives NaN there, zero is wanted.
    weights = scores.softmax(-1).masked_fill_(~valid[:, None, None, :], 0)
    return torch.einsum("bkgs,bskd->bkgd", weights, values.float()).flatten(1, 2).to(q.dtype)
