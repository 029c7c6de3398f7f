"""Exchanges of small tensors between the GPUs of a host, in one step over memory all can write.

    all-reduce   y = round(sum_r x_r), in float32
    with a norm  s = round(y + residual), n = w * round(s / sqrt(mean(s^2) + eps)), in one launch
    all-gather   y = [x_0, x_1, ...]

Every rank has an inbox with a place for each sender. A program takes one row, writes it to the
inboxes of the others, and waits until theirs are in its own. Rounded where `ops.norm` rounds; every
rank adds the same numbers in the same order and gets the same bits.

Few rows are sent in words of 64 bits, 32 of them data and 32 the number of the exchange, so that
data and the sign of its arrival are one store and nothing else needs to be ordered (the LL protocol
of NCCL does the same). Of many rows that would be twice as much as the links can take in the time:
they are sent as they are, with one flag behind each row.

Two sets of places take turns. That is enough: who writes a place again has received the exchange in
between, which the other sent after it had read this one. `turns` counts the exchanges of each row,
on the device, so that it all can be recorded in a graph.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from tp_runtime.ops.kernels.overlap import after_previous, overlaps

SETS = 2


@dataclass(frozen=True)
class Inboxes:
    """`addresses` [ranks] int64: of each rank's inbox, [SETS, ranks, rows, words] of 64 bits,
    zero at first. `turns` [rows] int32, zero at first. `words`: 32-bit words in a row, at most.
    `flagged`: a flag for a row, not for a word; an inbox is used in one way only.
    `patience`: how often a program looks for late words before it goes on without them; 0: for
    ever."""

    rank: int
    ranks: int
    rows: int
    words: int
    addresses: Tensor
    turns: Tensor
    patience: int = 0
    flagged: bool = False


@triton.jit
def _inbox(addresses_ptr, rank: tl.constexpr):
    return tl.multiple_of(tl.load(addresses_ptr + rank).to(tl.pointer_type(tl.int64)), 16)


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
            inbox = _inbox(addresses_ptr, peer)
            tl.store(inbox + ((base + RANK) * ROWS + row) * WORDS + word, packed, mask=inside)
    source = tl.arange(0, SOURCES)[:, None]
    expected = inside[None, :] & (source < RANKS) & (source != RANK)
    at = _inbox(addresses_ptr, RANK) + ((base + source) * ROWS + row) * WORDS + word[None, :]
    got = tl.load(at, mask=expected, other=tag, volatile=True)
    late = tl.max(tl.max(((got >> 32) != (tag >> 32)).to(tl.int32), axis=1), axis=0)
    looks = 0
    while (late > 0) & ((patience == 0) | (looks < patience)):
        got = tl.load(at, mask=expected, other=tag, volatile=True)
        late = tl.max(tl.max(((got >> 32) != (tag >> 32)).to(tl.int32), axis=1), axis=0)
        looks += 1
    return tl.where(source == RANK, mine[None, :], got.to(tl.int32))


@triton.jit
def _exchange_flagged(
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
    """As `_exchange`, with one flag for a row: the last of its places."""
    base = ((turn & 1) * RANKS).to(tl.int64)
    flag = turn.to(tl.int64)
    for peer in tl.static_range(RANKS):
        if peer != RANK:
            place = _inbox(addresses_ptr, peer) + ((base + RANK) * ROWS + row) * WORDS
            tl.store(place.to(tl.pointer_type(tl.int32)) + word, mine, mask=inside)
    tl.debug_barrier()
    for peer in tl.static_range(RANKS):
        if peer != RANK:
            place = _inbox(addresses_ptr, peer) + ((base + RANK) * ROWS + row) * WORDS
            tl.atomic_xchg(place + WORDS - 1, flag, sem="release", scope="sys")
    for peer in tl.static_range(RANKS):
        if peer != RANK:
            place = _inbox(addresses_ptr, RANK) + ((base + peer) * ROWS + row) * WORDS
            seen = tl.atomic_add(place + WORDS - 1, 0, sem="acquire", scope="sys")
            looks = 0
            while (seen != flag) & ((patience == 0) | (looks < patience)):
                seen = tl.atomic_add(place + WORDS - 1, 0, sem="acquire", scope="sys")
                looks += 1
    tl.debug_barrier()
    source = tl.arange(0, SOURCES)[:, None]
    expected = inside[None, :] & (source < RANKS) & (source != RANK)
    at = _inbox(addresses_ptr, RANK) + ((base + source) * ROWS + row) * WORDS
    at = at.to(tl.pointer_type(tl.int32)) + word[None, :]
    got = tl.load(at, mask=expected, other=0, volatile=True)
    return tl.where(source == RANK, mine[None, :], got)


@triton.jit
def _low(bits, DTYPE: tl.constexpr):
    """The first value in each word, float32."""
    if DTYPE == tl.float32:
        return bits.to(tl.float32, bitcast=True)
    else:
        return bits.to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)


@triton.jit
def _high(bits, DTYPE: tl.constexpr):
    """The second value in each word, float32; zero where a word is one value."""
    if DTYPE == tl.float32:
        return bits.to(tl.float32) * 0.0
    else:
        return (bits >> 16).to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)


@triton.jit
def _word_of(low, high, DTYPE: tl.constexpr):
    if DTYPE == tl.float32:
        return low.to(tl.int32, bitcast=True)
    else:
        first = low.to(DTYPE).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        return first | (high.to(DTYPE).to(tl.int16, bitcast=True).to(tl.int32) << 16)


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
        parts = _exchange_flagged(
            *(mine, word, inside, turn, row, addresses_ptr, patience),
            *(RANK, RANKS, ROWS, WORDS, SOURCES),
        )
    else:
        parts = _exchange(
            *(mine, word, inside, turn, row, addresses_ptr, patience),
            *(RANK, RANKS, ROWS, WORDS, SOURCES),
        )
    tl.store(turns_ptr + row, turn)
    low = tl.sum(_low(parts, DTYPE), axis=0)
    high = tl.sum(_high(parts, DTYPE), axis=0)
    total = _word_of(low, high, DTYPE)
    if ADD:
        low = _low(total, DTYPE) + _low(residual, DTYPE)
        high = _high(total, DTYPE) + _high(residual, DTYPE)
        total = _word_of(low, high, DTYPE)
    if NORM:
        tl.store(sum_ptr + at, total, mask=inside)
        low = _low(total, DTYPE)
        high = _high(total, DTYPE)
        scale = tl.rsqrt(tl.sum(low * low + high * high, axis=0) / SIZE + eps)
        scaled = _word_of(low * scale, high * scale, DTYPE)
        low = _low(scaled, DTYPE) * _low(norm, DTYPE)
        high = _high(scaled, DTYPE) * _high(norm, DTYPE)
        total = _word_of(low, high, DTYPE)
    tl.store(y_ptr + at, total, mask=inside)


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


_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


def words_of(size: int, dtype: torch.dtype) -> int:
    """32-bit words in `size` elements."""
    return size * dtype.itemsize // 4


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
    rows, size = x.shape
    words = words_of(size, x.dtype)
    contiguous = x.is_contiguous() and (residual is None or residual.is_contiguous())
    if x.dtype not in _DTYPES or size % 2 or not contiguous:
        raise ValueError(
            f"one_shot_all_reduce takes contiguous rows of an even number of elements of two or "
            f"four bytes, not {list(x.shape)} {x.dtype} with strides {x.stride()}."
        )
    if rows > inboxes.rows or words != inboxes.words:
        raise ValueError(
            f"{rows} rows of {words} words do not fit inboxes of {inboxes.rows} rows of "
            f"{inboxes.words}."
        )
    if inboxes.flagged and words < 2:
        raise ValueError("A flag needs a word of its own behind a row of one word.")
    if residual is not None and norm is None:
        raise ValueError("one_shot_all_reduce adds a residual only in front of a norm.")
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
        DTYPE=_DTYPES[x.dtype],
        SOURCES=triton.next_power_of_2(inboxes.ranks),
        BLOCK=triton.next_power_of_2(words),
        OVERLAP=overlap,
        launch_pdl=overlap,
        num_warps=_warps(words * inboxes.ranks),
        enable_fp_fusion=False,  # products are rounded before they are added
    )
    return y, summed


def _warps(words: int) -> int:
    """Sixteen words a thread are enough for a load and few enough for the registers."""
    return max(1, min(16, triton.next_power_of_2(words) // 512))


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
        SOURCES=triton.next_power_of_2(inboxes.ranks),
        BLOCK=triton.next_power_of_2(words),
        OVERLAP=overlap,
        launch_pdl=overlap,
        num_warps=_warps(words * inboxes.ranks),
    )
    return y
