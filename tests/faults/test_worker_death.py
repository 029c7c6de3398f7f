"""A worker dies or hangs: all are forked anew, and every request goes on at its next token.

One server takes all cases in turn; each begins with everything in order."""

from __future__ import annotations

import itertools
import os

import pytest

from tests.faults.fault_server import (
    FaultServer,
    Load,
    fault_server,
    plan_fault,
    planted_program,
    serve,
    tokens_lost,
    wait_for,
)
from tests.faults.recovery_time import PARTS, measure
from tests.faults.sockets import close_sockets
from tests.tiny_models import make_tiny
from tp_runtime import Client
from tp_runtime.errors import WorkerFailedError
from tp_runtime.launch import exit_status

DEADLINE_S = float(os.environ.get("FAULT_STEP_DEADLINE", "2"))
"""Seconds; more where other programs leave the servers little of the machine."""
START_DEADLINE_S = 60.0
DEATHS = ("kill", "abort", "raise", "exit")
GRID = [
    *itertools.product((0, 1), ("prefill", "decode", "idle"), (*DEATHS, "stop")),
    *itertools.product((0,), ("answer",), (*DEATHS, "stop")),
]
STARTING = [
    *itertools.product((0, 1), ("init", "load", "warm_up"), DEATHS),
    (1, "load", "stop"),
]
"""Of the workers that take the place of others."""
SHORT = [
    (1, "prefill", "kill"),
    (0, "prefill", "raise"),
    (1, "decode", "abort"),
    (1, "decode", "close"),
    (0, "frame", "flip a bit"),
    ("coordinator", "frame", "flip a bit"),
    (1, "decode", "stop"),
    (0, "answer", "kill"),
    (1, "idle", "kill"),
]
"""`close`: all sockets of the worker; `frame`: of the next plan or answer in a ring."""


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("server")
    tiny = str(make_tiny("qwen3", folder / "tiny"))
    command = serve(
        tiny, "--step-deadline", str(DEADLINE_S), "--start-timeout", str(START_DEADLINE_S)
    )
    with fault_server(folder, *command) as server:
        yield server


@pytest.fixture(scope="module")
def undisturbed(server):
    with Client(server.address) as client:
        return Load(client).finish()


@pytest.mark.parametrize(("rank", "phase", "action"), SHORT)
def test_a_worker_that_fails_costs_no_token(server, undisturbed, rank, phase, action):
    run_case(server, undisturbed, rank, phase, action)


def test_a_client_whose_connection_is_closed_goes_on(server, undisturbed):
    with Client(server.address) as client:
        load = Load(client)
        load.wait_tokens(20)
        assert close_sockets(os.getpid(), to=server.coordinator.pid) > 0
        assert tokens_lost(load.finish(), undisturbed) == 0


def test_the_time_of_a_recovery_is_told_by_part_and_adds_up(server):
    """As the runtime measures it, beside what a client sees of it."""
    with Client(server.address) as client:
        times = measure(server, client, 1, "kill")
        stats = client.info().stats
    assert tuple(times.parts) == PARTS
    assert all(seconds > 0.0 for seconds in times.parts.values()), times
    # Detection begins with the last heartbeat before the fault.
    assert times.total - times.parts["detect"] < times.client + 0.1, times
    assert times.client < times.total + 0.5, times
    assert f"Recovered in {times.total:.3f} s: detect " in server.program.text()
    counted = [stats[f'recovery_seconds_total{{part="{part}"}}'] for part in PARTS]
    assert sum(counted) >= times.total
    assert stats["recoveries_total"] >= 1


@pytest.mark.faults
@pytest.mark.parametrize(("rank", "phase", "action"), GRID)
def test_the_whole_grid(server, undisturbed, rank, phase, action, fault_table):
    recovery, lost = run_case(server, undisturbed, rank, phase, action)
    fault_table.add(f"worker {rank}", phase, action, recovery, lost)


