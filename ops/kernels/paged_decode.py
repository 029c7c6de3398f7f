"""softmax(scale q K^T) V for one new token per sequence over a paged KV cache.

Grouped-query. Which tokens a program attends to, of one or of several sequences, is found on the
device once a step (`decode_plan`): all have about as many. Within a sequence it keeps a
running maximum m and sum l:
    m' = max(m, max s);  l' = l 2^(m - m') + sum 2^(s - m');  acc' = acc 2^(m - m') + 2^(s - m') V
with s = scale log2(e) q k. Who attends to a share of a sequence leaves acc / l and m + log2 l in
float32; the program that finishes last joins the shares in their order (`join_shares`).

The same batch gives the same bits. How a sequence is cut depends on the lengths of the others.
Reference: `tp_runtime.ops.attention.reference`.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from tp_runtime.ops.kernels.decode_plan import (
    PLAN_WORDS,
    DecodeConfig,
    begin_of,
    plan_decode,
    team_of,
    tiles_of,
)
from tp_runtime.ops.kernels.host_math import power_of_2
from tp_runtime.ops.kernels.join_shares import join_shares
from tp_runtime.ops.kernels.overlap import after_previous, overlaps
from tp_runtime.ops.kernels.tiles import kv_tile, precision_of

_JOINED_NUMBERS = 64
"""Float32 numbers of partial results per thread that are joined at a time: a quarter of its
registers."""


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


@triton.jit
def _arrive(
    part_ptr,
    lse_ptr,
    out_ptr,
    counter_ptr,
    row,
    head,
    begin,
    tiles,
    share,
    longer,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD: tl.constexpr,
    JOIN_G: tl.constexpr,
    JOIN_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """This program's share of a sequence, whose tiles begin there in the line, is stored; joins
    all, if it is the last of them."""
    first = team_of(begin, share, longer)
    others = team_of(begin + tiles - 1, share, longer) - first
    item = row * KV_HEADS + head
    before = tl.atomic_add(counter_ptr + item, 1, sem="acq_rel", scope="gpu")
    if before == others:
        late = (begin_of(first, share, longer) < begin).to(tl.int32)
        join_shares(
            part_ptr, lse_ptr, out_ptr, item, first * KV_HEADS + head, late, others + 1,
            KV_HEADS, GROUP, HEAD, JOIN_G, JOIN_S, BLOCK_D,
        )  # fmt: skip
        tl.store(counter_ptr + item, 0)


@triton.jit(do_not_specialize=["rows", "table_stride"])
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
    plan_ptr,
    scale,
    q_stride,
    q_head_stride,
    table_stride,
    rows,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD: tl.constexpr,
    PAGE: tl.constexpr,
    PAGE_STRIDE: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    WINDOW: tl.constexpr,
    OVERLAP: tl.constexpr,
    PRECISION: tl.constexpr,
    PLAN: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    JOIN_G: tl.constexpr,
    JOIN_S: tl.constexpr,
):
    head = tl.program_id(0) % KV_HEADS
    # Read before the kernel in front has ended: another one, before that, wrote the plan.
    plan = plan_ptr + tl.program_id(0) // KV_HEADS * PLAN
    row = tl.load(plan, cache_modifier=".cg")
    context = tl.load(plan + 1, cache_modifier=".cg")
    number = tl.load(plan + 2, cache_modifier=".cg")
    tile = tl.load(plan + 3, cache_modifier=".cg")
    begin = tl.load(plan + 4, cache_modifier=".cg")
    end = tl.load(plan + 5, cache_modifier=".cg")
    share = tl.load(plan + 6, cache_modifier=".cg")
    longer = tl.load(plan + 7, cache_modifier=".cg")
    after_previous(OVERLAP)
    if begin == end:
        return

    member = tl.arange(0, BLOCK_G)
    lane = tl.arange(0, BLOCK_D)
    mask = (member < GROUP)[:, None] & (lane < HEAD)[None, :]
    q_offset = (head * GROUP + member)[:, None] * q_head_stride + lane[None, :]
    k_ptr += head * HEAD_STRIDE
    v_ptr += head * HEAD_STRIDE
    first_row = row
    first_tile = tile
    first_number = number
    slot = tl.program_id(0) * 2
    at = begin
    while at < end:
        turns = tl.minimum(number - tile, end - at)
        q = tl.load(q_ptr + row.to(tl.int64) * q_stride + q_offset, mask=mask, other=0.0)
        first = 0
        if WINDOW > 0:
            first = tl.maximum(context - WINDOW, 0)
        start = (first // BLOCK_N + tile) * BLOCK_N
        high, total, acc = _attend(
            q, k_ptr, v_ptr, tables_ptr + row.to(tl.int64) * table_stride,
            start, tl.minimum(start + turns * BLOCK_N, context), first, scale,
            HEAD, PAGE, PAGE_STRIDE, TOKEN_STRIDE, WINDOW, PRECISION, BLOCK_G, BLOCK_N, BLOCK_D,
        )  # fmt: skip
        out = acc / tl.where(total == 0.0, 1.0, total)[:, None]
        if turns == number:
            place = (row * KV_HEADS + head).to(tl.int64) * GROUP + member
            dtype = out_ptr.dtype.element_ty
            tl.store(out_ptr + place[:, None] * HEAD + lane[None, :], out.to(dtype), mask=mask)
        else:
            part = slot * GROUP + member
            tl.store(part_ptr + part[:, None] * HEAD + lane[None, :], out, mask=mask)
            tl.store(lse_ptr + part, high + tl.log2(total), mask=member < GROUP)
        slot = tl.program_id(0) * 2 + 1
        at += turns
        tile += turns
        if tile == number:
            tile = 0
            row += 1
            context = tl.load(contexts_ptr + row, mask=row < rows, other=0)
            number = tiles_of(context, WINDOW, BLOCK_N)

    tl.debug_barrier()  # the atomic of one thread publishes the stores of all
    if (first_tile > 0) | (first_number > end - begin):
        _arrive(
            part_ptr, lse_ptr, out_ptr, counter_ptr, first_row, head, begin - first_tile,
            first_number, share, longer, KV_HEADS, GROUP, HEAD, JOIN_G, JOIN_S, BLOCK_D,
        )  # fmt: skip
    if (tile > 0) & (end - tile > begin):
        _arrive(
            part_ptr, lse_ptr, out_ptr, counter_ptr, row, head, end - tile,
            number, share, longer, KV_HEADS, GROUP, HEAD, JOIN_G, JOIN_S, BLOCK_D,
        )  # fmt: skip


def default_config(head_size: int, dtype: torch.dtype, processors: int) -> DecodeConfig:
    """For any batch on so many multiprocessors, four programs on each. Of six configurations the
    best or within 3 % of it on an H200, for 2 to 256 rows, 4 and 8 KV heads, contexts of 100 to
    4,000. A single sequence of 8,000 tokens and more is faster with tiles twice as long, by 15 %
    or so."""
    tile, _ = kv_tile(head_size, dtype)
    return DecodeConfig(max(16, tile // 2), 2, 3, 4 * processors, 4)


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
    plan: Tensor | None = None,
) -> Tensor:
    """q [B, H, D], last stride 1; caches [blocks, page, KV, D], any strides but the last, which is
    1, the same for both; context_lens [B] int32 (0: padding row); block_tables [B, max_blocks]
    int32; `counters` int32, B * KV or more, zero before and after; `plan` of `plan_decode` for
    these lengths and `config`, by a kernel that is not the last one before this call.

    Returns [B, H, D], contiguous; zero for padding rows. Reads nothing on the host."""
    overlap = plan is not None and overlaps(q)
    rows, heads, size = q.shape
    page, kv_heads = k_cache.shape[1:3]
    group = heads // kv_heads
    _check(q, k_cache, v_cache, block_tables, rows * kv_heads, counters)
    out = torch.empty((rows, heads, size), dtype=q.dtype, device=q.device)
    if plan is None:
        plan = plan_decode(context_lens, kv_heads, window, config)
    programs = plan.shape[0] * kv_heads
    parts = torch.empty((programs, 2, group, size), dtype=torch.float32, device=q.device)
    lse = torch.empty((programs, 2, group), dtype=torch.float32, device=q.device)
    block_d = kv_tile(size, q.dtype)[1]
    join_g = power_of_2(group)
    joined = min(16, _JOINED_NUMBERS * 32 * config.warps // (join_g * block_d))
    if rows:
        _paged_decode_kernel[(programs,)](
            q,
            k_cache,
            v_cache,
            out,
            parts,
            lse,
            counters,
            context_lens,
            block_tables,
            plan,
            scale * math.log2(math.e),
            q.stride(0),
            q.stride(1),
            block_tables.stride(0),
            rows,
            KV_HEADS=kv_heads,
            GROUP=group,
            HEAD=size,
            PAGE=page,
            PAGE_STRIDE=k_cache.stride(0),
            TOKEN_STRIDE=k_cache.stride(1),
            HEAD_STRIDE=k_cache.stride(2),
            WINDOW=window or 0,
            OVERLAP=overlap,
            PRECISION=precision_of(q.dtype),
            PLAN=PLAN_WORDS,
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
