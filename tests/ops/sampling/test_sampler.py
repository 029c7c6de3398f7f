"""The draw: against independent NumPy code, given the same noise, and by its distribution."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tp_runtime.ops.sampling.philox import gumbel, philox_words, uniform
from tp_runtime.ops.sampling.sampler import (
    Allowed,
    Entries,
    Penalties,
    SamplingBatch,
    SamplingClass,
    process,
    sample,
    top_logprobs,
)

Array = NDArray[np.float64]


def batch(rows: int, kind: SamplingClass = SamplingClass.FULL, **values: object) -> SamplingBatch:
    base = SamplingBatch(
        kind=kind,
        temperature=torch.ones(rows),
        seed=torch.arange(rows),
        position=torch.full((rows,), 7),
        top_k=torch.zeros(rows, dtype=torch.int64),
        top_p=torch.ones(rows),
        min_p=torch.zeros(rows),
        min_position=torch.zeros(rows, dtype=torch.int64),
    )
    return dataclasses.replace(base, **values)


def philox_reference(seed: int, position: int, group: int) -> list[int]:
    """Philox4x32-10 with Python's integers, from the paper."""
    mask = 0xFFFFFFFF
    key = [seed & mask, (seed >> 32) & mask]
    c = [group & mask, position & mask, 0, 0]
    for _ in range(10):
        p0, p1 = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [(p1 >> 32) ^ c[1] ^ key[0], p1 & mask, (p0 >> 32) ^ c[3] ^ key[1], p0 & mask]
        key = [(key[0] + 0x9E3779B9) & mask, (key[1] + 0xBB67AE85) & mask]
    return c


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63 - 1, -(2**63), 123456789012345])
def test_philox_gives_the_words_of_the_paper(seed: int) -> None:
    for position, group in [(0, 0), (5, 37983), (131071, 2**31)]:
        words = philox_words(*(torch.tensor([v]) for v in (seed, position, group)))
        assert [int(w) for w in words] == philox_reference(seed, position, group)


def test_philox_known_answer_of_random123() -> None:
    """kat_vectors of Random123: key 0, counter 0."""
    zero = torch.zeros(1, dtype=torch.int64)
    words = [int(w) for w in philox_words(zero, zero, zero)]
    assert words == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]


def test_noise_of_a_shard_is_the_same_part_of_the_whole() -> None:
    seed, position = torch.tensor([3, -9]), torch.tensor([11, 4])
    whole = gumbel(seed, position, 0, 1003)
    for start, stop in [(0, 5), (5, 334), (334, 1003), (1, 2)]:
        assert torch.equal(gumbel(seed, position, start, stop), whole[:, start:stop])


def test_uniform_numbers_are_never_0_or_1_and_are_uniform() -> None:
    u = uniform(torch.arange(64), torch.zeros(64, dtype=torch.int64), 0, 4096)
    assert 0.0 < float(u.min()) and float(u.max()) < 1.0
    counts = torch.histc(u, bins=64, min=0, max=1)
    expected = u.numel() / 64
    assert float(((counts - expected) ** 2 / expected).sum()) < 120  # chi-square, 63 d.f.


def reference(logits: Array, noise: Array, row: dict[str, float], extra: dict[str, Array]) -> int:
    """One row in plain NumPy, in the documented order."""
    x = logits.astype(np.float64).copy()
    x += extra.get("bias", 0.0)
    seen = (extra["prompt"] > 0) | (extra["counts"] > 0)
    r = row["repetition"]
    x = np.where(seen, np.where(x > 0, x / r, x * r), x)
    x = x - row["frequency"] * extra["counts"] - row["presence"] * (extra["counts"] > 0)
    if row["temperature"] == 0:
        return int(np.argmax(x))
    x = x / row["temperature"]
    p = np.exp(x - x.max())
    x = np.where(p < row["min_p"], -np.inf, x)
    order = np.lexsort((np.arange(len(x)), -x))
    keep = order[: int(row["top_k"])] if row["top_k"] > 0 else order
    q = np.exp(x[keep] - x[keep].max())
    q /= q.sum()
    if row["top_p"] < 1:
        keep = keep[: int(np.searchsorted(np.cumsum(q), row["top_p"]) + 1)]
    best = max(keep, key=lambda i: x[i] + noise[i])
    return int(best)


def random_row(rng: np.random.Generator) -> dict[str, float]:
    return {
        "temperature": float(rng.choice([0.0, 0.3, 1.0, 1.7])),
        "top_k": int(rng.choice([0, 1, 3, 40, 10_000])),
        "top_p": float(rng.choice([1.0, 0.9, 0.35, 1e-6])),
        "min_p": float(rng.choice([0.0, 0.05, 0.5])),
        "repetition": float(rng.choice([1.0, 1.3, 0.7])),
        "frequency": float(rng.choice([0.0, 0.8, -0.5])),
        "presence": float(rng.choice([0.0, 1.1])),
    }


