"""softmax(scale q K^T) V for one new token per sequence over a paged KV cache.

Grouped-query and split-KV (Flash-Decoding): a program takes one sequence, one KV head with all its
query heads, and one share of the context, and keeps a running maximum m and sum l:
    m' = max(m, max s);  l' = l e^(m - m') + sum e^(s - m');  acc' = acc e^(m - m') + e^(s - m') V
It writes acc / l and log-sum-exp m + ln l in float32; `combine_splits` joins the shares.
Reference: `tp_runtime.ops.attention.reference`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tp_runtime.ops.kernels.combine_splits import combine_splits
from tp_runtime.ops.kernels.tiles import kv_tile, precision_of

_TOKENS_PER_SPLIT = 256
"""A share shorter than this costs more in joining than it gains in parallelism."""
_MAX_SPLITS = 64


@triton.jit
def _paged_decode_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    contexts_ptr,
    tables_ptr,
    scale,
    q_stride,
    q_head_stride,
    table_stride,
    splits,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOW: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    context = tl.load(contexts_ptr + row)
    first = 0
    if WINDOW > 0:
        first = tl.maximum(context - WINDOW, 0)
    share = tl.cdiv(tl.cdiv(context - first, splits), BLOCK_N) * BLOCK_N
    start = first + split * share
    stop = tl.minimum(start + share, context)

    member = tl.arange(0, BLOCK_G)
    lane = tl.arange(0, BLOCK_D)
    in_group = member < GROUP
    in_head = lane < HEAD
    head = kv_head * GROUP + member
    q_offset = row * q_stride + head[:, None] * q_head_stride + lane[None, :]
    q = tl.load(q_ptr + q_offset, mask=in_group[:, None] & in_head[None, :], other=0.0)

    high = tl.full([BLOCK_G], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_G], tl.float32)
    acc = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    for tile in range(start, stop, BLOCK_N):
        position = tile + tl.arange(0, BLOCK_N)
        valid = position < stop
        page = tl.load(tables_ptr + row * table_stride + position // PAGE, mask=valid, other=0)
        slot = page.to(tl.int64) * PAGE + position % PAGE
        kv_offset = ((slot * KV_HEADS + kv_head) * HEAD)[:, None] + lane[None, :]
        mask = valid[:, None] & in_head[None, :]
        k = tl.load(k_ptr + kv_offset, mask=mask, other=0.0)
        v = tl.load(v_ptr + kv_offset, mask=mask, other=0.0)  # masked too: 0 * NaN is NaN
        score = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        score = tl.where(valid[None, :], score, float("-inf"))
        new_high = tl.maximum(high, tl.max(score, axis=1))
        kept = tl.exp(high - new_high)
        weight = tl.exp(score - new_high[:, None])
        total = total * kept + tl.sum(weight, axis=1)
        acc = acc * kept[:, None] + tl.dot(weight.to(v.dtype), v, input_precision=PRECISION)
        high = new_high

    empty = total == 0.0
    out = acc / tl.where(empty, 1.0, total)[:, None]
    lse = tl.where(empty, float("-inf"), high + tl.log(tl.where(empty, 1.0, total)))
    part = (row * KV_HEADS * GROUP + head) * splits + split
    out_offset = part[:, None] * HEAD + lane[None, :]
    tl.store(out_ptr + out_offset, out, mask=in_group[:, None] & in_head[None, :])
    tl.store(lse_ptr + part, lse, mask=in_group)


def paged_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    context_lens: Tensor,
    block_tables: Tensor,
    scale: float,
    window: int | None,
    splits: int,
) -> Tensor:
    """q [B, H, D], last stride 1; caches [blocks, page, KV, D], contiguous; context_lens [B] int32
    (0: padding row); block_tables [B, max_blocks] int32; `splits` shares of each context.

    Returns [B, H, D], contiguous; zero for padding rows. Reads nothing on the host."""
    rows, heads, size = q.shape
    page, kv_heads = k_cache.shape[1:3]
    parts = torch.empty((rows, heads, splits, size), dtype=torch.float32, device=q.device)
    lse = torch.empty((rows, heads, splits), dtype=torch.float32, device=q.device)
    group = heads // kv_heads
    block_n, block_d = kv_tile(size, q.dtype)
    if rows:
        _paged_decode_kernel[(rows, kv_heads, splits)](
            q,
            k_cache,
            v_cache,
            parts,
            lse,
            context_lens,
            block_tables,
            scale,
            q.stride(0),
            q.stride(1),
            block_tables.stride(0),
            splits,
            KV_HEADS=kv_heads,
            GROUP=group,
            HEAD=size,
            PAGE=page,
            WINDOW=window or 0,
            PRECISION=precision_of(q.dtype),
            BLOCK_G=max(16, triton.next_power_of_2(group)),  # the smallest side of a dot
            BLOCK_N=block_n,
            BLOCK_D=block_d,
            num_stages=2,
        )
    return combine_splits(parts, lse, q.dtype)


def splits_for(rows: int, kv_heads: int, max_context_len: int, processors: int) -> int:
    """How many shares of each context keep `processors` multiprocessors busy twice over."""
    wanted = -(-2 * processors // max(1, rows * kv_heads))
    useful = -(-max_context_len // _TOKENS_PER_SPLIT)
    return max(1, min(wanted, useful, _MAX_SPLITS))
