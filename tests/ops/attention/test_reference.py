"""The reference back-end against attention written out in float64."""

from __future__ import annotations

import pytest
import torch

from tests.ops.attention.cases import Case
from tp_runtime.ops.attention.reference import ReferenceBackend

BACKEND = ReferenceBackend()
WINDOWS = [None, 1, 16, 20, 1000]
HEADS = [(4, 2), (3, 1), (2, 2)]


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("heads", HEADS)
def test_prefill_of_fresh_sequences_around_the_block_size(
    window: int | None, heads: tuple[int, int]
) -> None:
    lengths = [1, 15, 16, 17, 40]
    case = Case.make(lengths, lengths, heads=heads)
    case.check(case.run_prefill(BACKEND, cached=False, window=window), window)
    case.check(case.run_prefill(BACKEND, cached=True, window=window), window)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("heads", HEADS)
def test_prefill_over_a_cached_prefix(window: int | None, heads: tuple[int, int]) -> None:
    """One token left of a cached prompt, whole blocks, parts of blocks, nothing cached at all."""
    case = Case.make([17, 32, 40, 33, 16], [1, 16, 7, 33, 1], heads=heads)
    case.check(case.run_prefill(BACKEND, cached=True, window=window), window)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("block_size", [1, 16, 24])
def test_decode_over_the_paged_cache(
    window: int | None, heads: tuple[int, int], block_size: int
) -> None:
    contexts = [1, 15, 16, 17, 50]
    case = Case.make(contexts, [1] * 5, heads=heads, block_size=block_size)
    case.check(case.run_decode(BACKEND, window=window), window)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [64, 128, 192])
def test_head_sizes_and_dtypes(dtype: torch.dtype, head_dim: int) -> None:
    decode = Case.make([33, 5], [1, 1], head_dim=head_dim, dtype=dtype)
    decode.check(decode.run_decode(BACKEND))
    prefill = Case.make([20, 5], [8, 5], head_dim=head_dim, dtype=dtype)
    prefill.check(prefill.run_prefill(BACKEND, cached=True))


def test_padding_rows_read_nothing_and_give_zero() -> None:
    """The cache behind them is NaN and their block tables point outside it."""
    case = Case.make([0, 17, 0, 3], [1, 1, 1, 1])
    out = case.run_decode(BACKEND)
    case.check(out)
    assert not out[[0, 2]].any()


def test_a_batch_of_padding_rows_alone_gives_zero() -> None:
    case = Case.make([0, 0], [1, 1])
    assert not case.run_decode(BACKEND).any()


def test_sequences_without_new_tokens_are_passed_over() -> None:
    case = Case.make([17, 5, 9], [3, 0, 9])
    case.check(case.run_prefill(BACKEND, cached=True))