@pytest.mark.parametrize("trial", range(6))
def test_every_parameter_equals_an_independent_implementation(trial: int) -> None:
    rng = np.random.default_rng(trial)
    rows, vocab = 64, 101
    logits = (rng.standard_normal((rows, vocab)) * 3).astype(np.float32)
    params = [random_row(rng) for _ in range(rows)]
    prompt = rng.random((rows, vocab)) < 0.1
    counts = rng.poisson(0.2, (rows, vocab))
    bias_ids = rng.integers(0, vocab, rows)
    bias = np.zeros((rows, vocab))
    bias[np.arange(rows), bias_ids] = 1.5

    def column(name: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.tensor([p[name] for p in params], dtype=dtype)

    b = batch(
        rows,
        temperature=column("temperature"),
        top_k=column("top_k", torch.int64),
        top_p=column("top_p"),
        min_p=column("min_p"),
        bias=Entries(torch.arange(rows), torch.from_numpy(bias_ids), torch.full((rows,), 1.5)),
        penalties=Penalties(
            torch.from_numpy(prompt),
            torch.from_numpy(counts.astype(np.int32)),
            column("repetition"),
            column("frequency"),
            column("presence"),
        ),
    )
    got = sample(torch.from_numpy(logits), b)
    noise = gumbel(b.seed, b.position, 0, vocab).numpy()
    expected = [
        reference(
            logits[i],
            noise[i],
            params[i],
            {"bias": bias[i], "prompt": prompt[i], "counts": counts[i]},
        )
        for i in range(rows)
    ]
    assert got.tolist() == expected


def test_greedy_takes_the_lowest_id_on_ties_and_ignores_noise() -> None:
    logits = torch.tensor([[1.0, 5.0, 5.0, 0.0], [2.0, 2.0, 2.0, 2.0]])
    for kind in SamplingClass:
        got = sample(logits, batch(2, kind, temperature=torch.zeros(2)))
        assert got.tolist() == [1, 0]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("kind", list(SamplingClass))
def test_a_row_that_is_not_finite_gets_minus_one_and_the_others_go_on(
    bad: float, kind: SamplingClass
) -> None:
    logits = torch.randn(3, 50)
    clean = sample(logits, batch(3, kind))
    logits[1, 30] = bad
    got = sample(logits, batch(3, kind))
    assert got[1] == -1
    assert got[0] == clean[0] and got[2] == clean[2]


def test_minus_infinity_everywhere_is_not_usable() -> None:
    assert sample(torch.full((1, 9), float("-inf")), batch(1)).tolist() == [-1]


def test_blocked_ids_are_impossible_below_min_position_only() -> None:
    logits = torch.zeros(2, 10)
    logits[:, 4] = 100.0
    b = batch(
        2,
        temperature=torch.zeros(2),
        position=torch.tensor([5, 6]),
        min_position=torch.tensor([6, 6]),
        blocked=Entries(
            torch.tensor([0, 1]), torch.tensor([4, 4]), torch.full((2,), float("-inf"))
        ),
    )
    assert sample(logits, b).tolist() == [0, 4]


def test_only_allowed_ids_are_drawn_and_other_rows_stay_as_they_are() -> None:
    logits = torch.randn(3, 21, generator=torch.Generator().manual_seed(0))
    bits = torch.tensor([[0b0000_0100, 0b1000_0000], [255, 255]], dtype=torch.uint8)
    allowed = Allowed(torch.tensor([1, 0]), bits, torch.tensor([True, False]))
    found = process(logits, batch(3, allowed=allowed))
    assert torch.isfinite(found[1]).nonzero()[:, 0].tolist() == [2, 15]  # 16 to 20: past the bits
    assert torch.equal(found[1, [2, 15]], logits[1, [2, 15]])
    assert torch.equal(found[[0, 2]], logits[[0, 2]])


def test_a_mask_does_not_hide_logits_that_are_not_finite() -> None:
    bits = torch.tensor([[1]] * 3, dtype=torch.uint8)
    allowed = Allowed(torch.arange(3), bits, torch.ones(3, dtype=torch.bool))
    logits = torch.zeros(3, 8)
    logits[0, 5], logits[1, 5] = float("nan"), float("inf")
    assert sample(logits, batch(3, allowed=allowed)).tolist() == [-1, -1, 0]


def test_a_draw_does_not_depend_on_its_batch() -> None:
    logits = torch.randn(20, 500)
    seeds = torch.arange(20) * 7919
    together = sample(logits, batch(20, seed=seeds))
    alone = [int(sample(logits[i : i + 1], batch(1, seed=seeds[i : i + 1]))) for i in range(20)]
    assert together.tolist() == alone


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_softmax(temperature: float) -> None:
    """Chi-square over 40,000 seeds and 12 ids (11 d.f.; 40 has p < 4e-5)."""
    n, vocab = 40_000, 12
    logits = torch.linspace(-2, 2, vocab)
    b = batch(n, SamplingClass.GUMBEL, temperature=torch.full((n,), temperature))
    got = sample(logits.expand(n, vocab), b)
    counts = torch.bincount(got, minlength=vocab).double()
    expected = (logits.double() / temperature).softmax(0) * n
    assert float(((counts - expected) ** 2 / expected).sum()) < 40


def test_top_logprobs_gives_chosen_rank_and_order() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0, 2.0]])
    chosen_id, chosen, rank, values, ids = top_logprobs(logits, torch.tensor([2]), 3)
    assert chosen_id.tolist() == [2]
    expected = logits.log_softmax(-1)
    assert rank.tolist() == [3]
    assert ids.tolist() == [[1, 3, 2]]
    torch.testing.assert_close(chosen, expected[:, 2])
    torch.testing.assert_close(values, expected[:, [1, 3, 2]])
