"""Launcher, agent and keepers die or hang: nothing is left behind, nothing bars the next start."""

from __future__ import annotations

import os
import shlex
import signal
import time
from contextlib import ExitStack

import pytest

from tests.faults.fault_server import Load, fault_server, serve, tokens_lost, wait_for
from tests.launch.processes import SMALL, TORCHRUN, TP_RUNTIME, program
from tests.tiny_models import make_tiny
from tp_runtime import Client
from tp_runtime.errors import TPRuntimeError
from tp_runtime.launch import exit_status
from tp_runtime.run_folder import list_servers, run_root

pytestmark = pytest.mark.faults
ENTRY = ("-m", "tp_runtime.launch.serve")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return str(make_tiny("qwen3", tmp_path_factory.mktemp("model") / "tiny"))


def test_keepers_that_die_or_hang_cost_no_token(tiny, tmp_path, fault_table):
    with fault_server(tmp_path, *serve(tiny)) as server, Client(server.address) as client:
        undisturbed = Load(client).finish()
        for rank in (1, 0):
            load = Load(client)
            load.wait_tokens(20)
            happened = server.send(server.keepers()[rank], "kill")
            recovery = server.watch_recovery(happened, 90)
            lost = tokens_lost(load.finish(), undisturbed)
            assert lost == 0
            fault_table.add(f"keeper {rank}", "decode", "kill", recovery, lost)
        # A stopped keeper is noticed when it is needed: its worker cannot be replaced without it.
        load = Load(client)
        load.wait_tokens(20)
        server.send(server.keepers()[0], "stop")
        happened = server.send(server.workers()[1], "kill")
        recovery = server.watch_recovery(happened, 90)
        lost = tokens_lost(load.finish(), undisturbed)
        assert lost == 0
        fault_table.add("keeper 0", "decode", "stop, then worker 1 killed", recovery, lost)


def test_a_worker_that_dies_while_the_server_drains_costs_no_token(tiny, tmp_path, fault_table):
    with fault_server(tmp_path, *serve(tiny)) as server, Client(server.address) as client:
        undisturbed = Load(client, max_tokens=150).finish()
        load = Load(client, max_tokens=150)
        load.wait_tokens(20)
        server.program.signal(signal.SIGTERM)
        wait_for(lambda: server.state() == "draining", 5)
        recovery = server.watch_recovery(server.send(server.workers()[1], "kill"), 60)
        lost = tokens_lost(load.finish(), undisturbed)
        assert lost == 0
        assert server.program.wait(20) == exit_status.OK
        server.program.assert_all_gone()
        fault_table.add("worker 1", "drain", "kill", recovery, lost)


@pytest.mark.parametrize("victim", ["launcher", "launcher and coordinator", "torchrun"])
def test_nothing_is_left_after_two_seconds_and_the_next_one_starts(tiny, tmp_path, victim):
    command = (*TORCHRUN, *ENTRY, tiny, *SMALL) if victim == "torchrun" else serve(tiny)
    with fault_server(tmp_path, *command) as server:
        with Client(server.address, reconnect=False) as client:
            load = Load(client)
            load.wait_tokens(10)
            if "coordinator" in victim:
                os.kill(server.coordinator.pid, signal.SIGKILL)
            server.program.signal(signal.SIGKILL)
            killed = time.monotonic()
            with pytest.raises(TPRuntimeError):
                load.finish()
            assert time.monotonic() - killed < 1.5
        wait_for(lambda: not server.program.left(), 2.0 - (time.monotonic() - killed))
    with program(tmp_path / "next", *TP_RUNTIME, "serve", tiny, *SMALL) as following:
        following.wait_ready(120)
        assert list(run_root().iterdir()) == [following.folders()[0].path]
        assert len(list_servers()) == 1


def test_a_server_whose_starter_is_gone_already_ends_whole(tiny, tmp_path):
    """Started by a shell that ends at once, so that the launcher is a child of init."""
    line = f"{shlex.join(serve(tiny))} & echo $! > {tmp_path / 'pid'}; sleep 1"
    with program(tmp_path / "out", "sh", "-c", line) as shell:
        wait_for(lambda: shell.process.poll() is not None, 20)
        launcher = int((tmp_path / "pid").read_text())
        wait_for(list_servers, 120)
        coordinator = list_servers()[0].process
        folder = next(p for p in run_root().iterdir() if p.name.startswith(f"{launcher}-"))
        wait_for(lambda: b'"ready"' in (folder / "status.json").read_bytes(), 120)
        os.kill(launcher, signal.SIGKILL)
        wait_for(lambda: not coordinator.alive(), 2.0)
        wait_for(lambda: not folder.exists(), 2.0)


def test_eight_servers_started_at_once_all_come_up(tiny, tmp_path):
    with ExitStack() as stack:
        servers = [
            stack.enter_context(
                program(tmp_path / f"out{i}", *TP_RUNTIME, "serve", tiny, "-tp", ranks, *SMALL)
            )
            for i, ranks in enumerate("11112221")
        ]
        addresses = {server.wait_ready(170).address for server in servers}
        assert len(addresses) == 8
        for address in addresses:
            with Client(address) as client:
                assert len(client.generate([5, 6], max_tokens=4, ignore_eos=True).token_ids) == 4
