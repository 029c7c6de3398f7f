"""Tuning a whole model: what is kept is not timed again; what there is no time for is torch's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.ops.fake_products import FakeLibrary, FakeTimer, named, weights_of
from tp_runtime.ops.cublas_lt import CublasLtError
from tp_runtime.ops.product_search import ProductSearch
from tp_runtime.ops.product_store import ProductStore
from tp_runtime.ops.product_tuning import ProductFamily, ProductTuning

FAMILIES = [
    ProductFamily(weights_of(16, 32), (48, 64, 2048)),
    ProductFamily(weights_of(32, 16), (48,)),
]


class Start:
    """One start of a worker over the same folder; `candidates` is how many may be timed."""

    def __init__(self, folder: Path | None, library: FakeLibrary, candidates: int = 10_000) -> None:
        self.library, self.timer = library, FakeTimer(library)
        self.said: list[str] = []
        self.beats = 0
        left = iter([True] * candidates)
        search = ProductSearch(library, self.timer, lambda: next(left, False))
        store = ProductStore(folder, "GPU", library.version)
        clock = iter([10.0, 13.0])
        tuning = ProductTuning(search, store, self._beat, lambda: next(clock))
        self.products, self.report = tuning.tune(FAMILIES, self.said.append)

    def _beat(self) -> None:
        self.beats += 1

    def choices(self) -> list[list[bytes | None]]:
        pairs = zip(self.products, FAMILIES, strict=True)
        return [[product.algorithm(rows) for rows in family.rows] for product, family in pairs]


def test_all_shapes_are_timed_at_the_first_start_and_read_at_the_next(tmp_path: Path) -> None:
    first = Start(tmp_path, FakeLibrary({"a": 70, "b": 90}))
    assert first.choices() == [[named("a")] * 3, [named("a")]]
    assert (first.report.timed, first.report.kept, first.report.left) == (4, 0, 0)
    assert (first.report.faster, first.report.seconds) == (4, 3.0)
    assert "4 matrix products" in first.said[0]
    assert first.beats >= 4
    second = Start(tmp_path, FakeLibrary({"a": 70, "b": 90}))
    assert second.choices() == first.choices()
    assert (second.report.timed, second.report.kept, second.report.faster) == (0, 4, 4)
    assert (second.timer.recorded, second.said) == (0, [])


def test_that_torch_is_as_good_is_kept_too(tmp_path: Path) -> None:
    first = Start(tmp_path, FakeLibrary({"a": 100}))
    assert first.choices() == [[None] * 3, [None]]
    second = Start(tmp_path, FakeLibrary({"a": 100}))
    assert (second.timer.recorded, second.report.kept, second.report.faster) == (0, 4, 0)


def test_time_that_is_up_leaves_the_rest_to_torch_and_to_the_next_start(tmp_path: Path) -> None:
    first = Start(tmp_path, FakeLibrary({"a": 70, "b": 90}), candidates=5)
    assert first.choices() == [[named("a"), None, None], [named("a")]]
    assert (first.report.timed, first.report.left) == (2, 2)
    assert str(first.report) == (
        "2 of 2 matrix products use another algorithm of cuBLASLt than torch (2 timed now, 3.0 s); "
        "2 are left to the next start"
    )
    second = Start(tmp_path, FakeLibrary({"a": 70, "b": 90}))
    assert second.choices() == [[named("a")] * 3, [named("a")]]
    assert (second.report.timed, second.report.kept, second.report.left) == (2, 2, 0)


def test_a_kept_algorithm_that_does_not_hold_any_more_is_searched_again(tmp_path: Path) -> None:
    Start(tmp_path, FakeLibrary({"a": 70, "b": 90}))
    for later in (
        FakeLibrary({"b": 90}),
        FakeLibrary({"a": 70, "b": 90}, wrong=("a",)),
        FakeLibrary({"a": 70, "b": 90}, failing=("a",)),
    ):
        again = Start(tmp_path, later)
        assert again.choices() == [[named("b")] * 3, [named("b")]]
        Start(tmp_path, FakeLibrary({"a": 70}))


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, CublasLtError])
def test_a_search_that_fails_leaves_a_product_as_it_is(
    monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    def full(search: ProductSearch, weights: list[torch.Tensor], rows: int) -> bytes:
        if rows == 2048:
            raise error
        return named("a")

    monkeypatch.setattr(ProductSearch, "fastest", full)
    start = Start(None, FakeLibrary({"a": 1}))
    assert start.choices() == [[named("a"), named("a"), None], [named("a")]]
    assert start.report.left == 1


def test_nothing_needs_a_folder() -> None:
    assert Start(None, FakeLibrary({"a": 70})).report.timed == 4
