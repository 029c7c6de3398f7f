"""k_cache[slot[t]] = k[t], v_cache[slot[t]] = v[t]; slot -1 stores nothing.

One program per token. Reference: `tp_runtime.ops.kv_store.store_kv_reference`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tp_runtime.ops.kernels.host_math import power_of_2


@triton.jit
def _store_kv_kernel(
    k_ptr,
    v_ptr,
    k_cache_ptr,
    v_cache_ptr,
    slots_ptr,
    k_stride,
    k_head_stride,
    v_stride,
    v_head_stride,
    ROW: tl.constexpr,
    HEAD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token)
    if slot >= 0:
        element = tl.arange(0, BLOCK)
        inside = element < ROW  # 3 heads of 192 are no power of two
        head = element // HEAD
        lane = element % HEAD
        k = tl.load(k_ptr + token * k_stride + head * k_head_stride + lane, mask=inside)
        v = tl.load(v_ptr + token * v_stride + head * v_head_stride + lane, mask=inside)
        tl.store(k_cache_ptr + slot * ROW + element, k, mask=inside)
        tl.store(v_cache_ptr + slot * ROW + element, v, mask=inside)


def store_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """k, v [T, KV, D] with any row and head stride; caches [blocks, block_size, KV, D], contiguous;
    slot_mapping [T] int64."""
    tokens, heads, size = k.shape
    if k.stride(2) != 1 or v.stride(2) != 1:
        raise ValueError("store_kv needs keys and values whose last dimension has stride 1.")
    if not (k_cache.is_contiguous() and v_cache.is_contiguous()):
        raise ValueError(
            "store_kv needs contiguous caches [blocks, block_size, kv_heads, head_dim]."
        )
    if slot_mapping.dtype != torch.int64:
        raise ValueError(f"slot_mapping must be int64, not {slot_mapping.dtype}.")
    if tokens == 0:
        return
    _store_kv_kernel[(tokens,)](
        k,
        v,
        k_cache,
        v_cache,
        slot_mapping,
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        ROW=heads * size,
        HEAD=size,
        BLOCK=power_of_2(heads * size),
    )
