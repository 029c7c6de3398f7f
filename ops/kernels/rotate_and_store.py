"""Per token and head, in one launch: norm of q and k over the head (if any), rotation, and the
write of k and v into the paged cache.

    h = w * round(h / sqrt(mean(h^2) + eps))                       (q and k, when there are norms)
    y1 = x1 cos - x2 sin, y2 = x2 cos + x1 sin                     (the two rotated halves)

Rounded where `tp_runtime.ops.norm` and `tp_runtime.ops.rotary` round. Slot -1 stores nothing. One
program per token and one or a few query or KV heads. Reference: the separate layers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tp_runtime.ops.kernels.host_math import ceil_div, power_of_2
from tp_runtime.ops.kernels.overlap import after_previous, overlaps

_FEW_TOKENS = 16
"""Up to so many tokens, a program for each head fills a GPU and ends sooner."""
_HEADS = 8


@triton.jit
def _scaled(x, weight_ptr, lane, inside, scale):
    dtype = x.dtype
    weight = tl.load(weight_ptr + lane, mask=inside, other=0.0).to(tl.float32)
    normed = (x.to(tl.float32) * scale).to(dtype).to(tl.float32)
    return (weight * normed).to(dtype)


@triton.jit
def _heads(
    x_ptr,
    y_ptr,
    norm_ptr,
    table_ptr,
    eps,
    kept,
    NORM: tl.constexpr,
    HALF: tl.constexpr,
    HEAD: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    REST: tl.constexpr,
):
    """HEADS neighbouring heads, of which the first `kept` are stored."""
    member = tl.arange(0, HEADS)[:, None]
    x_ptr += member * HEAD
    y_ptr += member * HEAD
    kept = member < kept
    lane = tl.arange(0, BLOCK)[None, :]
    inside = lane < HALF
    x1 = tl.load(x_ptr + lane, mask=inside & kept, other=0.0)
    x2 = tl.load(x_ptr + HALF + lane, mask=inside & kept, other=0.0)
    dtype = x1.dtype
    rest_lane = 2 * HALF + tl.arange(0, REST)[None, :]
    rest_inside = rest_lane < HEAD
    rest = tl.load(x_ptr + rest_lane, mask=rest_inside & kept, other=0.0)
    if NORM:
        wide1 = x1.to(tl.float32)
        wide2 = x2.to(tl.float32)
        wide3 = rest.to(tl.float32)
        squares = tl.sum(wide1 * wide1 + wide2 * wide2, axis=1) + tl.sum(wide3 * wide3, axis=1)
        scale = tl.rsqrt(squares / HEAD + eps)[:, None]
        x1 = _scaled(x1, norm_ptr, lane, inside, scale)
        x2 = _scaled(x2, norm_ptr, HALF + lane, inside, scale)
        rest = _scaled(rest, norm_ptr, rest_lane, rest_inside, scale)
    cos = tl.load(table_ptr + lane, mask=inside, other=0.0).to(dtype).to(tl.float32)
    sin = tl.load(table_ptr + HALF + lane, mask=inside, other=0.0).to(dtype).to(tl.float32)
    a = x1.to(tl.float32)
    b = x2.to(tl.float32)
    y1 = (a * cos).to(dtype).to(tl.float32) - (b * sin).to(dtype).to(tl.float32)
    y2 = (b * cos).to(dtype).to(tl.float32) + (a * sin).to(dtype).to(tl.float32)
    tl.store(y_ptr + lane, y1.to(dtype), mask=inside & kept)
    tl.store(y_ptr + HALF + lane, y2.to(dtype), mask=inside & kept)
    tl.store(y_ptr + rest_lane, rest, mask=rest_inside & kept)


@triton.jit
def _rotate_and_store_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    q_out_ptr,
    k_out_ptr,
    k_cache_ptr,
    v_cache_ptr,
    positions_ptr,
    slots_ptr,
    table_ptr,
    q_norm_ptr,
    k_norm_ptr,
    q_stride,
    k_stride,
    v_stride,
    eps,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    NORM: tl.constexpr,
    K_OUT: tl.constexpr,
    HALF: tl.constexpr,
    HEAD: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    REST: tl.constexpr,
    WHOLE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    after_previous(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS
    row = table_ptr + tl.load(positions_ptr + token) * (2 * HALF)
    Q_END: tl.constexpr = (Q_HEADS + HEADS - 1) // HEADS * HEADS
    if head < Q_END:
        x = q_ptr + token * q_stride + head * HEAD
        y = q_out_ptr + (token * Q_HEADS + head) * HEAD
        kept = Q_HEADS - head
        _heads(x, y, q_norm_ptr, row, eps, kept, NORM, HALF, HEAD, HEADS, BLOCK, REST)
    else:
        head -= Q_END
        kept = KV_HEADS - head
        slot = tl.load(slots_ptr + token)
        cached = tl.where(slot >= 0, kept, 0)
        cache = (slot * KV_HEADS + head) * HEAD
        x = k_ptr + token * k_stride + head * HEAD
        y = k_cache_ptr + cache
        _heads(x, y, k_norm_ptr, row, eps, cached, NORM, HALF, HEAD, HEADS, BLOCK, REST)
        if K_OUT:
            y = k_out_ptr + (token * KV_HEADS + head) * HEAD
            _heads(x, y, k_norm_ptr, row, eps, kept, NORM, HALF, HEAD, HEADS, BLOCK, REST)
        member = tl.arange(0, HEADS)[:, None]
        lane = tl.arange(0, WHOLE)[None, :]
        at = member * HEAD + lane
        stored = (lane < HEAD) & (member < cached)
        v = tl.load(v_ptr + token * v_stride + head * HEAD + at, mask=stored, other=0.0)
        tl.store(v_cache_ptr + cache + at, v, mask=stored)


def rotate_and_store(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    norms: tuple[Tensor, Tensor, float] | None,
    keep_k: bool,
) -> tuple[Tensor, Tensor]:
    """q [T, H, D], k and v [T, KV, D] with adjacent heads and any token stride; positions and
    slot_mapping [T] int64; cos_sin as in RotaryEmbedding; caches [blocks, block_size, KV, D]
    contiguous; `norms`: weights [D] of q and k, and eps.

    Returns rotated q, contiguous, and rotated k when `keep_k`, else k as it was given.
    Raises ValueError for strides that it would misread."""
    tokens, q_heads, size = q.shape
    kv_heads = k.shape[1]
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.stride(2) != 1 or x.stride(1) != size:
            raise ValueError(f"rotate_and_store needs adjacent heads; {name} has {x.stride()}.")
    if not (k_cache.is_contiguous() and v_cache.is_contiguous()):
        raise ValueError("rotate_and_store needs contiguous caches.")
    q_out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    k_out = torch.empty(k.shape, dtype=k.dtype, device=k.device) if keep_k else k
    if tokens == 0:
        return q_out, k_out
    half = cos_sin.shape[1] // 2
    overlap = overlaps(q)
    q_norm, k_norm, eps = norms if norms is not None else (cos_sin, cos_sin, 0.0)
    heads = 1 if tokens <= _FEW_TOKENS else min(_HEADS, power_of_2(kv_heads))
    programs = ceil_div(q_heads, heads) + ceil_div(kv_heads, heads)
    _rotate_and_store_kernel[(tokens, programs)](
        q,
        k,
        v,
        q_out,
        k_out,
        k_cache,
        v_cache,
        positions,
        slot_mapping,
        cos_sin,
        q_norm,
        k_norm,
        q.stride(0),
        k.stride(0),
        v.stride(0),
        eps,
        Q_HEADS=q_heads,
        KV_HEADS=kv_heads,
        NORM=norms is not None,
        K_OUT=keep_k,
        HALF=half,
        HEAD=size,
        HEADS=heads,
        BLOCK=power_of_2(half),
        REST=power_of_2(max(1, size - 2 * half)),
        WHOLE=power_of_2(size),
        OVERLAP=overlap,
        launch_pdl=overlap,
        num_warps=1 if heads < 4 else heads // 2,
        enable_fp_fusion=False,  # products are rounded before they are added
    )
    return q_out, k_out
