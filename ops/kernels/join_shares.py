"""out = sum_s 2^(lse_s - m) part_s / sum_s 2^(lse_s - m), m = max_s lse_s.

Joins the shares of one sequence and KV head inside `paged_decode`; called by one program, after
all have stored theirs. Shares are taken in their order, so that the sum has the same bits whichever
program finished last.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def join_shares(
    part_ptr,
    lse_ptr,
    out_ptr,
    item,
    first,
    late,
    used,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """part [programs, 2, GROUP, HEAD] and lse [programs, 2, GROUP] float32 -> out
    [items, GROUP, HEAD]; BLOCK_S shares at a time. The shares are those of `used` programs, each
    KV_HEADS-th from `first` on, the first of each program's, but for that of `first`, if it is
    `late`."""
    member = tl.arange(0, BLOCK_G)
    lane = tl.arange(0, BLOCK_D)
    in_group = member < GROUP
    in_head = lane < HEAD
    high = tl.full([BLOCK_G], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_G], tl.float32)
    acc = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    for begin in range(0, used, BLOCK_S):
        share = begin + tl.arange(0, BLOCK_S)
        slot = (first + share * KV_HEADS) * 2 + tl.where(share == 0, late, 0)
        index = slot[:, None] * GROUP + member[None, :]
        inside = (share < used)[:, None] & in_group[None, :]
        # From L2: other multiprocessors have written it during this launch.
        lse = tl.load(lse_ptr + index, mask=inside, other=float("-inf"), cache_modifier=".cg")
        part = tl.load(
            part_ptr + index[:, :, None] * HEAD + lane[None, None, :],
            mask=inside[:, :, None] & in_head[None, None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        lse = tl.where(in_group[None, :], lse, 0.0)  # members there are not: finite, not stored
        new_high = tl.maximum(high, tl.max(lse, axis=0))
        kept = tl.exp2(high - new_high)
        weight = tl.exp2(lse - new_high[None, :])
        total = total * kept + tl.sum(weight, axis=0)
        acc = acc * kept[:, None] + tl.sum(part * weight[:, :, None], axis=0)
        high = new_high
    offset = (item.to(tl.int64) * GROUP + member)[:, None] * HEAD + lane[None, :]
    mask = in_group[:, None] & in_head[None, :]
    out = (acc / total[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + offset, out, mask=mask)
