"""Inboxes: memory of each rank that the others write, and rows that are sent there with a flag.

A row that is sent as it is has a flag behind it, the number of the exchange, which says that all of
the row is there. Inboxes are [..., PLACE] of 64 bits; the last of a place is the flag.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from tp_runtime.ops.kernels.summed_row import DTYPES, high_value, low_value, words_of


@dataclass(frozen=True)
class Inboxes:
    """`addresses` [ranks] int64: of each rank's inbox, zero at first; how large it is and what
    lies where, the kernels say that use it, of which an inbox knows one alone.
    `turns` [rows] int32, zero at first: the exchanges of each row, counted on the device.
    `words`: 32-bit words in a row, at most.
    `flagged`: of one-shot sums; a flag for a row, not for a word.
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

    def check(self, x: Tensor, norm: Tensor | None, residual: Tensor | None) -> None:
        """Raises ValueError where rows `x` [rows, size] cannot be summed in these inboxes."""
        rows, size = x.shape
        words = words_of(size, x.dtype)
        contiguous = x.is_contiguous() and (residual is None or residual.is_contiguous())
        if x.dtype not in DTYPES or size % 2 or not contiguous:
            raise ValueError(
                f"Sums take contiguous rows of an even number of elements of two or four bytes, "
                f"not {list(x.shape)} {x.dtype} with strides {x.stride()}."
            )
        if rows > self.rows or words != self.words:
            raise ValueError(
                f"{rows} rows of {words} words do not fit inboxes of {self.rows} rows of "
                f"{self.words}."
            )
        if residual is not None and norm is None:
            raise ValueError("Sums add a residual only in front of a norm.")


@triton.jit
def inbox_of(addresses_ptr, rank):
    return tl.multiple_of(tl.load(addresses_ptr + rank).to(tl.pointer_type(tl.int64)), 16)


@triton.jit
def put_row(place, mine, word, inside):
    """mine [BLOCK] int32. The flag may be raised when all threads of the program have put theirs:
    after a barrier."""
    tl.store(place.to(tl.pointer_type(tl.int32)) + word, mine, mask=inside)


@triton.jit
def raise_flag(place, flag, PLACE: tl.constexpr):
    tl.atomic_xchg(place + PLACE - 1, flag, sem="release", scope="sys")


@triton.jit
def wait_for_flag(place, flag, patience, PLACE: tl.constexpr):
    """The row may be read after a barrier."""
    seen = tl.atomic_add(place + PLACE - 1, 0, sem="acquire", scope="sys")
    looks = 0
    while (seen != flag) & ((patience == 0) | (looks < patience)):
        seen = tl.atomic_add(place + PLACE - 1, 0, sem="acquire", scope="sys")
        looks += 1


@triton.jit
def read_row(place, word, inside):
    """[BLOCK] int32"""
    at = place.to(tl.pointer_type(tl.int32)) + word
    return tl.load(at, mask=inside, other=0, volatile=True)


@triton.jit
def sum_with_received(
    first,
    mine,
    word,
    inside,
    flag,
    patience,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    STRIDE: tl.constexpr,
    PLACE: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Waits for the rows of the others, that of rank r at `first + r * STRIDE`, and adds them all
    and `mine` in the order of the ranks. Returns the low and the high values, float32 [BLOCK]."""
    for peer in tl.static_range(RANKS):
        if peer != RANK:
            wait_for_flag(first + peer * STRIDE, flag, patience, PLACE)
    tl.debug_barrier()
    part = mine
    if RANK != 0:
        part = read_row(first, word, inside)
    low = low_value(part, DTYPE)
    high = high_value(part, DTYPE)
    for rank in tl.static_range(1, RANKS):
        part = mine
        if rank != RANK:
            part = read_row(first + rank * STRIDE, word, inside)
        low += low_value(part, DTYPE)
        high += high_value(part, DTYPE)
    return low, high
