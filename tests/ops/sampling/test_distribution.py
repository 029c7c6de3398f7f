"""What is drawn follows the distribution that the parameters describe: chi-square, 12 ids.

Seeds and positions follow each other, as those of samples and of tokens do, so a generator whose
neighbouring keys are alike would show here. 0.9999 quantiles, so that a sound draw stays below.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tests.ops.sampling.test_sampler import batch
from tp_runtime.ops.sampling.sampler import Entries, Penalties, SamplingClass, sample

N, VOCAB = 16_000, 12
LOGITS = np.linspace(-2.0, 2.0, VOCAB)
QUANTILE = {1: 15.2, 2: 18.5, 3: 21.2, 4: 23.6, 5: 25.8, 8: 31.9, 11: 37.4, 121: 188.0}
"""Of the chi-square distribution, by degrees of freedom."""

Array = NDArray[np.float64]


def softmax(x: Array) -> Array:
    p = np.exp(x - x.max())
    return p / p.sum()


def assert_follows(counts: Array, probabilities: Array) -> None:
    """Nothing outside the support, and inside it as often as expected."""
    assert counts[probabilities == 0].sum() == 0
    inside = probabilities > 0
    expected = probabilities[inside] * counts.sum()
    statistic = ((counts[inside] - expected) ** 2 / expected).sum()
    assert statistic < QUANTILE[inside.sum() - 1]


def of(name: str, value: float) -> dict[str, torch.Tensor]:
    dtype = torch.int64 if name == "top_k" else torch.float32
    return {name: torch.full((N,), value, dtype=dtype)}


def kept(x: Array, number: int) -> Array:
    """The probabilities when only the last `number` ids, the likeliest, are left."""
    p = np.zeros(VOCAB)
    p[-number:] = softmax(x[-number:])
    return p


def nucleus(x: Array, top_p: float) -> Array:
    falling = softmax(x)[::-1]
    return kept(x, int(np.searchsorted(np.cumsum(falling), top_p)) + 1)


def above(x: Array, min_p: float) -> Array:
    return kept(x, int((softmax(x) >= min_p * softmax(x).max()).sum()))


CASES = {
    "top_k": (of("top_k", 4), kept(LOGITS, 4)),
    "top_k of two, hot": ({**of("top_k", 2), **of("temperature", 3.0)}, kept(LOGITS / 3, 2)),
    "top_p": (of("top_p", 0.8), nucleus(LOGITS, 0.8)),
    "min_p": (of("min_p", 0.2), above(LOGITS, 0.2)),
    "nothing cut": (of("top_k", 12), softmax(LOGITS)),
}


def drawn(**values: object) -> Array:
    rows = torch.from_numpy(LOGITS).float().expand(N, VOCAB)
    ids = sample(rows, batch(N, SamplingClass.FULL, **values))
    return torch.bincount(ids, minlength=VOCAB).double().numpy()


@pytest.mark.parametrize(("values", "probabilities"), CASES.values(), ids=CASES)
def test_truncated_draws_follow_what_is_left(
    values: dict[str, torch.Tensor], probabilities: Array
) -> None:
    assert_follows(drawn(**values), probabilities)


def test_bias_and_penalties_shift_the_distribution() -> None:
    bias = np.zeros(VOCAB)
    bias[2] = 3.0
    counts = np.zeros(VOCAB)
    counts[11], counts[10] = 2, 1
    seen = counts > 0
    x = LOGITS + bias
    x = np.where(seen, np.where(x > 0, x / 1.5, x * 1.5), x) - 0.4 * counts - 0.3 * seen
    entries = Entries(torch.arange(N), torch.full((N,), 2), torch.full((N,), 3.0))
    penalties = Penalties(
        torch.zeros(N, VOCAB, dtype=torch.bool),
        torch.from_numpy(counts).int().expand(N, VOCAB),
        torch.full((N,), 1.5),
        torch.full((N,), 0.4),
        torch.full((N,), 0.3),
    )
    assert_follows(drawn(bias=entries, penalties=penalties), softmax(x))


@pytest.mark.parametrize("neighbour", ["seed", "position"])
def test_draws_of_neighbouring_keys_are_independent(neighbour: str) -> None:
    """Pairs of draws (seed, seed + 1), or (position, position + 1), over the 144 pairs of ids."""
    rows = torch.from_numpy(LOGITS / 3).float().expand(N, VOCAB)  # no pair is rare
    seed, position = torch.arange(N) * 2, torch.full((N,), 7)
    first = sample(rows, batch(N, SamplingClass.GUMBEL, seed=seed, position=position))
    if neighbour == "seed":
        seed = seed + 1
    else:
        position = position + 1
    second = sample(rows, batch(N, SamplingClass.GUMBEL, seed=seed, position=position))
    counts = torch.bincount(first * VOCAB + second, minlength=VOCAB**2).double().numpy()
    table = counts.reshape(VOCAB, VOCAB)
    expected = np.outer(table.sum(1), table.sum(0)) / N
    assert ((table - expected) ** 2 / expected).sum() < QUANTILE[(VOCAB - 1) ** 2]
