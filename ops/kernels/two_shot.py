"""The sum of many rows over the GPUs of a host, in two steps over memory all can write.

    y = round(sum_r x_r), in float32
    with a norm  s = round(y + residual), n = w * round(s / sqrt(mean(s^2) + eps)), in one launch

Row i belongs to rank i mod ranks, however many rows there are. A program takes one row. On the
other ranks it sends the row to the owner and waits for the total; on the owner it waits for the
rows of all, adds them in the order of the ranks, and sends the total to all. Every rank adds the
residual and makes the norm itself. Each step rounds as `ops.kernels.one_shot` does: the same bits.

With p ranks each sends 2(p - 1)/p of the data, not p - 1 times the data. With two ranks that is the
same, with four a half, with eight a quarter; the second step is what it costs.

Rows are sent as they are, with one flag behind each (`ops.kernels.inboxes`), the number of the
row's exchange, counted on the device so that it all can be recorded in a graph.

One set of places is enough, since each step says that the other's place has been read:
- A term's place is written again in the next exchange of that row. Who writes it has the total of
  this one, and the owner sends the total after all of its threads have read all terms.
- A total's place is written again when the owner has the next terms of all. A rank sends its next
  term in a later launch, and a launch has ended when its programs have read their totals.
So a flag stays until it was seen, and to look for exactly this number is right. (One-shot sums need
two sets: there a rank may be one exchange ahead.) A program that ran out of `patience` breaks the
chain, in a test that is lost then.

Nobody waits for a program of its own GPU: program i waits for programs i of other GPUs, and a term
is sent ahead of all waiting. All programs of a launch run at once (`two_shot_rows`), so that each
one that is waited for runs or will. (Where they did not, a GPU that starts them in order would
still come to an end: of the first row that is not finished, every rank's program runs.)
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tp_runtime.ops.kernels.host_math import ceil_div, power_of_2
from tp_runtime.ops.kernels.inboxes import (
    Inboxes,
    inbox_of,
    put_row,
    raise_flag,
    read_row,
    sum_with_received,
    wait_for_flag,
)
from tp_runtime.ops.kernels.overlap import after_previous, overlaps
from tp_runtime.ops.kernels.summed_row import DTYPES, finish_row, warps_of, word_of, words_of

_LINE = 16
"""64-bit words in 128 bytes, which places start at: what a warp writes in one transaction."""
_REGISTERS = 64
"""Of a thread, at most, so that it is known how many programs run at once. Four ranks need less;
with eight a dozen words go to the stack (Triton 3.6, compute capability 9.0)."""
_REGISTERS_OF_PROCESSOR = 65536


def _groups(ranks: int, rows: int) -> int:
    """Rows of one owner."""
    return ceil_div(rows, ranks)


def _place(words: int) -> int:
    """Of 64 bits: a row and its flag."""
    return _LINE * ceil_div(words // 2 + 2, _LINE)


def two_shot_inbox_size(ranks: int, rows: int, words: int) -> int:
    """Of 64 bits, for an inbox [terms and totals, ranks that sent them, groups, place]: twice
    the data, and a flag for each row."""
    return 2 * ranks * _groups(ranks, rows) * _place(words)


def two_shot_rows(words: int, processors: int) -> int:
    """Of so many rows all programs run at once on a GPU of so many streaming multiprocessors."""
    return processors * (_REGISTERS_OF_PROCESSOR // (_REGISTERS * 32 * _warps(words)))


def _warps(words: int) -> int:
    """Eight words a thread: a program holds a row, the residual and the norm."""
    return warps_of(2 * words)


@triton.jit
def _total_as_owner(
    mine,
    word,
    inside,
    flag,
    group,
    addresses_ptr,
    patience,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    GROUPS: tl.constexpr,
    PLACE: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """mine -> total, [BLOCK] int32, which all have been sent."""
    terms = inbox_of(addresses_ptr, RANK) + group * PLACE
    low, high = sum_with_received(
        *(terms, mine, word, inside, flag, patience), *(RANK, RANKS, GROUPS * PLACE, PLACE, DTYPE)
    )
    total = word_of(low, high, DTYPE)
    at = ((RANKS + RANK) * GROUPS + group) * PLACE
    for peer in tl.static_range(RANKS):
        if peer != RANK:
            put_row(inbox_of(addresses_ptr, peer) + at, total, word, inside)
    tl.debug_barrier()
    for peer in tl.static_range(RANKS):
        if peer != RANK:
            raise_flag(inbox_of(addresses_ptr, peer) + at, flag, PLACE)
    return total


@triton.jit
def _total_from_owner(
    mine,
    word,
    inside,
    flag,
    group,
    owner,
    addresses_ptr,
    patience,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    GROUPS: tl.constexpr,
    PLACE: tl.constexpr,
):
    """mine -> total, [BLOCK] int32."""
    term = inbox_of(addresses_ptr, owner) + (RANK * GROUPS + group) * PLACE
    put_row(term, mine, word, inside)
    tl.debug_barrier()
    raise_flag(term, flag, PLACE)
    total = inbox_of(addresses_ptr, RANK) + ((RANKS + owner) * GROUPS + group) * PLACE
    wait_for_flag(total, flag, patience, PLACE)
    tl.debug_barrier()
    return read_row(total, word, inside)


@triton.jit(do_not_specialize=["patience"])
def _two_shot_kernel(
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
    GROUPS: tl.constexpr,
    PLACE: tl.constexpr,
    WORDS: tl.constexpr,
    SIZE: tl.constexpr,
    ADD: tl.constexpr,
    NORM: tl.constexpr,
    DTYPE: tl.constexpr,
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
    flag = turn.to(tl.int64)
    owner = row % RANKS
    group = row // RANKS
    if owner == RANK:
        total = _total_as_owner(
            *(mine, word, inside, flag, group, addresses_ptr, patience),
            *(RANK, RANKS, GROUPS, PLACE, DTYPE),
        )
    else:
        total = _total_from_owner(
            *(mine, word, inside, flag, group, owner, addresses_ptr, patience),
            *(RANK, RANKS, GROUPS, PLACE),
        )
    tl.store(turns_ptr + row, turn)
    finish_row(*(total, residual, norm, y_ptr, sum_ptr, at, inside, eps), *(SIZE, ADD, NORM, DTYPE))


def two_shot_all_reduce(
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
    y = torch.empty_like(x)
    summed = torch.empty_like(x) if norm is not None else y
    if rows == 0:
        return y, summed
    overlap = overlaps(x)
    _two_shot_kernel[(rows,)](
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
        GROUPS=_groups(inboxes.ranks, inboxes.rows),
        PLACE=_place(words),
        WORDS=words,
        SIZE=size,
        ADD=residual is not None,
        NORM=norm is not None,
        DTYPE=DTYPES[x.dtype],
        BLOCK=power_of_2(words),
        OVERLAP=overlap,
        launch_pdl=overlap,
        num_warps=_warps(words),
        maxnreg=_REGISTERS,
        enable_fp_fusion=False,  # products are rounded before they are added
    )
    return y, summed
