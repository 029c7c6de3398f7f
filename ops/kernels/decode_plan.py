"""Which tokens each program of `paged_decode` attends to, worked out once for all layers of a step.

The tiles of all sequences lie in one line. For every KV head there is a team member that walks the
team's part of it, so that the heads of a token, which lie side by side in the cache, are read at
about the same time. Parts are equal (as in LeanAttention, arXiv:2405.10480), and sequences are cut
wherever a part ends; or, where that makes no part much longer, they are runs of whole sequences,
which leave nothing to join.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tp_runtime.ops.kernels.host_math import ceil_div, power_of_2
from tp_runtime.ops.kernels.overlap import after_previous, overlaps

PLAN_WORDS = 8
"""Of 32 bits for a team: its first row; that row's context, its tiles, and the tile the team begins
with; where its part begins and ends in the line; tiles of the shortest part, and how many of the
first teams have one more. No part: begin = end."""
_LONGER_TOKENS = 480
"""By so much a part may be longer that nobody shares a sequence: a program alone on its processor
is faster, and joining shares takes 6 us. Measured on an H200."""
_TEAMS = 16
"""Of one program, at most."""
_PAIRS = 8192
"""Of teams and rows that a program compares at once: 64 registers of 128 threads."""
_FEW_ROWS, _MANY_ROWS = 16, 512
"""One kernel for up to so many rows."""


class DecodeConfig(NamedTuple):
    """Tokens per tile, warps, stages of the pipeline, programs at most, and tiles that a part has
    at least where there are several."""

    tile: int
    warps: int
    stages: int
    programs: int
    least: int


@triton.jit
def tiles_of(context, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr):
    """Tiles that a new token sees, one where it sees nothing; counted from the window's first."""
    tiles = tl.cdiv(context, BLOCK_N)
    if WINDOW > 0:
        tiles -= tl.maximum(context - WINDOW, 0) // BLOCK_N
    return tl.maximum(tiles, 1)


@triton.jit
def begin_of(team, share, longer):
    """Where a team's part begins in the line, if parts are equal."""
    return team * share + tl.minimum(team, longer)


@triton.jit
def team_of(tile, share, longer):
    """The team whose part has this tile of the line, if parts are equal."""
    border = longer * (share + 1)
    return tl.where(tile < border, tile // (share + 1), longer + (tile - border) // share)


@triton.jit
def _at(values, index, row):
    """values [rows] at row [teams, 1] -> [teams]; 0 past the last."""
    return tl.sum(tl.where(index[None, :] == row, values[None, :], 0), axis=1)


@triton.jit(do_not_specialize=["rows", "most_teams", "least", "longer_tiles"])
def _plan_kernel(
    contexts_ptr,
    plan_ptr,
    rows,
    most_teams,
    least,
    longer_tiles,
    WINDOW: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_T: tl.constexpr,
    WORDS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    team = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    index = tl.arange(0, BLOCK_R)
    after_previous(OVERLAP)
    contexts = tl.load(contexts_ptr + index, mask=index < rows, other=0)
    tiles = tl.where(index < rows, tiles_of(contexts, WINDOW, BLOCK_N), 0)
    ends = tl.cumsum(tiles, axis=0)
    begins = ends - tiles
    line = tl.sum(tiles, axis=0)
    teams = tl.minimum(most_teams, tl.cdiv(line, least))
    share = line // teams
    longer = line % teams
    together = tl.cdiv(rows, teams)
    if together * tl.max(tiles, axis=0) <= share + longer_tiles:
        row = team * together
        begin = tl.where(row < rows, _at(begins, index, row[:, None]), line)
        end = tl.where(row + together < rows, _at(begins, index, (row + together)[:, None]), line)
    else:
        begin = begin_of(tl.minimum(team, teams), share, longer)
        end = begin_of(tl.minimum(team + 1, teams), share, longer)
        row = tl.sum((ends[None, :] <= begin[:, None]).to(tl.int32), axis=1)
    tile = begin - _at(begins, index, row[:, None])
    place = plan_ptr + team * WORDS
    inside = team < most_teams
    tl.store(place, row, mask=inside)
    tl.store(place + 1, _at(contexts, index, row[:, None]), mask=inside)
    tl.store(place + 2, _at(tiles, index, row[:, None]), mask=inside)
    tl.store(place + 3, tile, mask=inside)
    tl.store(place + 4, begin, mask=inside)
    tl.store(place + 5, end, mask=inside)
    tl.store(place + 6, team * 0 + share, mask=inside)
    tl.store(place + 7, team * 0 + longer, mask=inside)


def plan_decode(
    context_lens: Tensor, kv_heads: int, window: int | None, config: DecodeConfig
) -> Tensor:
    """context_lens [B] int32 -> [teams, PLAN_WORDS] int32, as many teams as `config` has programs
    for every KV head. Reads nothing on the host."""
    teams = max(1, config.programs // kv_heads)
    rows = context_lens.shape[0]
    plan = torch.empty((teams, PLAN_WORDS), dtype=torch.int32, device=context_lens.device)
    if rows == 0:
        return plan.zero_()
    overlap = overlaps(context_lens)
    block = _FEW_ROWS if rows <= _FEW_ROWS else max(_MANY_ROWS, power_of_2(rows))
    at_once = max(1, min(_TEAMS, _PAIRS // block))
    _plan_kernel[(ceil_div(teams, at_once),)](
        context_lens,
        plan,
        rows,
        teams,
        config.least,
        ceil_div(_LONGER_TOKENS, config.tile),
        WINDOW=window or 0,
        BLOCK_N=config.tile,
        BLOCK_R=block,
        BLOCK_T=at_once,
        WORDS=PLAN_WORDS,
        OVERLAP=overlap,
        launch_pdl=overlap,
        num_warps=4,
    )
    return plan
