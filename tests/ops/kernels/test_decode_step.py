"""The kernels around a decode step against their references, padding rows included."""

from __future__ import annotations

import pytest
import torch

from tp_runtime.ops.decode_step import (
    DecodeInput,
    begin_decode_reference,
    end_decode_reference,
)
from tp_runtime.ops.kernels import decode_step as kernels
from tp_runtime.ops.sampling.packed import pack_best


@pytest.mark.parametrize(("n", "rows"), [(1, 1), (8, 5), (100, 70), (4, 0)])
def test_begin_equals_the_reference(device: torch.device, n: int, rows: int) -> None:
    last = torch.randint(-1, 1000, (n + 3,), device=device)
    tables = torch.randint(0, 500, (n + 3, 9), dtype=torch.int32, device=device)
    num_rows = torch.tensor([rows], device=device)
    results = []
    start = torch.randint(0, 9 * 16, (n + 3,), device=device)
    for fused in (False, True):
        position, out = start.clone(), DecodeInput.empty(n, device)
        if fused:
            kernels.begin_decode(
                num_rows,
                last,
                position,
                tables,
                16,
                out.ids,
                out.positions,
                out.drawn_position,
                out.slots,
                out.context_lens,
            )
        else:
            begin_decode_reference(num_rows, last, position, tables, 16, out)
        results.append([position, *vars(out).values()])
    for want, got in zip(*results, strict=True):
        assert torch.equal(want, got)
    assert torch.equal(results[1][0][rows:], start[rows:])
    assert results[1][4][rows:].tolist() == [-1] * (n - rows)


@pytest.mark.parametrize("pieces", [1, 3, 38])
def test_end_equals_the_reference_and_spares_padding(device: torch.device, pieces: int) -> None:
    n = 6
    values = torch.randn(n, pieces, device=device)
    ids = torch.randint(0, 150_000, (n, pieces), device=device)
    best = pack_best(values.flatten(), ids.flatten()).view(n, pieces)
    best[1, pieces // 2] = torch.iinfo(torch.int64).max
    best[2] = pack_best(torch.full((pieces,), float("-inf"), device=device), ids[2])
    num_rows = torch.tensor([4], device=device)
    results = []
    for fused in (False, True):
        last = torch.full((n + 2,), 77, device=device)
        out = torch.zeros(n, dtype=torch.int32, device=device)
        (kernels.end_decode if fused else end_decode_reference)(best, num_rows, last, out)
        results.append((last, out))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
    assert results[1][0].tolist()[4:] == [77] * 4
    assert results[1][1].tolist()[1:3] == [-1, -1]
