"""The packed best token of a shard: kernel against reference, ties, broken rows, noise."""

from __future__ import annotations

import pytest
import torch

from tp_runtime.ops.kernels.best_token import best_token
from tp_runtime.ops.sampling import sampler
from tp_runtime.ops.sampling.best import best_reference
from tp_runtime.ops.sampling.packed import unpack_id
from tp_runtime.ops.sampling.sampler import SamplingBatch, SamplingClass, sample


def batch(rows: int, kind: SamplingClass, device: torch.device) -> SamplingBatch:
    zeros = torch.zeros(rows, dtype=torch.int64, device=device)
    generator = torch.Generator().manual_seed(1)
    seeds = torch.randint(-(2**62), 2**62, (rows,), generator=generator)
    temperature = torch.tensor([0.0, 0.6, 1.0, 1.7]).repeat(rows)[:rows]
    return SamplingBatch(
        kind=kind,
        temperature=temperature.to(device),
        seed=seeds.to(device),
        position=torch.arange(rows, device=device) * 977,
        top_k=zeros,
        top_p=zeros.float() + 1,
        min_p=zeros.float(),
        min_position=zeros,
    )


@pytest.mark.parametrize("start", [0, 64, 9600])
@pytest.mark.parametrize("columns", [5, 331, 4099])
@pytest.mark.parametrize("kind", [SamplingClass.GREEDY, SamplingClass.GUMBEL])
def test_equals_the_reference(
    device: torch.device, kind: SamplingClass, columns: int, start: int
) -> None:
    rows = 6
    logits = torch.randn(rows, columns + 3, device=device)[:, :columns]
    logits[4, columns // 2] = float("nan")
    logits[5, columns - 1] = float("inf")
    b = batch(rows, kind, device)
    temperature = b.temperature if kind == SamplingClass.GUMBEL else None
    got = best_token(logits, start, temperature, b.seed, b.position).amax(1)
    want = best_reference(logits, start, b)
    assert unpack_id(got).tolist() == unpack_id(want).tolist()
    assert unpack_id(got).tolist()[4:] == [-1, -1]


def test_ties_over_pieces_go_to_the_lowest_id(device: torch.device) -> None:
    logits = torch.zeros(1, 9000, device=device)
    logits[0, [4500, 8191, 8999]] = 3.0
    b = batch(1, SamplingClass.GREEDY, device)
    assert unpack_id(best_token(logits, 400, None, b.seed, b.position).amax(1)).tolist() == [4900]


def test_a_draw_after_truncation_uses_it_and_draws_the_same(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Top-k, top-p, min-p and greedy rows, and such as cannot be drawn."""
    rows = 12
    logits = 3 * torch.randn(rows, 700, device=device)
    logits[9, 5] = float("nan")
    logits[10, 699] = float("inf")
    logits[11] = float("-inf")
    b = batch(rows, SamplingClass.FULL, device)
    b.top_k = torch.tensor([0, 5, 0, 40] * 3, device=device)
    b.top_p = torch.tensor([1.0, 1.0, 0.6, 0.9] * 3, device=device)
    b.min_p = torch.tensor([0.0, 0.0, 0.0, 0.05] * 3, device=device)
    b.temperature[5] = 1e-39  # a top-k row whose logits become infinite
    monkeypatch.setattr(sampler, "runs_kernels", lambda x: False)
    want = sample(logits, b)
    monkeypatch.setattr(sampler, "runs_kernels", lambda x: True)
    used = []
    kernel = sampler._draw_by_kernel
    monkeypatch.setattr(sampler, "_draw_by_kernel", lambda *a: (used.append(a), kernel(*a))[1])
    assert sample(logits, b).tolist() == want.tolist()
    assert want.tolist()[9:] == [-1] * 3
    assert len(used) == 1
