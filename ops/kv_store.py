"""Writing new keys and values into the paged cache."""

from __future__ import annotations

from torch import Tensor


def store_kv_reference(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor
) -> None:
    """k, v [T, KV, D] -> row slot_mapping[t] of the caches [blocks, block_size, KV, D].

    Slot -1 (padding) stores nothing."""
    wanted = slot_mapping >= 0
    slots = slot_mapping[wanted]
    k_cache.flatten(0, 1).index_copy_(0, slots, k[wanted])
    v_cache.flatten(0, 1).index_copy_(0, slots, v[wanted])


def store_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """As `store_kv_reference`; on CUDA by one kernel, which takes any row stride of k and v."""
    if k.is_cuda:
        from tp_runtime.ops.kernels import store_kv as kernel  # triton: CUDA only

        kernel.store_kv(k, v, k_cache, v_cache, slot_mapping)
    else:
        store_kv_reference(k, v, k_cache, v_cache, slot_mapping)
