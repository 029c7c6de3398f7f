"""Exchanges of small tensors between the GPUs of a host, in one step over memory all can write.

    all-reduce   y = round(sum_r x_r), in float32
    with a norm  s = round(y + residual), n = w * round(s / sqrt(mean(s^2) + eps)), in one launch
    all-gather   y = [x_0, x_1, ...]

Every rank has an inbox with a place for each sender. A program takes one row, writes it to the
inboxes of the others, and waits until theirs are in its own. Rounded where `ops.norm` rounds; every
rank adds the same numbers in the order of the ranks and gets the same bits.

Few rows are sent in words of 64 bits, 32 of them data and 32 the number of the exchange, so that
data and the sign of its arrival are one store and nothing else needs to be ordered (the LL protocol
of NCCL does the same). Of many rows that would be twice as much as the links can take in the time:
they are sent as they are, with one flag behind each row. Of very many, `ops.kernels.two_shot` sends
less.

Two sets of places take turns. That is enough: who writes a place again has received the exchange in
between, which the other sent after it had read this one. `turns` counts the exchanges of each row,
on the device, so that it all can be recorded in a graph.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tp_runtime.ops.kernels.host_math import power_of_2
from tp_runtime.ops.kernels.inboxes import (
    Inboxes,
    inbox_of,
    put_row,
    raise_flag,
    sum_with_received,
)
from tp_runtime.ops.kernels.overlap import after_previous, overlaps
from tp_runtime.ops.kernels.summed_row import (
    DTYPES,
    finish_row,
    high_value,
    low_value,
    warps_of,
    word_of,
    words_of,
)

SETS = 2


def one_shot_inbox_size(ranks: int, rows: int, words: int) -> int:
    """Of 64 bits, for an inbox [SETS, ranks, rows, words]."""
    return SETS * ranks * rows * words


@triton.jit
def _exchange(
    mine,
    word,
    inside,
    turn,
    row,
    addresses_ptr,
    patience,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    ROWS: tl.constexpr,
    WORDS: tl.constexpr,
    SOURCES: tl.constexpr,
):
    """mine [BLOCK] int32 -> [SOURCES, BLOCK] int32, zero where there is no such rank."""
    tag = turn.to(tl.int64) << 32
    packed = tag | (mine.to(tl.int64) & 0xFFFFFFFF)
    base = ((turn & 1) * RANKS).to(tl.int64)
    for peer in tl.static_range(RANKS):
        if peer != RANK:
            inbox = inbox_of(addresses_ptr, peer)
            tl.store(inbox + ((base + RANK) * ROWS + row) * WORDS + word, packed, mask=inside)
    source = tl.arange(0, SOURCES)[:, None]
    expected = inside[None, :] & (source < RANKS) & (source != RANK)
    at = inbox_of(addresses_ptr, RANK) + ((base + source) * ROWS + row) * WORDS + word[None, :]
    got = tl.load(at, mask=expected, other=tag, volatile=True)
    late = tl.max(tl.max(((got >> 32) != (tag >> 32)).to(tl.int32), axis=1), axis=0)
    looks = 0
    while (late > 0) & ((patience == 0) | (looks < patience)):
        got = tl.load(at, mask=expected, other=tag, volatile=True)
        late = tl.max(tl.max(((got >> 32) != (tag >> 32)).to(tl.int32), axis=1), axis=0)
        looks += 1
    return tl.where(source == RANK, mine[None, :], got.to(tl.int32))


@triton.jit
def _sum_in_order(parts, RANKS: tl.constexpr, SOURCES: tl.constexpr, DTYPE: tl.constexpr):
    """parts [SOURCES, BLOCK] int32 -> low and high values, float32 [BLOCK], added rank by rank: a
    reduction of floats along the sources would add them in an order of its own."""
    source = tl.arange(0, SOURCES)[:, None]
    first = tl.sum(tl.where(source == 0, parts, 0), axis=0)
    low = low_value(first, DTYPE)
    high = high_value(first, DTYPE)
    for rank in tl.static_range(1, RANKS):
        part = tl.sum(tl.where(source == rank, parts, 0), axis=0)
        low += low_value(part, DTYPE)
        high += high_value(part, DTYPE)
    return low, high


@triton.jit
def _sum_flagged(
    mine,
    word,
    inside,
    turn,
    row,
    addresses_ptr,
    patience,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    ROWS: tl.constexpr,
    WORDS: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """As `_exchange` and `_sum_in_order`, with one flag for a row: the last of its places."""
    base = ((turn & 1) * RANKS).to(tl.int64)
    flag = turn.to(tl.int64)
    for peer in tl.static_range(RANKS):
        if peer != RANK:
            place = inbox_of(addresses_ptr, peer) + ((base + RANK) * ROWS + row) * WORDS
            put_row(place, mine, word, inside)
    tl.debug_barrier()
    for peer in tl.static_range(RANKS):
        if peer != RANK:
            place = inbox_of(addresses_ptr, peer) + ((base + RANK) * ROWS + row) * WORDS
            raise_flag(place, flag, WORDS)
    first = inbox_of(addresses_ptr, RANK) + (base * ROWS + row) * WORDS
    return sum_with_received(
        *(first, mine, word, inside, flag, patience), *(RANK, RANKS, ROWS * WORDS, WORDS, DTYPE)
    )


@triton.jit(do_not_specialize=["patience"])
def _all_reduce_kernel(
    x_ptr,
    residual_ptr,
    norm_ptr,
    y_ptr,
    sum_ptr,
    addresses_ptr,
    turns_ptr,
    eps,
    patience,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    ROWS: tl.constexpr,
    WORDS: tl.constexpr,
    SIZE: tl.constexpr,
    FLAGGED: tl.constexpr,
    ADD: tl.constexpr,
    NORM: tl.constexpr,
    DTYPE: tl.constexpr,
    SOURCES: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    word = tl.arange(0, BLOCK)
    inside = word < WORDS
    norm = word
    if NORM:
        norm = tl.load(norm_ptr + word, mask=inside, other=0)
    after_previous(OVERLAP)
    at = row * WORDS + word
    turn = tl.load(turns_ptr + row) + 1
    mine = tl.load(x_ptr + at, mask=inside, other=0)
    residual = mine
    if ADD:
        residual = tl.load(residual_ptr + at, mask=inside, other=0)
    if FLAGGED:
        low, high = _sum_flagged(
            *(mine, word, inside, turn, row, addresses_ptr, patience),
            *(RANK, RANKS, ROWS, WORDS, DTYPE),
        )
    else:
        parts = _exchange(
            *(mine, word, inside, turn, row, addresses_ptr, patience),
            *(RANK, RANKS, ROWS, WORDS, SOURCES),
        )
        low, high = _sum_in_order(parts, RANKS, SOURCES, DTYPE)
    tl.store(turns_ptr + row, turn)
    finish_row(
        *(word_of(low, high, DTYPE), residual, norm, y_ptr, sum_ptr, at, inside, eps),
        *(SIZE, ADD, NORM, DTYPE),
    )


@triton.jit(do_not_specialize=["words", "patience"])
def _all_gather_kernel(
    x_ptr,
    y_ptr,
    addresses_ptr,
    turns_ptr,
    words,
    patience,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    WORDS: tl.constexpr,
    SOURCES: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    after_previous(OVERLAP)
    word = tl.arange(0, BLOCK)
    inside = word < words
    turn = tl.load(turns_ptr) + 1
    mine = tl.load(x_ptr + word, mask=inside, other=0)
    parts = _exchange(
        *(mine, word, inside, turn, 0, addresses_ptr, patience), *(RANK, RANKS, 1, WORDS, SOURCES)
    )
    tl.store(turns_ptr, turn)
    source = tl.arange(0, SOURCES)[:, None]
    where = source * words + word[None, :]
    tl.store(y_ptr + where, parts, mask=(source < RANKS) & inside[None, :])


def one_shot_all_reduce(
    x: Tensor,
    inboxes: Inboxes,
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    residual: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """x, residual [rows, size] contiguous, the same shape on every rank; norm [size].

    Returns (sum over ranks, the same) without a norm, else (norm(sum + residual), sum + residual).
    Raises ValueError for what does not fit the inboxes."""
    inboxes.check(x, norm, residual)
    rows, size = x.shape
    words = words_of(size, x.dtype)
    if inboxes.flagged and words < 2:
        raise ValueError("A flag needs a word of its own behind a row of one word.")
    y = torch.empty_like(x)
    summed = torch.empty_like(x) if norm is not None else y
    if rows == 0:
        return y, summed
    overlap = overlaps(x)
    _all_reduce_kernel[(rows,)](
        x.view(torch.int32),
        x.view(torch.int32) if residual is None else residual.view(torch.int32),
        x.view(torch.int32) if norm is None else norm.view(torch.int32),
        y.view(torch.int32),
        summed.view(torch.int32),
        inboxes.addresses,
        inboxes.turns,
        eps,
        inboxes.patience,
        RANK=inboxes.rank,
        RANKS=inboxes.ranks,
        ROWS=inboxes.rows,
        WORDS=words,
        SIZE=size,
        FLAGGED=inboxes.flagged,
        ADD=residual is not None,
        NORM=norm is not None,
        DTYPE=DTYPES[x.dtype],
        SOURCES=power_of_2(inboxes.ranks),
        BLOCK=power_of_2(words),
        OVERLAP=overlap,
        launch_pdl=overlap,
        num_warps=warps_of(words * inboxes.ranks),
        enable_fp_fusion=False,  # products are rounded before they are added
    )
    return y, summed


def one_shot_all_gather(x: Tensor, inboxes: Inboxes) -> Tensor:
    """x, contiguous, of any shape and a multiple of four bytes -> [ranks, *shape of x].

    Raises ValueError for what does not fit the inboxes, of which one row is used."""
    words = x.nbytes // 4
    if x.nbytes % 4 or not x.is_contiguous() or words > inboxes.words or inboxes.rows != 1:
        raise ValueError(
            f"one_shot_all_gather takes up to {inboxes.words} contiguous words of 32 bits, not "
            f"{list(x.shape)} {x.dtype} with strides {x.stride()}."
        )
    y = torch.empty((inboxes.ranks, *x.shape), dtype=x.dtype, device=x.device)
    if words == 0:
        return y
    overlap = overlaps(x)
    _all_gather_kernel[(1,)](
        x.view(torch.int32),
        y.view(torch.int32),
        inboxes.addresses,
        inboxes.turns,
        words,
        inboxes.patience,
        RANK=inboxes.rank,
        RANKS=inboxes.ranks,
        WORDS=inboxes.words,
        SOURCES=power_of_2(inboxes.ranks),
        BLOCK=power_of_2(words),
        OVERLAP=overlap,
        launch_pdl=overlap,
        num_warps=warps_of(words * inboxes.ranks),
    )
    return y
