"""Ranks that take turns in one process: each sends without waiting for long, and again, until each
has found what the others sent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tp_runtime.ops.kernels.inboxes import Inboxes

Call = Callable[[int, Inboxes], Any]


class RanksInTurn:
    """The inboxes of all ranks, `size` words of 64 bits each, in the memory of one device.
    `steps`: of an exchange; in so many rounds everything arrives, in one more it is found."""

    def __init__(
        self,
        ranks: int,
        rows: int,
        words: int,
        device: torch.device,
        size: int,
        steps: int,
        flagged: bool = False,
    ) -> None:
        self.memory = [torch.zeros(size, dtype=torch.int64, device=device) for _ in range(ranks)]
        self.steps = steps
        addresses = torch.tensor([m.data_ptr() for m in self.memory], device=device)
        self.of = [
            Inboxes(
                rank,
                ranks,
                rows,
                words,
                addresses,
                torch.zeros(rows, dtype=torch.int32, device=device),
                patience=1,
                flagged=flagged,
            )
            for rank in range(ranks)
        ]

    def each(self, call: Call) -> list[Any]:
        """`call(rank, its inboxes)` once more than there are steps; the last results."""
        before = [own.turns.clone() for own in self.of]
        for _ in range(self.steps):
            for rank, own in enumerate(self.of):
                call(rank, own)
            for own, turns in zip(self.of, before, strict=True):
                own.turns.copy_(turns)
        return [call(rank, own) for rank, own in enumerate(self.of)]


def terms(
    ranks: int, rows: int, size: int, dtype: torch.dtype, device: torch.device
) -> list[torch.Tensor]:
    return [torch.randn(rows, size, device=device).to(dtype) for _ in range(ranks)]


def total(parts: list[torch.Tensor]) -> torch.Tensor:
    """In the order of the ranks, in float32, rounded once."""
    wide = parts[0].float()
    for part in parts[1:]:
        wide = wide + part.float()
    return wide.to(parts[0].dtype)
