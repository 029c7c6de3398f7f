"""From the projections to the attention: norms of q and k, rotation, and the write to the cache."""

from __future__ import annotations

from torch import Tensor, nn

from tp_runtime.ops.attention.metadata import AttentionMetadata, LayerKV
from tp_runtime.ops.compiled import runs_kernels
from tp_runtime.ops.kv_store import store_kv
from tp_runtime.ops.norm import RMSNorm
from tp_runtime.ops.rotary import RotaryEmbedding


def rotate_and_store(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    rotary: nn.Module,
    kv: LayerKV,
    meta: AttentionMetadata,
    q_norm: nn.Module | None = None,
    k_norm: nn.Module | None = None,
) -> tuple[Tensor, Tensor]:
    """q [T, H, D], k and v [T, KV, D], positions [T] int64 -> q and k for `Attention.attend`.

    k and v are written to `kv` at `meta.slot_mapping`. On CUDA one kernel does it all; elsewhere
    the layers themselves are called."""
    fused = runs_kernels(q) and isinstance(rotary, RotaryEmbedding)
    if fused and (q_norm is None or (isinstance(q_norm, RMSNorm) and isinstance(k_norm, RMSNorm))):
        return _fused(q, k, v, positions, rotary, kv, meta, q_norm, k_norm)
    if q_norm is not None and k_norm is not None:
        q, k = q_norm(q), k_norm(k)
    q, k = rotary(positions, q, k)
    store_kv(k, v, kv.k, kv.v, meta.slot_mapping)
    return q, k


def _fused(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    rotary: nn.Module,
    kv: LayerKV,
    meta: AttentionMetadata,
    q_norm: nn.Module | None,
    k_norm: nn.Module | None,
) -> tuple[Tensor, Tensor]:
    from tp_runtime.ops.kernels import rotate_and_store as kernel  # triton: CUDA only

    norms = None
    if isinstance(q_norm, RMSNorm) and isinstance(k_norm, RMSNorm):
        norms = (q_norm.weight, k_norm.weight, q_norm.eps)
    # Prefill without a cached prefix reads the keys as given, everything else from the cache.
    keep_k = meta.prefill is not None and meta.prefill.block_tables is None
    table = rotary.get_buffer("cos_sin")
    return kernel.rotate_and_store(
        q, k, v, positions, table, kv.k, kv.v, meta.slot_mapping, norms, keep_k
    )
