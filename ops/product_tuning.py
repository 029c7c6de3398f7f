"""Tuning the products of a model within a time: what is kept from before is read, the rest is
searched for, and what the time does not suffice for stays as torch does it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tp_runtime.ops.cublas_lt import CublasLtError
from tp_runtime.ops.product_search import OutOfTime, ProductSearch
from tp_runtime.ops.product_store import Algorithms, ProductKey, ProductStore
from tp_runtime.ops.tuned_product import TunedProduct


@dataclass(frozen=True)
class ProductFamily:
    """Weights [outputs, inputs] of one shape and dtype, and the numbers of rows of their inputs."""

    weights: Sequence[Tensor]
    rows: Sequence[int]


@dataclass
class TuningReport:
    """Numbers of (shape, rows) pairs, and seconds."""

    kept: int = 0
    """Known from an earlier start."""
    timed: int = 0
    left: int = 0
    """For which there was no time or no memory, or a call of the library failed."""
    faster: int = 0
    """Of those kept and timed, where another algorithm than torch's is used."""
    seconds: float = 0.0

    def __str__(self) -> str:
        text = (
            f"{self.faster} of {self.kept + self.timed} matrix products use another algorithm of "
            f"cuBLASLt than torch ({self.timed} timed now, {self.seconds:.1f} s)"
        )
        return f"{text}; {self.left} are left to the next start" if self.left else text


@dataclass
class _Family:
    """A family under way."""

    weights: Sequence[Tensor]
    rows: Sequence[int]
    key: ProductKey
    algorithms: Algorithms = field(default_factory=dict)
    found: Algorithms = field(default_factory=dict)
    """Of `algorithms`, those that are not kept yet."""


class ProductTuning:
    """`search` must become out of time by itself (see ProductSearch); `beat` is called before each
    piece of work, a second or so apart."""

    def __init__(
        self,
        search: ProductSearch,
        store: ProductStore,
        beat: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._search, self._store = search, store
        self._beat, self._clock = beat, clock

    def tune(
        self, families: Sequence[ProductFamily], say: Callable[[str], None] = lambda text: None
    ) -> tuple[list[TunedProduct], TuningReport]:
        """One TunedProduct per family. `say` gets a sentence if anything must be timed."""
        started, report = self._clock(), TuningReport()
        known = [self._read(family) for family in families]
        report.kept = sum(len(family.algorithms) for family in known)
        # Small numbers of rows first, for all shapes: where time is short, prefills do without.
        missing = sorted(
            (rows, index)
            for index, family in enumerate(known)
            for rows in family.rows
            if rows not in family.algorithms
        )
        if missing:
            say(f"Timing {len(missing)} matrix products to choose their algorithms.")
        for rows, index in missing:
            self._beat()
            if self._find(known[index], rows):
                report.timed += 1
            else:
                report.left += 1
        for family in known:
            if family.found:
                self._store.add(family.key, family.found)
        used = [choice for family in known for choice in family.algorithms.values()]
        report.faster = sum(choice is not None for choice in used)
        report.seconds = self._clock() - started
        library = self._search.library
        return [TunedProduct(library, family.algorithms) for family in known], report

    def _read(self, family: ProductFamily) -> _Family:
        """What is kept and still holds."""
        self._beat()
        key = self._store.key(family.weights[0])
        kept = self._store.read(key)
        known = _Family(family.weights, family.rows, key)
        for rows in family.rows:
            if rows in kept and self._holds(family.weights[0], rows, kept[rows]):
                known.algorithms[rows] = kept[rows]
        return known

    def _holds(self, weight: Tensor, rows: int, choice: bytes | None) -> bool:
        try:
            return choice is None or self._search.confirm(weight, rows, choice)
        except (CublasLtError, torch.OutOfMemoryError):
            return False

    def _find(self, family: _Family, rows: int) -> bool:
        try:
            choice = self._search.fastest(family.weights, rows)
        except (OutOfTime, RuntimeError):  # of the library, of a capture it broke, of memory
            return False
        family.algorithms[rows] = family.found[rows] = choice
        return True
