"""out = sum_s e^(lse_s - m) part_s / sum_s e^(lse_s - m), m = max_s lse_s.

Joins the shares of `paged_decode`. One program per row and head; shares with lse -inf are empty,
and zero comes out where all are.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _combine_splits_kernel(
    part_ptr,
    lse_ptr,
    out_ptr,
    splits,
    HEAD: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    item = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, BLOCK_S)
    lane = tl.arange(0, BLOCK_D)
    inside = split < splits
    lse = tl.load(lse_ptr + item * splits + split, mask=inside, other=float("-inf"))
    high = tl.max(lse, axis=0)
    weight = tl.exp(lse - tl.where(high == float("-inf"), 0.0, high))
    offset = (item * splits + split)[:, None] * HEAD + lane[None, :]
    mask = inside[:, None] & (lane < HEAD)[None, :]
    part = tl.load(part_ptr + offset, mask=mask, other=0.0)
    total = tl.sum(weight, axis=0)
    out = tl.sum(part * weight[:, None], axis=0) / tl.where(total == 0.0, 1.0, total)
    tl.store(out_ptr + item * HEAD + lane, out.to(out_ptr.dtype.element_ty), mask=lane < HEAD)


def combine_splits(parts: Tensor, lse: Tensor, dtype: torch.dtype) -> Tensor:
    """parts [B, H, splits, D] float32, lse [B, H, splits] float32 -> [B, H, D] of `dtype`."""
    rows, heads, splits, size = parts.shape
    out = torch.empty((rows, heads, size), dtype=dtype, device=parts.device)
    if rows:
        _combine_splits_kernel[(rows * heads,)](
            parts,
            lse,
            out,
            splits,
            HEAD=size,
            BLOCK_S=triton.next_power_of_2(splits),
            BLOCK_D=triton.next_power_of_2(size),
            num_warps=4,
        )
    return out
