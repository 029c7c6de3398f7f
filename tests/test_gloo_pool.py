"""The pool of gloo processes: what a failing or hanging rank looks like to a test."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import pytest
import torch

from tests.gloo_pool import GlooPool, PoolFailure
from tp_runtime.ops.group import TPGroup

Pools = Callable[[int], GlooPool]


def _place(group: TPGroup, scale: int) -> tuple[int, int, int, int]:
    return group.rank * scale, group.size, torch.get_num_threads(), os.getpid()


def _raise_on_one(group: TPGroup, bad: int) -> None:
    if group.rank == bad:
        raise KeyError("the bad one")


def _sleep_on_one(group: TPGroup, bad: int) -> None:
    if group.rank == bad:
        time.sleep(60)


def _die_on_one(group: TPGroup, bad: int) -> None:
    if group.rank == bad:
        os._exit(3)


def test_results_come_in_rank_order_from_the_same_processes(gloo_pool: Pools) -> None:
    pool = gloo_pool(2)
    first = pool.run(_place, 10)
    assert [result[:3] for result in first] == [(0, 2, 1), (10, 2, 1)]
    assert len({result[3] for result in first} | {os.getpid()}) == 3
    assert pool.run(_place, 10) == first


def test_an_exception_names_the_rank_and_the_next_pool_works(gloo_pool: Pools) -> None:
    with pytest.raises(PoolFailure, match=r"rank 1 of 2: (.|\n)*KeyError: 'the bad one'"):
        gloo_pool(2).run(_raise_on_one, 1)
    assert gloo_pool(2).run(_place, 1)[1][0] == 1


def test_a_hang_names_the_rank_and_the_line(gloo_pool: Pools) -> None:
    with pytest.raises(PoolFailure, match=r"rank 0 of 2 did not answer(.|\n)*_sleep_on_one"):
        gloo_pool(2).run(_sleep_on_one, 0, timeout=0.5)


def test_a_dead_process_is_reported_with_its_exit_status(gloo_pool: Pools) -> None:
    with pytest.raises(PoolFailure, match="rank 1 of 2: the process died, exit status 3"):
        gloo_pool(2).run(_die_on_one, 1)
