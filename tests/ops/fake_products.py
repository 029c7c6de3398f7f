"""A library of algorithms on the CPU, with the speed and the faults that a test gives them, and a
timer that believes it.

Every algorithm multiplies as torch does. Which one ran last is remembered; the timer runs the work
once and answers with the microseconds of that one, or of torch where none ran.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tp_runtime.ops.cublas_lt import ALGORITHM_BYTES, CublasLtError, Problem
from tp_runtime.ops.graph_timer import Work

TORCH_US = 100.0


def named(name: str) -> bytes:
    """An algorithm as the library stores it."""
    return name.encode().ljust(ALGORITHM_BYTES, b"\0")


class FakeLibrary:
    """`us`: microseconds by algorithm. Of `wrong` ones the last row stays unwritten, `refused` ones
    cannot be prepared, `failing` ones fail when they are launched."""

    version = 130200

    def __init__(
        self,
        us: dict[str, float],
        *,
        wrong: tuple[str, ...] = (),
        refused: tuple[str, ...] = (),
        failing: tuple[str, ...] = (),
    ) -> None:
        self.us = {named(name): time for name, time in us.items()}
        self.wrong, self.refused, self.failing = (
            {named(name) for name in names} for names in (wrong, refused, failing)
        )
        self.asked: list[int] = []
        """Rows of the heuristic's problems."""
        self.launched: list[bytes] = []

    def candidates(self, problem: Problem) -> list[bytes]:
        """Each number of rows gives two of them, as the real heuristic gives some of many."""
        self.asked.append(problem.rows)
        names = list(self.us)
        first = 2 * len(self.asked) % len(names)
        return (names[first:] + names[:first])[:2]

    def prepare(self, problem: Problem, algorithm: bytes) -> Callable[..., None] | None:
        if algorithm not in self.us or algorithm in self.refused:
            return None

        def launch(x: Tensor, weight: Tensor, out: Tensor) -> None:
            assert Problem.of(x, weight, out) == problem
            if algorithm in self.failing:
                raise CublasLtError("cublasLtMatmul returned CUBLAS_STATUS_EXECUTION_FAILED (13).")
            self.launched.append(algorithm)
            rows = len(x) - (algorithm in self.wrong)
            torch.mm(x[:rows], weight.t(), out=out[:rows])

        return launch


class FakeTimer:
    """Of the algorithms of one library."""

    def __init__(self, library: FakeLibrary) -> None:
        self._library = library
        self.recorded = 0

    def record(self, work: Work, calls: int) -> Callable[[], float]:
        self.recorded += 1
        self._library.launched.clear()
        for number in range(calls):
            work(number)
        launched = self._library.launched
        us = self._library.us[launched[-1]] if launched else TORCH_US
        return lambda: us


def weights_of(outputs: int, inputs: int, count: int = 2, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(outputs, inputs, generator=generator).to(torch.bfloat16) for _ in range(count)
    ]


def aligned(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Normally distributed, at an address as a GPU's allocator gives."""
    count = 1
    for size in shape:
        count *= size
    room = torch.empty(count + 256, dtype=dtype)
    skip = -room.data_ptr() % 256 // room.itemsize
    return room[skip : skip + count].view(*shape).copy_(torch.randn(*shape))
