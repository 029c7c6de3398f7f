"""softmax(scale q K^T) V for one new token per sequence over a paged KV cache.

Grouped-query and split-KV (Flash-Decoding): a program takes one sequence, one KV head with all its
query heads, and one share of the context, and keeps a running maximum m and sum l:
    m' = max(m, max s);  l' = l 2^(m - m') + sum 2^(s - m');  acc' = acc 2^(m - m') + 2^(s - m') V
with s = scale log2(e) q k. How many shares there are at most is fixed at the launch, how many a
sequence gets is found on the device from its length. Each share leaves acc / l and m + log2 l in
float32; the program that finishes last joins them, always in the same order (`join_shares`).
Reference: `tp_runtime.ops.attention.reference`.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tp_runtime.ops.kernels.join_shares import join_shares
from tp_runtime.ops.kernels.overlap import after_previous, overlaps
from tp_runtime.ops.kernels.tiles import kv_tile, precision_of

_JOINED_NUMBERS = 64
"""Float32 numbers of partial results per thread that are joined at a time: a quarter of its
registers."""


class DecodeConfig(NamedTuple):
    """Tokens per tile, warps, stages of the pipeline, shares of a context at most, and tokens that
    a share has at least where there are several."""

    tile: int
    warps: int
    stages: int
    splits: int
    least: int


@triton.jit
def _attend(
    q,
    k_ptr,
    v_ptr,
    table_ptr,
    start,
    stop,
    first,
    scale,
    HEAD: tl.constexpr,
    PAGE: tl.constexpr,
    PAGE_STRIDE: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
    WINDOW: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Tokens start .. stop of one sequence, from `first` on -> maximum, sum, unscaled output."""
    column = tl.arange(0, BLOCK_N)
    lane = tl.arange(0, BLOCK_D)
    in_head = (lane < HEAD)[None, :]
    high = tl.full([BLOCK_G], float("-inf"), tl.float32)
    # Summed over the tokens only in the end: a sum in every turn would wait for all warps.
    weights = tl.zeros([BLOCK_G, BLOCK_N], tl.float32)
    acc = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    page = tl.load(table_ptr + (start + column) // PAGE, mask=start + column < stop, other=0)
    for tile in range(start, stop, BLOCK_N):
        position = tile + column
        valid = position < stop
        if WINDOW > 0:
            valid = valid & (position >= first)
        token = page.to(tl.int64) * PAGE_STRIDE + position % PAGE * TOKEN_STRIDE
        # One turn ahead, so that addresses are known when the pipeline asks for keys.
        later = position + BLOCK_N
        page = tl.load(table_ptr + later // PAGE, mask=later < stop, other=0)
        offset = token[:, None] + lane[None, :]
        mask = valid[:, None] & in_head
        k = tl.load(k_ptr + offset, mask=mask, other=0.0)
        v = tl.load(v_ptr + offset, mask=mask, other=0.0)  # masked too: 0 * NaN is NaN
        score = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        score = tl.where(valid[None, :], score, float("-inf"))
        new_high = tl.maximum(high, tl.max(score, axis=1))
        kept = tl.exp2(high - new_high)
        weight = tl.exp2(score - new_high[:, None])
        weights = weights * kept[:, None] + weight
        acc = acc * kept[:, None]
        acc = tl.dot(weight.to(v.dtype), v, acc, input_precision=PRECISION)
        high = new_high
    return high, tl.sum(weights, axis=1), acc


@triton.jit(do_not_specialize=["table_stride", "splits", "least"])
def _paged_decode_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    part_ptr,
    lse_ptr,
    counter_ptr,
    contexts_ptr,
    tables_ptr,
    scale,
    q_stride,
    q_head_stride,
    table_stride,
    splits,
    least,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD: tl.constexpr,
    PAGE: tl.constexpr,
    PAGE_STRIDE: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    WINDOW: tl.constexpr,
    SHARED: tl.constexpr,
    OVERLAP: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    JOIN_G: tl.constexpr,
    JOIN_S: tl.constexpr,
):
    kv_head = tl.program_id(0)
    split = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    member = tl.arange(0, BLOCK_G)
    lane = tl.arange(0, BLOCK_D)
    mask = (member < GROUP)[:, None] & (lane < HEAD)[None, :]
    head = kv_head * GROUP + member
    q_offset = row * q_stride + head[:, None] * q_head_stride + lane[None, :]
    after_previous(OVERLAP)
    context = tl.load(contexts_ptr + row)
    q = tl.load(q_ptr + q_offset, mask=mask, other=0.0)

    # Shares are whole tiles, counted from the first tile that the window touches.
    first = 0
    if WINDOW > 0:
        first = tl.maximum(context - WINDOW, 0)
    first_tile = first // BLOCK_N
    tiles = tl.cdiv(context, BLOCK_N) - first_tile
    share = tiles
    used = 1
    if SHARED:
        share = tl.maximum(tl.cdiv(tiles, splits), least)
        used = tl.maximum(tl.cdiv(tiles, share), 1)
        if split >= used:
            return
    start = (first_tile + split * share) * BLOCK_N
    stop = tl.minimum(start + share * BLOCK_N, context)
    high, total, acc = _attend(
        q, k_ptr + kv_head * HEAD_STRIDE, v_ptr + kv_head * HEAD_STRIDE,
        tables_ptr + row * table_stride, start, stop, first, scale,
        HEAD, PAGE, PAGE_STRIDE, TOKEN_STRIDE, WINDOW, PRECISION, BLOCK_G, BLOCK_N, BLOCK_D,
    )  # fmt: skip
    out = acc / tl.where(total == 0.0, 1.0, total)[:, None]

    item = row * KV_HEADS + kv_head
    if used == 1:
        out_offset = (item * GROUP + member)[:, None] * HEAD + lane[None, :]
        tl.store(out_ptr + out_offset, out.to(out_ptr.dtype.element_ty), mask=mask)
    if SHARED:  # noqa: SIM102 (a constant of the kernel and a value of the program)
        if used > 1:
            part = (item * splits + split) * GROUP + member
            tl.store(part_ptr + part[:, None] * HEAD + lane[None, :], out, mask=mask)
            tl.store(lse_ptr + part, high + tl.log2(total), mask=member < GROUP)
            tl.debug_barrier()  # the atomic of one thread publishes the stores of all
            before = tl.atomic_add(counter_ptr + item, 1, sem="acq_rel", scope="gpu")
            if before == used - 1:
                join_shares(
                    part_ptr, lse_ptr, out_ptr, item, used, splits,
                    GROUP, HEAD, JOIN_G, JOIN_S, BLOCK_D,
                )  # fmt: skip
                tl.store(counter_ptr + item, 0)


def default_config(
    rows: int,
    kv_heads: int,
    head_size: int,
    dtype: torch.dtype,
    longest: int,
    processors: int,
) -> DecodeConfig:
    """For `rows` sequences of up to `longest` visible tokens on `processors` multiprocessors.

    Few sequences are cut as finely as it takes to load from all multiprocessors at once. Many fill
    them anyway, and joining costs more than uneven lengths do; only one that is much longer than
    others must not be left to a single program. Measured on an H200, 1 to 256 rows, 8 and 4 KV
    heads, contexts of 100 to 20,000."""
    tile, _ = kv_tile(head_size, dtype)
    items = max(1, rows * kv_heads)
    if items <= 16:
        least, stages, wanted = 64, 2, min(66, triton.cdiv(4 * processors, items))
    elif items < processors:
        least, stages, wanted = 64, 3, triton.cdiv(2 * processors, items)
    else:
        least, stages, wanted = 2048, 3, max(3, min(8, 4096 // items))
    splits = max(1, min(wanted, triton.cdiv(longest, least)))
    return DecodeConfig(tile, 4, stages, splits, least)


def paged_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    context_lens: Tensor,
    block_tables: Tensor,
    scale: float,
    window: int | None,
    config: DecodeConfig,
    counters: Tensor,
) -> Tensor:
    """q [B, H, D], last stride 1; caches [blocks, page, KV, D], any strides but the last, which is
    1, the same for both; context_lens [B] int32 (0: padding row); block_tables [B, max_blocks]
    int32; `counters` int32, B * KV or more, zero before and after.

    Returns [B, H, D], contiguous; zero for padding rows. Reads nothing on the host."""
    overlap = overlaps(q)
    rows, heads, size = q.shape
    page, kv_heads = k_cache.shape[1:3]
    group, splits = heads // kv_heads, config.splits
    _check(q, k_cache, v_cache, block_tables, rows * kv_heads, counters)
    out = torch.empty((rows, heads, size), dtype=q.dtype, device=q.device)
    parts = lse = out
    if splits > 1:
        shape = (rows, kv_heads, splits, group)
        parts = torch.empty((*shape, size), dtype=torch.float32, device=q.device)
        lse = torch.empty(shape, dtype=torch.float32, device=q.device)
    block_d = kv_tile(size, q.dtype)[1]
    join_g = triton.next_power_of_2(group)
    at_once = 4 if splits <= 4 else 16  # few kernels: not one for every number of shares
    joined = min(at_once, _JOINED_NUMBERS * 32 * config.warps // (join_g * block_d))
    if rows:
        # Heads of one sequence run side by side: together they read whole lines of the cache.
        _paged_decode_kernel[(kv_heads, splits, rows)](
            q,
            k_cache,
            v_cache,
            out,
            parts,
            lse,
            counters,
            context_lens,
            block_tables,
            scale * math.log2(math.e),
            q.stride(0),
            q.stride(1),
            block_tables.stride(0),
            splits,
            max(1, config.least // config.tile),
            KV_HEADS=kv_heads,
            GROUP=group,
            HEAD=size,
            PAGE=page,
            PAGE_STRIDE=k_cache.stride(0),
            TOKEN_STRIDE=k_cache.stride(1),
            HEAD_STRIDE=k_cache.stride(2),
            WINDOW=window or 0,
            SHARED=splits > 1,
            OVERLAP=overlap,
            PRECISION=precision_of(q.dtype),
            BLOCK_G=max(16, join_g),  # the smallest side of a dot
            BLOCK_N=config.tile,
            BLOCK_D=block_d,
            JOIN_G=join_g,
            JOIN_S=max(1, joined),
            num_warps=config.warps,
            num_stages=config.stages,
            launch_pdl=overlap,
        )
    return out


def _check(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    items: int,
    counters: Tensor,
) -> None:
    if q.stride(2) != 1 or block_tables.stride(1) != 1 or k_cache.stride(3) != 1:
        raise ValueError(
            "paged_decode takes q, caches and block tables whose last stride is 1, not "
            f"{q.stride(2)}, {k_cache.stride(3)} and {block_tables.stride(1)}."
        )
    if k_cache.shape != v_cache.shape or k_cache.stride() != v_cache.stride():
        raise ValueError(
            "paged_decode takes caches of one shape and layout, not keys "
            f"{list(k_cache.shape)} (strides {list(k_cache.stride())}) and values "
            f"{list(v_cache.shape)} (strides {list(v_cache.stride())})."
        )
    if q.shape[1] % k_cache.shape[2] or q.shape[2] != k_cache.shape[3]:
        raise ValueError(
            f"Queries {list(q.shape)} do not fit a cache {list(k_cache.shape)}: heads must be a "
            "multiple of KV heads, and of the same size."
        )
    if counters.numel() < items:
        raise ValueError(
            f"paged_decode needs a counter for each of {items} pairs of row and KV head and was "
            f"given {counters.numel()}."
        )
