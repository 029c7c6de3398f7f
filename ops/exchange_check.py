"""Whether exchanges over inboxes give what they must, with numbers that every rank knows.

Other numbers in each exchange, so that what an earlier one left is not taken for them. Who finds
something wrong goes on all the same, as the others wait for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from tp_runtime.ops.kernels.inboxes import Inboxes

TURNS = 4
"""Exchanges in a check: each place is used again."""
_GATHERED = 100


def sums_are_right(
    all_reduce: Callable[[Tensor, Inboxes], tuple[Tensor, Tensor]],
    inboxes: Inboxes,
    dtype: torch.dtype,
    turns: int = TURNS,
) -> bool:
    """Of as many rows as the inboxes have, `turns` times; waits as the inboxes are patient."""
    device = inboxes.turns.device
    shape = (inboxes.rows, 4 * inboxes.words // dtype.itemsize)
    grid = torch.arange(shape[0] * shape[1], device=device).view(shape) % 13
    right = []
    for turn in range(turns):
        term = (grid + turn + inboxes.rank).to(dtype)
        ranks = inboxes.ranks
        want = (ranks * (grid + turn) + ranks * (ranks - 1) // 2).to(dtype)
        right.append(torch.equal(all_reduce(term, inboxes)[0], want))
    return all(right)


def gathering_is_right(all_gather: Callable[[Tensor, Inboxes], Tensor], inboxes: Inboxes) -> bool:
    ids = torch.arange(_GATHERED, device=inboxes.turns.device)
    got = all_gather(ids + 1000 * inboxes.rank, inboxes)
    return got.tolist() == [[1000 * r + i for i in range(_GATHERED)] for r in range(inboxes.ranks)]
