"""y1 = x1 cos - x2 sin, y2 = x2 cos + x1 sin over the two halves of the rotated dimensions.

cos and sin are cast to the dtype of x and every product is rounded to it, as in transformers;
dimensions past the rotated ones are copied. One program per token and head, queries and keys in
one launch. Reference: `tp_runtime.ops.rotary.rotate_reference`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tp_runtime.ops.kernels.host_math import power_of_2


@triton.jit
def _rotate_head(x_ptr, y_ptr, table_ptr, HALF: tl.constexpr, HEAD: tl.constexpr, B: tl.constexpr):
    lane = tl.arange(0, B)
    inside = lane < HALF
    x1 = tl.load(x_ptr + lane, mask=inside, other=0.0)
    x2 = tl.load(x_ptr + HALF + lane, mask=inside, other=0.0)
    dtype = x1.dtype
    # Products of two narrow floats are exact in float32, so one cast rounds them as the narrow
    # multiplication would.
    cos = tl.load(table_ptr + lane, mask=inside, other=0.0).to(dtype).to(tl.float32)
    sin = tl.load(table_ptr + HALF + lane, mask=inside, other=0.0).to(dtype).to(tl.float32)
    wide1 = x1.to(tl.float32)
    wide2 = x2.to(tl.float32)
    y1 = (wide1 * cos).to(dtype).to(tl.float32) - (wide2 * sin).to(dtype).to(tl.float32)
    y2 = (wide2 * cos).to(dtype).to(tl.float32) + (wide1 * sin).to(dtype).to(tl.float32)
    tl.store(y_ptr + lane, y1.to(dtype), mask=inside)
    tl.store(y_ptr + HALF + lane, y2.to(dtype), mask=inside)
    if 2 * HALF < HEAD:
        for start in tl.static_range(2 * HALF, HEAD, B):
            rest = start + lane
            value = tl.load(x_ptr + rest, mask=rest < HEAD, other=0.0)
            tl.store(y_ptr + rest, value, mask=rest < HEAD)


@triton.jit
def _rotary_kernel(
    q_ptr,
    k_ptr,
    q_out_ptr,
    k_out_ptr,
    positions_ptr,
    table_ptr,
    q_stride,
    q_head_stride,
    k_stride,
    k_head_stride,
    Q_HEADS: tl.constexpr,
    K_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HEAD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    row = table_ptr + tl.load(positions_ptr + token) * (2 * HALF)
    if head < Q_HEADS:
        x = q_ptr + token * q_stride + head * q_head_stride
        y = q_out_ptr + (token * Q_HEADS + head) * HEAD
        _rotate_head(x, y, row, HALF, HEAD, BLOCK)
    else:
        head -= Q_HEADS
        x = k_ptr + token * k_stride + head * k_head_stride
        y = k_out_ptr + (token * K_HEADS + head) * HEAD
        _rotate_head(x, y, row, HALF, HEAD, BLOCK)


def rotate(q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor) -> tuple[Tensor, Tensor]:
    """q [T, H, D] and k [T, KV, D] with last stride 1, positions [T] int64,
    cos_sin [positions, cos dim/2 | sin dim/2] float32 -> rotated q and k, contiguous."""
    tokens, q_heads, size = q.shape
    k_heads = k.shape[1]
    if q.stride(2) != 1 or k.stride(2) != 1:
        raise ValueError("rotate needs queries and keys whose last dimension has stride 1.")
    q_out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    k_out = torch.empty(k.shape, dtype=k.dtype, device=k.device)
    if tokens == 0:
        return q_out, k_out
    half = cos_sin.shape[1] // 2
    _rotary_kernel[(tokens, q_heads + k_heads)](
        q,
        k,
        q_out,
        k_out,
        positions,
        cos_sin,
        q.stride(0),
        q.stride(1),
        k.stride(0),
        k.stride(1),
        Q_HEADS=q_heads,
        K_HEADS=k_heads,
        HALF=half,
        HEAD=size,
        BLOCK=power_of_2(half),
        num_warps=1,
        enable_fp_fusion=False,  # products are rounded before they are added
    )
    return q_out, k_out
