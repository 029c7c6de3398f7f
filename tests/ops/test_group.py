"""Collectives of a group: what each returns where, and that every rank gets the same bits."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.gloo_pool import GlooPool
from tp_runtime.ops.group import TPGroup

Pools = Callable[[int], GlooPool]


def _values(rank: int, dtype: torch.dtype) -> Tensor:
    """Numbers whose sum depends on the order of addition."""
    generator = torch.Generator().manual_seed(rank)
    wide = torch.randn(1000, generator=generator) * 10 ** torch.arange(-4, 4).repeat(125)
    return wide.to(dtype)


def _all_reduce(group: TPGroup, dtype: torch.dtype) -> tuple[Tensor, bool]:
    x = _values(group.rank, dtype)
    result = group.comm.all_reduce(x)
    return result.clone(), result is x


def _gathers(group: TPGroup) -> tuple[list[Tensor], list[Tensor] | None, list[Tensor] | None]:
    x = torch.full((2, 3), group.rank)
    gathered = group.comm.all_gather(x)
    return gathered, group.comm.gather(x), group.comm.gather(x, dst=group.size - 1)


def _moves(group: TPGroup) -> tuple[Tensor, Tensor, str]:
    x = torch.full((3,), group.rank)
    group.comm.broadcast(x, src=group.size - 1)
    rows = torch.arange(2 * group.size) + 100 * group.rank
    swapped = group.comm.all_to_all(torch.empty_like(rows), rows)
    group.comm.barrier()
    return x, swapped, group.comm.name


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_all_reduce_gives_every_rank_the_same_bits(
    gloo_pool: Pools, size: int, dtype: torch.dtype
) -> None:
    results = gloo_pool(size).run(_all_reduce, dtype)
    exact = sum(_values(rank, dtype).double() for rank in range(size))
    tolerance = {torch.float32: 1e-6, torch.bfloat16: 2**-6, torch.float16: 2**-9}[dtype]
    scale = sum(_values(rank, dtype).double().abs() for rank in range(size))
    for result, in_place in results:
        assert in_place
        assert torch.equal(result, results[0][0])
        assert ((result.double() - exact).abs() <= tolerance * scale).all()


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_gather_reaches_its_destination_alone_in_rank_order(gloo_pool: Pools, size: int) -> None:
    results = gloo_pool(size).run(_gathers)
    expected = [torch.full((2, 3), rank) for rank in range(size)]
    for rank, (everywhere, at_zero, at_last) in enumerate(results):
        assert all(map(torch.equal, everywhere, expected))
        assert (at_zero is not None) == (rank == 0)
        assert (at_last is not None) == (rank == size - 1)
    assert all(map(torch.equal, results[0][1], expected))
    assert all(map(torch.equal, results[-1][2], expected))


@pytest.mark.parametrize("size", [2, 3])
def test_broadcast_and_all_to_all_move_the_right_parts(gloo_pool: Pools, size: int) -> None:
    for rank, (sent, swapped, name) in enumerate(gloo_pool(size).run(_moves)):
        assert name == "gloo"
        assert sent.tolist() == [size - 1] * 3
        assert swapped.tolist() == [
            value for other in range(size) for value in (100 * other + 2 * rank + i for i in (0, 1))
        ]


def test_the_group_of_one_answers_every_collective_with_its_own_input() -> None:
    group = TPGroup.single()
    x = torch.arange(4)
    assert (group.rank, group.size, group.comm.name) == (0, 1, "single")
    assert group.comm.all_reduce(x) is x
    assert group.comm.broadcast(x) is x
    assert group.comm.all_gather(x) == [x]
    assert group.comm.gather(x) == [x]
    out = torch.zeros_like(x)
    assert group.comm.all_to_all(out, x) is out
    assert torch.equal(out, x)
    group.comm.barrier()
    group.comm.close()


def test_a_group_before_init_process_group_is_refused_with_what_to_do() -> None:
    with pytest.raises(RuntimeError, match="init_process_group"):
        TPGroup.from_process_group("gloo", "cpu")


def _vote(group: TPGroup, against: int) -> bool:
    return group.all_say_yes(group.rank != against, torch.device("cpu"))


@pytest.mark.parametrize("size", [1, 3])
def test_a_vote_is_lost_by_one_voice_and_all_know(gloo_pool: Pools, size: int) -> None:
    assert gloo_pool(size).run(_vote, -1) == [True] * size
    assert gloo_pool(size).run(_vote, size - 1) == [False] * size
