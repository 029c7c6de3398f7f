"""Sums over inboxes in two steps: by ranks that take turns in one process, and by processes that
write each other's memory and wait for each other."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.gloo_pool import GlooPool
from tests.ops.kernels.closeness import assert_close, assert_same_bits
from tests.ops.kernels.ranks_in_turn import RanksInTurn, terms, total
from tp_runtime.ops.exchange_check import sums_are_right
from tp_runtime.ops.group import TPGroup
from tp_runtime.ops.kernels.inboxes import Inboxes
from tp_runtime.ops.kernels.one_shot import one_shot_all_reduce, one_shot_inbox_size
from tp_runtime.ops.kernels.summed_row import words_of
from tp_runtime.ops.kernels.two_shot import (
    two_shot_all_reduce,
    two_shot_inbox_size,
    two_shot_rows,
)
from tp_runtime.ops.norm import add_rms_norm_reference, rms_norm_reference

EPS = 1e-6
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
Pools = Callable[[int], GlooPool]
in_processes = pytest.mark.skipif(
    torch.cuda.is_available(), reason="memory of processes; tests/gpu/test_symmetric.py on GPUs"
)


def in_turn(ranks: int, rows: int, words: int, device: torch.device) -> RanksInTurn:
    return RanksInTurn(ranks, rows, words, device, two_shot_inbox_size(ranks, rows, words), 2)


def one_shot_in_turn(ranks: int, rows: int, words: int, device: torch.device) -> RanksInTurn:
    return RanksInTurn(ranks, rows, words, device, one_shot_inbox_size(ranks, rows, words), 1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_the_sum_is_that_of_all_ranks_in_their_order_whoever_owns_a_row(
    device: torch.device, ranks: int, dtype: torch.dtype
) -> None:
    together = in_turn(ranks, 5, words_of(72, dtype), device)
    for rows in (1, 5, 3, 5, 2):
        x = terms(ranks, rows, 72, dtype, device)
        results = together.each(lambda rank, own, x=x: two_shot_all_reduce(x[rank], own)[0])
        for result in results:
            assert torch.equal(result, results[0])
        assert_same_bits(results[0], total(x))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("ranks", "size"), [(2, 64), (3, 200), (4, 34)])
def test_sum_residual_and_norm_have_the_bits_of_one_shot(
    device: torch.device, ranks: int, size: int, dtype: torch.dtype
) -> None:
    """And are those of the separate layers."""
    words = words_of(size, dtype)
    two, one = in_turn(ranks, 3, words, device), one_shot_in_turn(ranks, 3, words, device)
    norm = (1 + 0.3 * torch.randn(size, device=device)).to(dtype)
    x = terms(ranks, 3, size, dtype, device)
    whole = total(x)
    for residual in (None, torch.randn(3, size, device=device).to(dtype)):

        def both(kernel, residual=residual):  # type: ignore[no-untyped-def]
            return lambda rank, own: kernel(x[rank], own, norm=norm, eps=EPS, residual=residual)

        results = two.each(both(two_shot_all_reduce))
        other = one.each(both(one_shot_all_reduce))
        if residual is None:
            want = rms_norm_reference(whole, norm, EPS), whole
        else:
            want = add_rms_norm_reference(whole, residual, norm, EPS)
        for (normed, summed), (normed_once, summed_once) in zip(results, other, strict=True):
            assert torch.equal(summed, summed_once)
            assert torch.equal(normed, normed_once)
            assert_same_bits(summed, want[1])
            assert_close(normed, want[0])


def test_what_does_not_fit_is_refused(device: torch.device) -> None:
    own = in_turn(2, 2, 8, device).of[0]
    with pytest.raises(ValueError, match="do not fit inboxes of 2 rows of 8"):
        two_shot_all_reduce(torch.zeros(3, 16, dtype=torch.bfloat16, device=device), own)
    with pytest.raises(ValueError, match="even number"):
        two_shot_all_reduce(torch.zeros(2, 17, dtype=torch.bfloat16, device=device), own)
    x = torch.zeros(2, 16, dtype=torch.bfloat16, device=device)
    with pytest.raises(ValueError, match="only in front of a norm"):
        two_shot_all_reduce(x, own, residual=x)
    assert two_shot_all_reduce(x[:0], own)[0].shape == (0, 16)


def test_no_rank_writes_past_an_inbox(device: torch.device) -> None:
    """Rows that the ranks do not divide, of a number of words that places do not divide."""
    ranks, rows, words = 3, 4, 31
    size = two_shot_inbox_size(ranks, rows, words)
    together = RanksInTurn(ranks, rows, words, device, size + 64, 2)
    for memory in together.memory:
        memory[size:] = -1
    x = terms(ranks, rows, words * 2, torch.float16, device)
    together.each(lambda rank, own: two_shot_all_reduce(x[rank], own))
    for memory in together.memory:
        assert (memory[size:] == -1).all()


def test_programs_that_run_at_once_are_four_of_256_threads_a_processor() -> None:
    assert two_shot_rows(2048, 132) == 4 * 132
    assert two_shot_rows(2560, 132) == 2 * 132


# ------------------------------------------------------------ ranks that run at the same time


def mapped(group: TPGroup, folder: Path, rows: int, words: int, patience: int) -> Inboxes:
    """Inboxes in files, as each process sees them."""
    size = two_shot_inbox_size(group.size, rows, words)
    memory = [
        torch.from_file(str(folder / f"inbox_{r}"), shared=True, size=size, dtype=torch.int64)
        for r in range(group.size)
    ]
    addresses = torch.tensor([m.data_ptr() for m in memory])
    MAPPED.append(memory)  # as long as the process lives: the kernels know addresses alone
    group.comm.barrier()
    turns = torch.zeros(rows, dtype=torch.int32)
    return Inboxes(group.rank, group.size, rows, words, addresses, turns, patience)


MAPPED: list[list[Tensor]] = []
PATIENCE = 20


def chain(group: TPGroup, folder: Path) -> list[tuple[Tensor, Tensor]]:
    """(the sum, all terms) of exchanges of different numbers of rows, one right after the other,
    with a rank that lags now and then. Waits for ever."""
    own = mapped(group, folder, 5, 36, 0)
    found = []
    for turn, rows in enumerate((5, 5, 1, 4, 5, 2, 2, 2, 5, 3)):
        generators = [torch.Generator().manual_seed(10 * turn + r) for r in range(group.size)]
        x = [torch.randn(rows, 72, generator=g).half() for g in generators]
        if turn % group.size == group.rank:
            time.sleep(0.05)
        found.append((two_shot_all_reduce(x[group.rank], own)[0], total(x)))
    group.comm.barrier()
    return found


@in_processes
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_ranks_that_run_at_the_same_time_wait_for_each_other(
    gloo_pool: Pools, tmp_path: Path, ranks: int
) -> None:
    for found in gloo_pool(ranks).run(chain, tmp_path):
        for ours, want in found:
            assert torch.equal(ours, want)


def checked(group: TPGroup, folder: Path, fault: str) -> bool:
    """The self-test, with a last rank that has the given fault."""
    last = group.rank == group.size - 1
    patience = PATIENCE if fault else 0
    own = mapped(group, folder, 4, 18, patience)
    right = True

    def kernel(x: Tensor, inboxes: Inboxes) -> tuple[Tensor, Tensor]:
        wrong = fault == "wrong in the third turn" and last and int(inboxes.turns[0]) == 2
        return two_shot_all_reduce(x + 1 if wrong else x, inboxes)

    if not (fault == "missing" and last):
        right = sums_are_right(kernel, own, torch.float16)
    group.comm.barrier()
    return right


@in_processes
@pytest.mark.parametrize("fault", ["missing", "wrong in the third turn"])
def test_the_self_test_finds_a_rank_that_is_wrong_or_missing(
    gloo_pool: Pools, tmp_path: Path, fault: str
) -> None:
    assert not any(gloo_pool(3).run(checked, tmp_path, fault)[:2])


@in_processes
def test_the_self_test_passes_where_all_is_well(gloo_pool: Pools, tmp_path: Path) -> None:
    assert all(gloo_pool(3).run(checked, tmp_path, ""))
