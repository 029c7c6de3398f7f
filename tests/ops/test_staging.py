"""Copies through two buffers, on a CPU: every shape and layout arrives as it was."""

from __future__ import annotations

import pytest
import torch

from tp_runtime.ops import staging as module
from tp_runtime.ops.staging import Staging, copy_in, release_staging

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


class Pageable(torch.Tensor):
    """Says that it is on a GPU."""

    is_cuda = True


def test_only_what_comes_from_pageable_memory_is_staged(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[torch.Size] = []

    class Noting(Staging):
        def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
            used.append(source.shape)
            super().copy(destination, source)

    monkeypatch.setattr(module, "_staging", lambda device: Noting(device, BYTES))
    source = torch.randn(3, 20)
    for destination, staged in (
        (torch.empty(3, 20), False),
        (torch.empty(3, 20).as_subclass(Pageable), True),
        (torch.empty(20, 3).t().as_subclass(Pageable), False),
    ):
        used.clear()
        copy_in(destination, source)
        assert torch.equal(destination.as_subclass(torch.Tensor), source)
        assert bool(used) == staged


def test_buffers_are_let_go_of_after_loading() -> None:
    module._staging(torch.device("cpu"))
    release_staging()
    assert module._staging.cache_info().currsize == 0
