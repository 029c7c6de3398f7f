"""Gathered and sharded sampling give the same ids, token for token, at every TP size."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.gloo_pool import GlooPool
from tp_runtime.messages import NewRow, RowMask, RowSampling, pack_ids
from tp_runtime.ops.embedding import ParallelLMHead
from tp_runtime.ops.group import TPGroup
from tp_runtime.ops.sampling.sampler import Penalties, SamplingClass, sample
from tp_runtime.workers.batch_state import BatchState
from tp_runtime.workers.gather_sampler import GatherSampler
from tp_runtime.workers.sampling_rows import allowed_ids, build_batch
from tp_runtime.workers.sharded_sampler import ShardedSampler

VOCAB, HIDDEN = 331, 8
Pools = Callable[[int], GlooPool]


def rows_of(kind: str, n: int) -> list[RowSampling]:
    rng = np.random.default_rng(n)
    rows = []
    for i in range(n):
        temperature = 0.0 if kind == "greedy" else float(rng.choice([0.0, 0.7, 1.3]))
        row = RowSampling(temperature=temperature, seed=int(rng.integers(-(2**62), 2**62)))
        if kind == "full":
            row.top_k = int(rng.choice([0, 1, 5]))
            row.top_p = float(rng.choice([1.0, 0.8]))
            row.min_p = float(rng.choice([0.0, 0.1]))
            row.repetition_penalty = float(rng.choice([1.0, 1.4]))
            row.presence_penalty = float(rng.choice([0.0, 0.9]))
            if i % 3 == 0:
                row.bias_ids, row.bias_values = pack_ids([3, 300]), [2.0, -1.0]
                row.blocked_ids, row.min_position = pack_ids([0, VOCAB - 1]), 50 + i
        rows.append(row)
    return rows


def whole_logits(n: int) -> Tensor:
    logits = torch.randn(n, VOCAB, generator=torch.Generator().manual_seed(n)) * 2
    logits[0, 17] = logits[0, 330] = logits[0].max() + 1  # a tie over two shards
    if n > 3:
        logits[1, 200] = float("nan")
        logits[2, 5] = float("inf")
        logits[3] = -30.0 - torch.rand(VOCAB)  # all negative: padding must not win
    return logits


def draw_both(group: TPGroup, kind: str, n: int, alternatives: int) -> tuple[list[int], ...]:
    head = ParallelLMHead(VOCAB, HIDDEN, group=group, dtype=torch.float32, device="cpu")
    whole = whole_logits(n)
    local = torch.full((n, head.shard.padded), float("-inf"))
    local[:, : head.shard.size] = whole[:, head.shard.start : head.shard.stop]
    state = BatchState(n, 1, 16, VOCAB, torch.device("cpu"))
    params = rows_of(kind, n)
    state.parameters.add([NewRow(i, p, 1) for i, p in enumerate(params)])
    floats, ints = state.parameters.floats, state.parameters.ints
    batch = build_batch(params, floats, ints, torch.arange(n) + 40)
    if kind == "full":
        generator = torch.Generator().manual_seed(5)
        batch.penalties = Penalties(
            torch.rand(n, VOCAB, generator=generator) < 0.1,
            torch.randint(0, 2, (n, VOCAB), generator=generator).int(),
            torch.tensor([r.repetition_penalty for r in rows_of(kind, n)]),
            torch.zeros(n),
            torch.tensor([r.presence_penalty for r in rows_of(kind, n)]),
        )
    if kind == "masked":
        masks = [RowMask(i, ids=pack_ids([7, 100 + i, 330])) for i in range(0, n, 2)]
        masks += [RowMask(i, bits=bytes([255] * 5)) for i in range(1, n, 4)]
        batch.kind = SamplingClass.FULL
        batch.allowed = allowed_ids(masks, list(range(n)), VOCAB, local.device)
    gathered = GatherSampler(group, head).draw(local, batch, alternatives)
    sharded = ShardedSampler(group, head).draw(local, batch, alternatives)
    if alternatives >= 0 and group.rank == 0:
        assert gathered.top is not None and sharded.top is not None
        usable = gathered.ids >= 0
        for a, b in zip(gathered.top, sharded.top, strict=True):
            torch.testing.assert_close(a[usable], b[usable])
    return gathered.ids.tolist(), sharded.ids.tolist(), sample(whole, batch).tolist()


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("kind", ["greedy", "gumbel", "full", "masked"])
def test_both_samplers_draw_the_same_on_every_rank(gloo_pool: Pools, size: int, kind: str) -> None:
    for n in (1, 2, 7):
        results = gloo_pool(size).run(draw_both, kind, n, 4 if n == 7 else -1)
        for gathered, sharded, alone in results:
            assert gathered == alone
            assert sharded == alone
        if n == 7:
            assert alone[1] == -1 and alone[2] == -1 and alone[3] >= 0
            if kind == "masked":
                assert all(alone[i] in (7, 100 + i, 330) for i in (0, 4, 6))
                assert alone[5] < 40


def score_both(group: TPGroup) -> bool:
    head = ParallelLMHead(VOCAB, HIDDEN, group=group, dtype=torch.float32, device="cpu")
    whole = torch.randn(5, VOCAB, generator=torch.Generator().manual_seed(0))
    local = torch.full((5, head.shard.padded), float("-inf"))
    local[:, : head.shard.size] = whole[:, head.shard.start : head.shard.stop]
    targets = torch.tensor([0, 330, 100, 7, 7])
    a = GatherSampler(group, head).score(local, targets, 3)
    b = ShardedSampler(group, head).score(local, targets, 3)
    if group.rank != 0:
        return a is None and b is None
    expected = whole.log_softmax(-1).gather(1, targets[:, None])[:, 0]
    assert a is not None and b is not None
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(x, y)
    torch.testing.assert_close(a.chosen, expected)
    return True


@pytest.mark.parametrize("size", [1, 2, 3])
def test_both_samplers_score_given_ids_alike(gloo_pool: Pools, size: int) -> None:
    assert all(gloo_pool(size).run(score_both))
