"""x W^T by the algorithm that was found to be the fastest for so many rows.

The finding is `ops.product_tuning`'s. A `TunedProduct` belongs to all weights of one shape; layers
whose weight was not tuned have none, and multiply as torch does.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Callable, Mapping
from typing import Protocol

import torch
from torch import Tensor

from tp_runtime.ops.cublas_lt import POINTER_ALIGNMENT, Problem

PREFILL_ROWS = (2048, 4096, 8192, 16384)
"""Numbers of rows that stand for those between them. Fewer rows are those of decode steps, of which
there are a few sizes, each tuned by itself."""

Launch = Callable[[Tensor, Tensor, Tensor], None]
"""(x, weight, out): writes the product to `out`."""


class ProductLibrary(Protocol):
    """What is needed of `ops.cublas_lt.CublasLt`."""

    @property
    def version(self) -> int: ...

    def candidates(self, problem: Problem) -> list[bytes]:
        """Algorithms that may suit."""
        ...

    def prepare(self, problem: Problem, algorithm: bytes) -> Launch | None:
        """None where the algorithm does not suit."""
        ...


class TunedProduct:
    """`algorithms` maps a number of rows to the algorithm that beats torch's choice, or to None
    where none does."""

    def __init__(self, library: ProductLibrary, algorithms: Mapping[int, bytes | None]) -> None:
        self._library = library
        self._algorithms = dict(algorithms)
        self._prefill = sorted(rows for rows in algorithms if rows >= PREFILL_ROWS[0])
        # Prefill steps have any number of rows; so many are remembered.
        self._launch = functools.lru_cache(maxsize=128)(self._prepare)

    def algorithm(self, rows: int) -> bytes | None:
        """For exactly so many rows of a decode step; for a prefill of so many, that of the largest
        number of rows that was tuned and is not larger. None: torch's choice is taken."""
        if rows < PREFILL_ROWS[0]:
            return self._algorithms.get(rows)
        at = bisect.bisect_right(self._prefill, rows)
        return self._algorithms[self._prefill[at - 1]] if at else None

    def multiply(self, x: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor | None:
        """x [rows, inputs] with any row stride, weight [outputs, inputs] -> [rows, outputs], in
        `out` where that is given; summed in float32. None, and nothing done, where torch's choice
        is as good or the tensors do not suit. Raises CublasLtError."""
        if x.dim() != 2 or self.algorithm(x.shape[0]) is None:
            return None
        if not (_suits(x) and _suits(weight) and weight.is_contiguous()):
            return None
        if out is not None and not _suits(out):
            return None
        y = x.new_empty((x.shape[0], weight.shape[0])) if out is None else out
        launch = self._launch(Problem.of(x, weight, y))
        if launch is None:
            return None
        launch(x, weight, y)
        return y

    def _prepare(self, problem: Problem) -> Launch | None:
        algorithm = self.algorithm(problem.rows)
        return None if algorithm is None else self._library.prepare(problem, algorithm)


def _suits(x: Tensor) -> bool:
    """Whether the rows lie one after the other, at an address that every algorithm can read."""
    in_rows = x.stride(1) == 1 and x.stride(0) >= x.shape[1]
    narrow = x.dtype in (torch.bfloat16, torch.float16)
    return narrow and in_rows and x.data_ptr() % POINTER_ALIGNMENT == 0
