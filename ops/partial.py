"""A sum over the ranks that has not been made yet.

What follows a row-parallel layer is a residual add and a norm; who makes the sum there can do all
three at once.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from tp_runtime.ops.group import TPGroup


@dataclass(frozen=True)
class Partial:
    """`term`: this rank's part, [tokens, hidden], which `total` may overwrite."""

    term: Tensor
    group: TPGroup

    def __mul__(self, factor: float) -> Partial:
        """The sum times a number, made of its parts."""
        return Partial(self.term * factor, self.group)

    def total(self) -> Tensor:
        """The sum, the same on every rank; called once."""
        return self.group.comm.all_reduce(self.term)


Hidden = Tensor | Partial
"""The input of a norm, [tokens, hidden]."""


def later(term: Tensor, group: TPGroup) -> Hidden:
    """`term` as a part of a sum; with one rank it is the sum."""
    return term if group.size == 1 else Partial(term, group)
