"""Which algorithm is chosen: only a right one that is clearly faster than torch."""

from __future__ import annotations

import itertools

import pytest
import torch

from tests.ops.fake_products import TORCH_US, FakeLibrary, FakeTimer, named, weights_of
from tp_runtime.ops import product_search
from tp_runtime.ops.product_search import OutOfTime, ProductSearch

ROWS, PREFILL = 48, 2048


def search_of(library: FakeLibrary) -> ProductSearch:
    return ProductSearch(library, FakeTimer(library))


def test_the_fastest_of_all_that_were_proposed_for_similar_numbers_of_rows_is_chosen() -> None:
    library = FakeLibrary({"a": 90, "b": 99, "c": 80, "d": 120, "e": 50, "f": 70, "g": 200})
    assert search_of(library).fastest(weights_of(32, 64), ROWS) == named("e")
    assert set(library.asked) == {32, 40, 48, 56, 64}


def test_proposals_for_so_many_rows_are_asked_for_once() -> None:
    library = FakeLibrary({"a": 90, "b": 80})
    search = search_of(library)
    search.fastest(weights_of(16, 32), ROWS)
    for_48, library.asked = library.asked, []
    search.fastest(weights_of(16, 32), 64)
    search.fastest(weights_of(16, 32), PREFILL)
    assert library.asked == [80, 96, 2048, 3072]
    library.asked = []
    search.fastest(weights_of(16, 32), ROWS)
    assert library.asked == []
    search.fastest(weights_of(32, 32), ROWS)
    assert library.asked == for_48


@pytest.mark.parametrize(("us", "chosen"), [(97.0, True), (98.5, False), (100.0, False)])
def test_an_algorithm_must_be_ahead_by_more_than_timings_differ(us: float, chosen: bool) -> None:
    found = search_of(FakeLibrary({"a": us, "b": 300})).fastest(weights_of(16, 32), ROWS)
    assert found == (named("a") if chosen else None)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_fast_algorithm_with_a_wrong_result_is_passed_over(dtype: torch.dtype) -> None:
    library = FakeLibrary({"a": 30, "b": 60, "c": 400}, wrong=("a",))
    weights = [weight.to(dtype) for weight in weights_of(16, 32)]
    assert search_of(library).fastest(weights, ROWS) == named("b")
    library = FakeLibrary({"a": 30, "b": 300}, wrong=("a",))
    assert search_of(library).fastest(weights, ROWS) is None


def test_what_the_library_refuses_or_fails_at_is_passed_over() -> None:
    library = FakeLibrary({"a": 10, "b": 20, "c": 60}, refused=("a",), failing=("b",))
    assert search_of(library).fastest(weights_of(16, 32), ROWS) == named("c")


def test_no_proposals_no_choice() -> None:
    library = FakeLibrary({"a": 10}, refused=("a",))
    assert search_of(library).fastest(weights_of(16, 32), ROWS) is None


def test_a_lucky_first_timing_does_not_decide() -> None:
    """The finalists are timed again in turn with torch, and medians count."""

    class Lucky(FakeTimer):
        def record(self, work, calls):
            again = super().record(work, calls)
            lucky = self._library.launched[-1:] == [named("a")]
            times = itertools.chain([20.0] if lucky else [], itertools.repeat(again()))
            return lambda: next(times)

    library = FakeLibrary({"a": 99, "b": 70})
    found = ProductSearch(library, Lucky(library)).fastest(weights_of(16, 32), ROWS)
    assert found == named("b")


def test_weights_are_used_in_turn_and_often_enough_to_come_from_memory() -> None:
    seen = []

    class Watching(FakeTimer):
        def record(self, work, calls):
            seen.append(calls)
            return super().record(work, calls)

    library = FakeLibrary({"a": 10})
    ProductSearch(library, Watching(library)).fastest(weights_of(16, 32), ROWS)
    assert seen[0] == 1
    assert set(seen[1:]) == {int(400 / TORCH_US)}


def test_a_search_ends_when_the_time_is_up() -> None:
    library, left = FakeLibrary({"a": 90, "b": 80, "c": 70}), iter([True, True, False])
    search = ProductSearch(library, FakeTimer(library), lambda: next(left))
    with pytest.raises(OutOfTime):
        search.fastest(weights_of(16, 32), ROWS)


def test_an_algorithm_found_earlier_is_confirmed_by_check_and_result() -> None:
    library = FakeLibrary(
        {"a": 10, "b": 20, "c": 30, "d": 40}, wrong=("b",), refused=("c",), failing=("d",)
    )
    search, weight = search_of(library), weights_of(16, 32)[0]
    confirmed = [search.confirm(weight, ROWS, named(name)) for name in "abcde"]
    assert confirmed == [True, False, False, False, False]


def test_where_the_product_would_be_our_own_kernels_that_is_what_must_be_beaten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[torch.Size] = []
    monkeypatch.setattr(product_search, "is_skinny", lambda x, most: x.shape[0] <= most)
    monkeypatch.setattr(product_search, "product", lambda x, weight: calls.append(x.shape))
    search_of(FakeLibrary({"a": 90})).fastest(weights_of(16, 32), 16)
    assert set(calls) == {torch.Size([16, 32])}
    calls.clear()
    search_of(FakeLibrary({"a": 90})).fastest(weights_of(16, 32), ROWS)
    assert not calls
