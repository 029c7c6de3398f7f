"""Which algorithm a product takes, and that products without one are what they were."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.ops.fake_products import FakeLibrary, aligned, named
from tp_runtime.ops import tuned_product
from tp_runtime.ops.embedding import ParallelLMHead
from tp_runtime.ops.group import SingleCommunicator, TPGroup
from tp_runtime.ops.linear import ColumnParallelLinear, RowParallelLinear
from tp_runtime.ops.product import product
from tp_runtime.ops.tuned_product import TunedProduct

A, B, C = named("a"), named("b"), named("c")


def tuned(*rows: int, library: FakeLibrary | None = None) -> TunedProduct:
    return TunedProduct(library or FakeLibrary({"a": 1}), dict.fromkeys(rows, A))


ALGORITHMS = {48: A, 64: None, 256: B, 2048: C, 4096: None, 8192: A}
LOOK_UPS = {
    1: None,
    16: None,
    17: A,
    47: A,
    48: A,
    49: None,
    64: None,
    65: B,
    256: B,
    257: None,
    2047: None,
}
LOOK_UPS |= {2048: C, 4095: C, 4096: None, 5000: None, 8191: None, 8192: A, 100_000: A}


@pytest.mark.parametrize(("rows", "algorithm"), LOOK_UPS.items())
def test_decode_sizes_are_met_from_above_and_prefills_from_below(
    rows: int, algorithm: bytes | None
) -> None:
    assert TunedProduct(FakeLibrary({}), ALGORITHMS).algorithm(rows) == algorithm


def test_without_a_tuned_prefill_prefills_are_torchs() -> None:
    assert tuned(48).algorithm(4096) is None
    assert TunedProduct(FakeLibrary({}), {}).algorithm(4096) is None
    assert tuned(8192).algorithm(4096) is None


@pytest.mark.parametrize("given", [False, True])
def test_a_tuned_product_is_the_product(given: bool) -> None:
    library, x, weight = FakeLibrary({"a": 1}), aligned(48, 32), aligned(16, 32)
    out = aligned(48, 16) if given else None
    y = tuned(48, library=library).multiply(x, weight, out)
    assert y is not None
    assert torch.equal(y, F.linear(x, weight))
    assert library.launched == [A]
    assert not given or y is out


def test_rows_may_be_part_of_wider_ones() -> None:
    library, weight = FakeLibrary({"a": 1}), aligned(16, 128)
    wide = aligned(48, 384)
    choice = tuned(48, library=library)
    for x in (wide[:, :128], wide[:, 128:256], wide[:, 256:]):
        y = choice.multiply(x, weight)
        assert y is not None
        assert torch.equal(y, F.linear(x, weight))
    assert len(library.launched) == 3


@pytest.mark.parametrize(
    ("x", "weight"),
    [
        (aligned(49, 32), aligned(16, 32)),
        (aligned(48, 32)[:0], aligned(16, 32)),
        (aligned(2, 24, 32), aligned(16, 32)),
        (aligned(48, 32)[1:], aligned(16, 32)),
        (aligned(32, 48).t(), aligned(16, 32)),
        (aligned(1, 32).expand(48, 32), aligned(16, 32)),
        (aligned(48, 32), aligned(16, 64)[:, :32]),
        (aligned(48, 32), aligned(17, 32)[1:]),
        (aligned(48, 32, dtype=torch.float32), aligned(16, 32, dtype=torch.float32)),
    ],
    ids=[
        *("rows", "none", "dimensions", "address", "transposed", "repeated"),
        *("weight-stride", "weight-address", "float32"),
    ],
)
def test_tensors_that_do_not_suit_are_left_to_torch(x: Tensor, weight: Tensor) -> None:
    library = FakeLibrary({"a": 1})
    choice = tuned(48, library=library)
    assert choice.multiply(x, weight) is None
    assert library.launched == []
    assert torch.equal(product(x, weight, tuned=choice), F.linear(x, weight))


def test_an_out_that_does_not_suit_is_left_to_torch() -> None:
    out = aligned(49, 16)[1:]
    assert tuned(48).multiply(aligned(48, 32), aligned(16, 32), out) is None


def test_what_the_library_refuses_for_these_strides_is_left_to_torch() -> None:
    choice = tuned(48, library=FakeLibrary({"a": 1}, refused=("a",)))
    assert choice.multiply(aligned(48, 32), aligned(16, 32)) is None


def test_a_problem_is_prepared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    library, prepared = FakeLibrary({"a": 1}), []
    prepare = library.prepare
    monkeypatch.setattr(library, "prepare", lambda *a: (prepared.append(a), prepare(*a))[1])
    choice, weight = tuned(48, 2048, library=library), aligned(16, 32)
    for rows in (48, 2048, 48, 2050, 2048, 2050):
        assert choice.multiply(aligned(rows, 32), weight) is not None
    assert [problem.rows for problem, _ in prepared] == [48, 2048, 2050]


def test_a_product_with_a_bias_is_torchs() -> None:
    library, x, weight, bias = FakeLibrary({"a": 1}), aligned(48, 32), aligned(16, 32), aligned(16)
    got = product(x, weight, bias, tuned(48, library=library))
    assert torch.equal(got, F.linear(x, weight, bias))
    assert library.launched == []


def test_a_product_without_a_choice_is_torchs() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        for rows in (1, 2, 16, 33, 48, 300):
            x, weight = torch.randn(rows, 32).to(dtype), torch.randn(16, 32).to(dtype)
            assert torch.equal(product(x, weight), F.linear(x, weight))


class TwoParts(SingleCommunicator):
    """Sums of so many rows are made in two parts, and nothing is added."""

    def sums_in_parts(self, rows: int) -> int:
        return 2


def test_layers_take_the_choice_they_are_given() -> None:
    group = TPGroup.single()
    make = {"group": group, "dtype": torch.bfloat16, "device": "cpu"}
    layers = [
        ColumnParallelLinear(32, 16, **make),
        RowParallelLinear(32, 16, **make),
        RowParallelLinear(32, 16, bias=True, **make),
        ParallelLMHead(16, 32, **make),
    ]
    x = aligned(48, 32)
    for layer in layers:
        weight = aligned(*layer.weight.shape)
        layer.weight.data = weight
        bias = getattr(layer, "bias", None)
        if bias is not None:
            bias.data.normal_()
        library = FakeLibrary({"a": 1})
        want = layer(x)
        layer.tuned = tuned(48, library=library)
        assert torch.equal(layer(x), want)
        assert library.launched == [A]


def test_parts_of_a_row_parallel_product_are_prefills_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tuned_product, "POINTER_ALIGNMENT", 64)  # of the CPU's allocator
    library = FakeLibrary({"a": 1, "b": 1})
    group = TPGroup(0, 1, TwoParts())
    layer = RowParallelLinear(128, 128, group=group, dtype=torch.bfloat16, device="cpu")
    layer.weight.data = aligned(128, 128)
    layer.tuned = TunedProduct(library, {2048: A, 4096: B})
    x = aligned(4096, 128)
    assert torch.equal(layer(x), F.linear(x, layer.weight))
    assert library.launched == [A, A]
