"""Exchanges over inboxes in one step. The ranks take turns in one process."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.ops.kernels.closeness import assert_close, assert_same_bits
from tests.ops.kernels.ranks_in_turn import RanksInTurn, terms, total
from tp_runtime.ops.kernels.one_shot import (
    SETS,
    one_shot_all_gather,
    one_shot_all_reduce,
    one_shot_inbox_size,
)
from tp_runtime.ops.kernels.summed_row import words_of
from tp_runtime.ops.norm import add_rms_norm_reference, rms_norm_reference

EPS = 1e-6
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def in_turn(
    ranks: int, rows: int, words: int, device: torch.device, flagged: bool = False
) -> RanksInTurn:
    size = one_shot_inbox_size(ranks, rows, words)
    return RanksInTurn(ranks, rows, words, device, size, 1, flagged)


@pytest.mark.parametrize("flagged", [False, True])
@pytest.mark.parametrize(
    ("ranks", "dtype"), [*((ranks, dtype) for ranks in (2, 3) for dtype in DTYPES), (8, DTYPES[0])]
)
def test_the_sum_is_that_of_all_ranks_and_the_same_bits_everywhere(
    device: torch.device, ranks: int, dtype: torch.dtype, flagged: bool
) -> None:
    together = in_turn(ranks, 3, words_of(72, dtype), device, flagged)
    for rows in (1, 3, 2, 3):
        x = terms(ranks, rows, 72, dtype, device)
        results = together.each(lambda rank, own, x=x: one_shot_all_reduce(x[rank], own)[0])
        for result in results[1:]:
            assert_same_bits(result, results[0])
        assert_same_bits(results[0], total(x))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("size", "flagged"), [(64, False), (200, False), (200, True)])
def test_residual_and_norm_are_those_of_the_separate_layers(
    device: torch.device, size: int, flagged: bool, dtype: torch.dtype
) -> None:
    together = in_turn(2, 3, words_of(size, dtype), device, flagged)
    norm = (1 + 0.3 * torch.randn(size, device=device)).to(dtype)
    for rows in (3, 1, 2):
        x = terms(2, rows, size, dtype, device)
        residual = torch.randn(rows, size, device=device).to(dtype)
        for added in (None, residual):
            results = together.each(
                lambda rank, own, x=x, added=added: one_shot_all_reduce(
                    x[rank], own, norm=norm, eps=EPS, residual=added
                )
            )
            whole = total(x)
            want = (rms_norm_reference(whole, norm, EPS), whole)
            if added is not None:
                want = add_rms_norm_reference(whole, added, norm, EPS)
            for normed, summed in results:
                assert_same_bits(summed, want[1])
                assert_close(normed, want[0])
                assert_same_bits(normed, results[0][0])


def test_gathering_gives_every_rank_everything_in_order(device: torch.device) -> None:
    together = in_turn(3, 1, 64, device)
    for count in (1, 32, 5, 5):
        x = [torch.randint(-(1 << 62), 1 << 62, (count,), device=device) for _ in range(3)]
        for result in together.each(lambda rank, own, x=x: one_shot_all_gather(x[rank], own)):
            assert torch.equal(result, torch.stack(x))


def test_words_of_an_earlier_exchange_are_not_taken_for_new_ones(device: torch.device) -> None:
    """A rank that is alone with its patience at an end adds what is not there as it finds it; what
    matters is that it looked for the others' words and did not go on at once."""
    together = in_turn(2, 1, 8, device)
    x = terms(2, 1, 16, torch.bfloat16, device)
    for _ in range(4):
        together.each(lambda rank, own: one_shot_all_reduce(x[rank], own)[0])
    assert [int(own.turns[0]) for own in together.of] == [4, 4]
    places = together.memory[0].view(SETS, 2, 1, 8)
    sent = {int(word) >> 32 for word in places[0, 1, 0]}
    assert sent == {4}, "the set of even turns holds the words of the fourth exchange"
    assert {int(word) >> 32 for word in places[1, 1, 0]} == {3}


def test_what_does_not_fit_is_refused(device: torch.device) -> None:
    own = in_turn(2, 2, 8, device).of[0]
    with pytest.raises(ValueError, match="do not fit inboxes of 2 rows of 8"):
        one_shot_all_reduce(torch.zeros(3, 16, dtype=torch.bfloat16, device=device), own)
    with pytest.raises(ValueError, match="do not fit"):
        one_shot_all_reduce(torch.zeros(2, 16, device=device), own)
    with pytest.raises(ValueError, match="even number"):
        one_shot_all_reduce(torch.zeros(2, 17, dtype=torch.bfloat16, device=device), own)
    with pytest.raises(ValueError, match="only in front of a norm"):
        x = torch.zeros(2, 16, dtype=torch.bfloat16, device=device)
        one_shot_all_reduce(x, own, residual=x)
    with pytest.raises(ValueError, match="up to 8 contiguous words"):
        one_shot_all_gather(torch.zeros(9, device=device), replace(own, rows=1))
