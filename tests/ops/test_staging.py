"""Copies through two buffers, on a CPU: every shape and layout arrives as it was."""

from __future__ import annotations

import pytest
import torch

from tp_runtime.ops.staging import Staging, copy_in

BYTES = 64


@pytest.mark.parametrize(
    "shape",
    [(), (0,), (1,), (16,), (17,), (1000,), (3, 5), (8, 4), (9, 16), (5, 17), (0, 4), (2, 3, 4)],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_arrives_is_what_was_sent(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Less than a buffer, several of them, rows that fit into none."""
    source = torch.randn(shape).to(dtype)
    destination = torch.full(shape, float("nan"), dtype=dtype)
    staging = Staging(torch.device("cpu"), BYTES)
    staging.copy(destination, source)
    assert torch.equal(destination, source)
    staging.copy(destination, source + 1)
    assert torch.equal(destination, source + 1)


def test_columns_are_gathered_and_formats_converted() -> None:
    whole = torch.randn(20, 12)
    destination = torch.empty(20, 5, dtype=torch.bfloat16)
    Staging(torch.device("cpu"), BYTES).copy(destination, whole[:, 3:8])
    assert torch.equal(destination, whole[:, 3:8].bfloat16())


def test_a_range_of_rows_is_filled_and_nothing_else() -> None:
    whole = torch.zeros(10, 8)
    Staging(torch.device("cpu"), BYTES).copy(whole[2:7], torch.ones(5, 8))
    assert whole.sum(1).tolist() == [0, 0, 8, 8, 8, 8, 8, 0, 0, 0]


def test_on_a_cpu_nothing_is_staged() -> None:
    destination = torch.empty(3, 2)
    copy_in(destination, torch.tensor([[1.0, 2], [3, 4], [5, 6]]))
    assert destination.tolist() == [[1, 2], [3, 4], [5, 6]]
