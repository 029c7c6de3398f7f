"""The attention layer of a model: stores new keys and values, then asks the back-end.

Knows the local head counts only, not how heads are dealt to ranks, and has no parameters.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tp_runtime.ops.attention.backend import AttentionBackend
from tp_runtime.ops.attention.metadata import AttentionMetadata, LayerKV
from tp_runtime.ops.kv_store import store_kv


class Attention(nn.Module):
    """softmax(scale q k^T) v, causal, over this rank's heads.

    `window`: number of tokens a token sees, itself included; None for all."""

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        scale: float,
        window: int | None,
        backend: AttentionBackend,
    ) -> None:
        super().__init__()
        if num_heads % num_kv_heads:
            raise ValueError(
                f"{num_heads} local query heads cannot share {num_kv_heads} local KV heads evenly."
            )
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.scale = scale
        self.window = window
        self.backend = backend

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, kv: LayerKV, meta: AttentionMetadata
    ) -> Tensor:
        """q [T, H, D], k and v [T, KV, D] -> [T, H * D]; k and v are written to `kv`."""
        store_kv(k, v, kv.k, kv.v, meta.slot_mapping)
        return self.attend(q, k, v, kv, meta)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, kv: LayerKV, meta: AttentionMetadata
    ) -> Tensor:
        """As `forward`, when k and v are in `kv` already."""
        rows = meta.num_decode_rows
        parts = []
        if meta.decode is not None:
            parts.append(
                self.backend.decode(q[:rows], kv.k, kv.v, meta.decode, self.scale, self.window)
            )
        if meta.prefill is not None:
            parts.append(
                self.backend.prefill(
                    q[rows:], k[rows:], v[rows:], kv.k, kv.v, meta.prefill, self.scale, self.window
                )
            )
        out = parts[0] if len(parts) == 1 else torch.cat(parts)
        return out.flatten(1, 2)
