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

FEWEST_ROWS = 17
"""With fewer our own kernels are ahead of all that the library has."""
DECODE_ROWS = (32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512)
"""Numbers of rows that stand for themselves and fewer, down to the next: an algorithm's tiles take
as long for less."""
PREFILL_ROWS = (2048, 4096, 8192, 16384)
"""Numbers of rows that stand for themselves and more, up to the next."""

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
    """`algorithms` maps a number of rows to the algorithm that beats what is done without it, or to
    None where none does."""

    def __init__(self, library: ProductLibrary, algorithms: Mapping[int, bytes | None]) -> None:
        self._library = library
        self._algorithms = dict(algorithms)
        self._decode = sorted(rows for rows in algorithms if rows < PREFILL_ROWS[0])
        self._prefill = sorted(rows for rows in algorithms if rows >= PREFILL_ROWS[0])
        # Prefill steps have any number of rows; so many are remembered.
        self._launch = functools.lru_cache(maxsize=128)(self._prepare)

    def algorithm(self, rows: int) -> bytes | None:
        """That of the next larger number of rows that was tuned for decode steps, or of the next
        smaller one that was tuned for prefills. None: what is done without it is as good."""
        if rows < FEWEST_ROWS:
            return None
        if rows < PREFILL_ROWS[0]:
            at = bisect.bisect_left(self._decode, rows)
            return self._algorithms[self._decode[at]] if at < len(self._decode) else None
        at = bisect.bisect_right(self._prefill, rows)
        return self._algorithms[self._prefill[at - 1]] if at else None

    def multiply(self, x: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor | None:
        """x [rows, inputs] with any row stride, weight [outputs, inputs] -> [rows, outputs], in
        `out` where that is given; summed in float32. None, and nothing done, where what is done
        without it is as good or the tensors do not suit. Raises CublasLtError."""
        if x.dim() != 2 or not x.shape[0] or self.algorithm(x.shape[0]) is None:
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
