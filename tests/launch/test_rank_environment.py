"""Places, thread counts and the environment that libraries read at import."""

from __future__ import annotations

import os

import pytest

from tp_runtime.errors import ConfigError
from tp_runtime.launch.rank_environment import (
    RankPlace,
    prepare_imports,
    threads_per_rank,
    usable_cores,
)

TWO = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}


def test_the_place_comes_from_torchrun():
    assert RankPlace.from_environment(TWO) == RankPlace(1, 1, 2, 2)


def test_without_torchrun_the_sentence_says_how_to_start():
    with pytest.raises(ConfigError, match=r"torchrun .*tp-runtime serve"):
        RankPlace.from_environment({"RANK": "0"})


def test_rank_zero_s_host_coordinates_and_ranks_of_a_host_are_consecutive():
    place = RankPlace.from_environment({**TWO, "RANK": "3", "WORLD_SIZE": "4"})
    assert place.several_hosts
    assert place.first_rank == 2
    assert not place.coordinates
    assert RankPlace.from_environment({**TWO, "WORLD_SIZE": "4"}).coordinates
    assert not RankPlace.from_environment(TWO).several_hosts


def test_threads_are_the_cores_shared_by_the_ranks_unless_the_user_chose(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # torchrun's own default, not a choice
    assert threads_per_rank(1) == usable_cores()
    assert threads_per_rank(10**6) == 1
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert threads_per_rank(1) == 3


def test_cores_are_those_of_the_affinity_mask():
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        assert usable_cores() == 1
    finally:
        os.sched_setaffinity(0, before)


def test_libraries_start_with_one_thread_and_meet_on_loopback():
    environment = {"OMP_NUM_THREADS": "8", "NCCL_SOCKET_IFNAME": "eth0", "MASTER_ADDR": "some-host"}
    prepare_imports(environment, RankPlace(0, 0, 2, 2))
    assert environment["OMP_NUM_THREADS"] == environment["MKL_NUM_THREADS"] == "1"
    assert environment["GLOO_SOCKET_IFNAME"] == "lo"
    assert environment["NCCL_SOCKET_IFNAME"] == "eth0"  # the user's choice
    assert environment["MASTER_ADDR"] == "127.0.0.1"


def test_several_hosts_meet_on_the_interface_that_leads_to_the_first_one():
    environment = {"MASTER_ADDR": "127.0.0.1"}
    prepare_imports(environment, RankPlace(0, 0, 2, 1))
    assert environment["MASTER_ADDR"] == "127.0.0.1"
    assert environment["GLOO_SOCKET_IFNAME"] == "lo"  # this very host was meant
    assert "NCCL_SOCKET_IFNAME" not in environment
    environment = {"MASTER_ADDR": "no-such-host.invalid"}
    prepare_imports(environment, RankPlace(0, 0, 2, 1))
    assert "GLOO_SOCKET_IFNAME" not in environment
