"""A worker dies or hangs: all are forked anew, and every request goes on at its next token.

One server takes all cases in turn; each begins with everything in order."""

from __future__ import annotations

import itertools

import pytest

from tests.faults.fault_server import FaultServer, Load, fault_server, serve, tokens_lost
from tests.tiny_models import make_tiny
from tp_runtime import Client

DEADLINE_S = 2.0
DEATHS = ("kill", "abort", "raise", "exit")
GRID = [
    *itertools.product((0, 1), ("prefill", "decode", "idle"), (*DEATHS, "stop")),
    *itertools.product((0,), ("answer",), (*DEATHS, "stop")),
]
SHORT = [
    (1, "prefill", "kill"),
    (0, "prefill", "raise"),
    (1, "decode", "abort"),
    (0, "decode", "exit"),
    (1, "decode", "stop"),
    (0, "answer", "kill"),
    (1, "idle", "kill"),
    (0, "idle", "stop"),
]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("server")
    tiny = str(make_tiny("qwen3", folder / "tiny"))
    command = serve(tiny, "--step-deadline", str(DEADLINE_S))
    with fault_server(folder, *command) as server:
        yield server


@pytest.fixture(scope="module")
def undisturbed(server):
    with Client(server.address) as client:
        return Load(client).finish()


@pytest.mark.parametrize(("rank", "phase", "action"), SHORT)
def test_a_worker_that_fails_costs_no_token(server, undisturbed, rank, phase, action):
    run_case(server, undisturbed, rank, phase, action)


@pytest.mark.faults
@pytest.mark.parametrize(("rank", "phase", "action"), GRID)
def test_the_whole_grid(server, undisturbed, rank, phase, action, fault_table):
    recovery, lost = run_case(server, undisturbed, rank, phase, action)
    fault_table.add(f"worker {rank}", phase, action, recovery, lost)


def run_case(server: FaultServer, undisturbed, rank: int, phase: str, action: str):
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
