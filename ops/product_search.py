"""Which of cuBLASLt's algorithms multiplies weights of one shape fastest, found by timing them.

The heuristic answers with a few algorithms for each number of rows; nearly all of them work for any
number of rows, and the fastest for one is often among the proposals for another. So all that were
proposed for similar numbers are tried for each. An algorithm is believed only when its result is
torch's and it is ahead of torch, or of our own kernel where that is what the product would be, by
more than what timings differ by.
"""

from __future__ import annotations

import contextlib
import logging
import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tp_runtime.ops.cublas_lt import CublasLtError, Problem
from tp_runtime.ops.graph_timer import Timer, Work
from tp_runtime.ops.product import is_skinny, most_skinny_rows, product
from tp_runtime.ops.tuned_product import PREFILL_ROWS, Launch, ProductLibrary

logger = logging.getLogger(__name__)

MUST_SAVE = 0.02
"""Part of the time without tuning by which an algorithm must be ahead."""
FINALISTS = 4
_TURNS = 5
"""Timings of each finalist and of what is done without it in turn; the median counts."""

_ASK_FOR_FEW = (24, 32, 40, 48, 56, *range(64, 257, 16), 288, 320, 384, 448, 512)
_ASK_FOR_MANY = (1024, 2048, 3072, 4096, 6144, 8192, 9000, 12288, 16384)
"""Numbers of rows whose proposals are tried for decode steps and for prefills."""
_SIMILAR = 1.6
"""Proposals for so many times the rows, or for so many times fewer, are tried."""

_BEYOND_CACHES = 128 << 20
"""Weights of so many bytes come from memory when they are used in rotation: the L2 cache of an H200
holds 50 MB."""
_FEWEST_CALLS, _MOST_CALLS = 8, 32
_TIMED_US = 400.0
"""Of work in one timing, if a single call is not longer."""

_STEP = {torch.bfloat16: 2**-7, torch.float16: 2**-10}
_COMPARED = 16 << 20
"""Elements of a result that are compared at once, in float32."""


class OutOfTime(Exception):
    """The time for tuning is spent, and the search that was under way found nothing."""


class _Tried(NamedTuple):
    us: float
    algorithm: bytes
    launch: Launch
    work: Work


class ProductSearch:
    """`in_time` is asked before every candidate."""

    def __init__(
        self, library: ProductLibrary, timer: Timer, in_time: Callable[[], bool] = lambda: True
    ) -> None:
        self.library = library
        self._timer = timer
        self._in_time = in_time
        self._proposed: dict[Problem, list[bytes]] = {}

    def fastest(self, weights: Sequence[Tensor], rows: int) -> bytes | None:
        """The algorithm that beats what `product` does without one, for x [rows, inputs] and
        weights [outputs, inputs], all of one shape and dtype, that come from memory in turn. None:
        none does.

        Raises OutOfTime, CublasLtError."""
        x, y = self._operands(weights[0], rows)

        own = is_skinny(x, most_skinny_rows(weights[0]))

        def untuned(number: int) -> None:
            weight = weights[number % len(weights)]
            if own:
                product(x, weight)
            else:
                torch.mm(x, weight.t(), out=y)

        calls = _calls(weights[0], self._timer.record(untuned, 1)())
        tried = self._timed_once(x, weights, y, calls)
        best = sorted(tried, key=lambda one: one.us)[:FINALISTS]
        before, *again = self._in_turns([untuned, *(one.work for one in best)], calls)
        for us, one in sorted(zip(again, best, strict=True), key=lambda pair: pair[0]):
            if us < (1 - MUST_SAVE) * before and _is_right(one.launch, x, weights[0], y):
                what = (*reversed(weights[0].shape), rows, us, len(tried), before)
                logger.info("%d -> %d, %d rows: %.1f us, best of %d; before %.1f us", *what)
                return one.algorithm
        return None

    def _timed_once(
        self, x: Tensor, weights: Sequence[Tensor], y: Tensor, calls: int
    ) -> list[_Tried]:
        """All candidates that work. Raises OutOfTime."""
        tried, problem = [], Problem.of(x, weights[0], y)
        for algorithm in self._candidates(problem):
            if not self._in_time():
                raise OutOfTime
            launch = self.library.prepare(problem, algorithm)
            if launch is None:
                continue
            work = _in_rotation(launch, x, weights, y)
            with contextlib.suppress(CublasLtError):  # the library refuses after all
                tried.append(_Tried(self._timer.record(work, calls)(), algorithm, launch, work))
        return tried

    def confirm(self, weight: Tensor, rows: int, algorithm: bytes) -> bool:
        """Whether an algorithm found earlier still suits and gives torch's result."""
        x, y = self._operands(weight, rows)
        launch = self.library.prepare(Problem.of(x, weight, y), algorithm)
        return launch is not None and _is_right(launch, x, weight, y)

    def _operands(self, weight: Tensor, rows: int) -> tuple[Tensor, Tensor]:
        """x, normally distributed, and room for y."""
        generator = torch.Generator(weight.device).manual_seed(rows)
        x = torch.randn(
            (rows, weight.shape[1]), generator=generator, dtype=weight.dtype, device=weight.device
        )
        return x, weight.new_empty((rows, weight.shape[0]))

    def _candidates(self, problem: Problem) -> list[bytes]:
        """All that were proposed for similar numbers of rows, each once."""
        asked = _ASK_FOR_MANY if problem.rows >= PREFILL_ROWS[0] else _ASK_FOR_FEW
        least, most = problem.rows / _SIMILAR, problem.rows * _SIMILAR
        similar = [problem._replace(rows=rows) for rows in asked if least <= rows <= most]
        for each in similar:
            if each not in self._proposed:
                self._proposed[each] = self.library.candidates(each)
        return list(dict.fromkeys(chosen for each in similar for chosen in self._proposed[each]))

    def _in_turns(self, works: Sequence[Work], calls: int) -> list[float]:
        timings = [self._timer.record(work, calls) for work in works]
        turns = [[timing() for timing in timings] for _ in range(_TURNS)]
        return [statistics.median(times) for times in zip(*turns, strict=True)]


def _in_rotation(launch: Launch, x: Tensor, weights: Sequence[Tensor], y: Tensor) -> Work:
    return lambda number: launch(x, weights[number % len(weights)], y)


def _calls(weight: Tensor, one_us: float) -> int:
    """How many a timing records: enough to use more weights than a cache holds, but no long work
    more often than needed."""
    size = weight.numel() * weight.itemsize
    most = max(_FEWEST_CALLS, min(_MOST_CALLS, -(-_BEYOND_CACHES // size)))
    return max(1, min(most, int(_TIMED_US / max(one_us, 1e-3))))


def _is_right(launch: Launch, x: Tensor, weight: Tensor, y: Tensor) -> bool:
    """Whether the product is torch's but for rounding. torch may round parts of a sum that it
    splits, so a few steps of a typical element count as rounding; a part left out is more."""
    y.fill_(float("nan"))
    try:
        launch(x, weight, y)
    except CublasLtError:
        return False
    step = _STEP[y.dtype]
    rows = max(1, _COMPARED // y.shape[1])
    for part, got in zip(x.split(rows), y.split(rows), strict=True):
        want = torch.mm(part, weight.t()).float()
        bound = step * (2 * want.abs() + 4 * want.abs().mean())
        if not bool(((got.float() - want).abs() <= bound).all()):
            return False
    return True
