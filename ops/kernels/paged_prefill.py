"""softmax(scale q K^T) V, causal, for several new tokens of several sequences.

A program takes a tile of new tokens of one sequence and one query head and walks over the keys with
a running maximum and sum, as in `paged_decode` (FlashAttention-2, arXiv:2307.08691). Keys come from
the paged cache, or from the new tokens themselves where nothing was cached before them.
Reference: `tp_runtime.ops.attention.reference`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tp_runtime.ops.kernels.host_math import ceil_div, power_of_2
from tp_runtime.ops.kernels.tiles import kv_tile, precision_of

_QUERY_TILE = 64


@triton.jit
def _paged_prefill_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    starts_ptr,
    contexts_ptr,
    tables_ptr,
    scale,
    q_stride,
    q_head_stride,
    k_stride,
    k_head_stride,
    v_stride,
    v_head_stride,
    table_stride,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOW: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    sequence = tl.program_id(1).to(tl.int64)
    head = tl.program_id(2)
    begin = tl.load(starts_ptr + sequence)
    new = tl.load(starts_ptr + sequence + 1) - begin
    tile_start = tl.program_id(0) * BLOCK_M
    if tile_start < new:
        context = tl.load(contexts_ptr + sequence)
        index = tile_start + tl.arange(0, BLOCK_M)
        lane = tl.arange(0, BLOCK_D)
        in_head = lane < HEAD
        row = (begin + index).to(tl.int64)
        mask = (index < new)[:, None] & in_head[None, :]
        q = tl.load(
            q_ptr + (row * q_stride + head * q_head_stride)[:, None] + lane[None, :],
            mask=mask,
            other=0.0,
        )
        at = context - new + index
        stop = tl.minimum(context, context - new + tile_start + BLOCK_M)
        first = 0
        if WINDOW > 0:
            first = tl.maximum(context - new + tile_start - WINDOW + 1, 0) // BLOCK_N * BLOCK_N

        high = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        for tile in range(first, stop, BLOCK_N):
            position = tile + tl.arange(0, BLOCK_N)
            valid = position < stop
            if PAGE > 0:
                entry = tables_ptr + sequence * table_stride + position // PAGE
                page = tl.load(entry, mask=valid, other=0).to(tl.int64)
                token = page * PAGE + position % PAGE
            else:
                token = (begin + position).to(tl.int64)
            kv_mask = valid[:, None] & in_head[None, :]
            k_row = token * k_stride + head // GROUP * k_head_stride
            v_row = token * v_stride + head // GROUP * v_head_stride
            k = tl.load(k_ptr + k_row[:, None] + lane[None, :], mask=kv_mask, other=0.0)
            v = tl.load(v_ptr + v_row[:, None] + lane[None, :], mask=kv_mask, other=0.0)
            score = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
            seen = valid[None, :] & (position[None, :] <= at[:, None])
            if WINDOW > 0:
                seen = seen & (position[None, :] > at[:, None] - WINDOW)
            score = tl.where(seen, score, float("-inf"))
            new_high = tl.maximum(high, tl.max(score, axis=1))
            # A row may see nothing of its first tiles: -inf - -inf would be NaN.
            base = tl.where(new_high == float("-inf"), 0.0, new_high)
            kept = tl.exp(high - base)
            weight = tl.exp(score - base[:, None])
            total = total * kept + tl.sum(weight, axis=1)
            acc = acc * kept[:, None] + tl.dot(weight.to(v.dtype), v, input_precision=PRECISION)
            high = new_high

        out = acc / tl.where(total == 0.0, 1.0, total)[:, None]
        out_offset = ((row * HEADS + head) * HEAD)[:, None] + lane[None, :]
        tl.store(out_ptr + out_offset, out.to(out_ptr.dtype.element_ty), mask=mask)


def paged_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    context_lens: Tensor,
    block_tables: Tensor | None,
    max_seqlen_q: int,
    scale: float,
    window: int | None,
) -> Tensor:
    """q [T, H, D] -> [T, H, D], contiguous; tokens that belong to no sequence give zero.

    With block_tables [S, max_blocks], k and v are contiguous caches [blocks, page, KV, D]; without,
    the new tokens' [T, KV, D]. Last strides are 1."""
    tokens, heads, size = q.shape
    kv_heads = k.shape[-2]
    out = torch.zeros((tokens, heads, size), dtype=q.dtype, device=q.device)
    sequences = context_lens.shape[0]
    if tokens == 0 or sequences == 0:
        return out
    block_n, block_d = kv_tile(size, q.dtype)
    block_m = min(_QUERY_TILE, max(16, power_of_2(max_seqlen_q)))
    _paged_prefill_kernel[(ceil_div(max_seqlen_q, block_m), sequences, heads)](
        q,
        k,
        v,
        out,
        cu_seqlens_q,
        context_lens,
        context_lens if block_tables is None else block_tables,
        scale,
        q.stride(0),
        q.stride(1),
        k.stride(-3),
        k.stride(-2),
        v.stride(-3),
        v.stride(-2),
        0 if block_tables is None else block_tables.stride(0),
        HEADS=heads,
        GROUP=heads // kv_heads,
        HEAD=size,
        PAGE=0 if block_tables is None else k.shape[1],
        WINDOW=window or 0,
        PRECISION=precision_of(q.dtype),
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_D=block_d,
        num_stages=2,
    )
    return out