@pytest.mark.faults
@pytest.mark.parametrize(("rank", "phase", "action"), STARTING)
def test_workers_that_fail_while_they_take_over(
    server, undisturbed, rank, phase, action, fault_table
):
    with Client(server.address) as client:
        load = Load(client, timeout=200)
        load.wait_tokens(20)
        second = server.plan(rank, phase, action)
        happened = server.send(server.workers()[0], "kill")
        recovery = server.watch_recovery(happened, 120)
        assert second() is not None
        lost = tokens_lost(load.finish(), undisturbed)
    assert lost == 0
    assert len(server.workers()) == 2
    fault_table.add(f"worker {rank}", f"{phase}, after a kill", action, recovery, lost)


@pytest.mark.faults
def test_one_of_eight_ranks_with_two_kv_heads(tmp_path, fault_table):
    folder = make_tiny("qwen3", tmp_path / "tiny", num_attention_heads=8, num_key_value_heads=2)
    with fault_server(tmp_path, *serve(str(folder), ranks=8)) as server:
        with Client(server.address) as client:
            undisturbed = Load(client, timeout=200).finish()
            load = Load(client, timeout=200)
            load.wait_tokens(20)
            happened = server.send(server.workers()[5], "kill")
            recovery = server.watch_recovery(happened, 120)
            lost = tokens_lost(load.finish(), undisturbed)
        assert lost == 0
        assert len(server.workers()) == 8
    fault_table.add("worker 5 of 8", "decode", "kill", recovery, lost)


def test_after_too_many_restarts_come_typed_errors_and_a_status(tmp_path):
    tiny = str(make_tiny("qwen3", tmp_path / "tiny"))
    command = serve(tiny, "--max-worker-restarts", "1", ranks=1)
    with fault_server(tmp_path, *command) as server, Client(server.address) as client:
        first = Load(client)
        first.wait_tokens(10)
        wait_for(server.plan(0, "decode", "raise"), 20)
        first.finish()
        last = Load(client, max_tokens=150)
        last.wait_tokens(10)
        server.plan(0, "decode", "raise")
        with pytest.raises(WorkerFailedError, match="a planted failure") as caught:
            last.finish()
        assert "Rank 0 failed in phase run, step" in str(caught.value)
        assert "given up after 1 restarts within" in str(caught.value)
        assert server.program.wait(10) == exit_status.FAILED
        server.program.assert_all_gone()


@pytest.mark.faults
@pytest.mark.parametrize(("rank", "action"), [(1, "raise"), (0, "kill"), (1, "abort")])
def test_a_server_that_does_not_start_says_why_once(tmp_path, rank, action):
    tiny = str(make_tiny("qwen3", tmp_path / "tiny"))
    with planted_program(tmp_path, *serve(tiny)) as started:
        plan_fault(tmp_path, rank, "load", action)
        assert started.wait(120) == exit_status.FAILED
        assert started.text().count("---- tp_runtime: a worker failed") == 1
        assert f"Rank {rank}" in started.text()
        assert "the server does not start" in started.text()
        started.assert_all_gone()


def run_case(server: FaultServer, undisturbed, rank: int | str, phase: str, action: str):
    old, files = server.workers(), server.open_files()
    with Client(server.address) as client:
        if phase == "idle":
            happened = plan_idle(server, rank, action)
            recovery = server.watch_recovery(happened)
            load = Load(client)
        else:
            if phase == "prefill":
                happened = server.plan(rank, phase, action)
                load = Load(client)
            else:
                load = Load(client)
                load.wait_tokens(20)
                happened = server.plan(rank, phase, action)
            recovery = server.watch_recovery(happened)
        lost = tokens_lost(load.finish(), undisturbed)
    assert lost == 0
    assert recovery.detected_s < 1.0 + (DEADLINE_S if action == "stop" else 0.0)
    new = server.workers()
    assert len(new) == len(old)
    assert not any(worker.alive() for worker in old)
    assert server.open_files() <= files + 2  # the client's connection may not be closed yet
    return recovery, lost


def plan_idle(server: FaultServer, rank: int, action: str):
    """From outside where a signal does it; a worker that does nothing meets no line of ours."""
    if action in ("kill", "stop"):
        return server.send(server.workers()[rank], action)
    return server.plan(rank, "idle", action)
