"""There is no shared memory left: none in /dev/shm, none for rings.

Two ways, named in the table: a tmpfs of 64 KiB, filled, over /dev/shm in a mount namespace of the
server; and a limit on the size of the coordinator's memory files (RLIMIT_FSIZE), which hits the
rings and the heartbeat page of workers that are to be forked."""

from __future__ import annotations

import resource
import subprocess
import time

import pytest

from tests.faults.fault_server import FaultServer, Load, fault_server, serve, tokens_lost
from tests.tiny_models import make_tiny
from tp_runtime import Client
from tp_runtime.errors import WorkerFailedError
from tp_runtime.launch import exit_status

pytestmark = pytest.mark.faults
FULL = (
    "mount -t tmpfs -o size=64k tmpfs /dev/shm && "
    "! dd if=/dev/zero of=/dev/shm/full bs=1k count=100 2>/dev/null && exec "
)
IN_NAMESPACE = ("unshare", "--user", "--map-root-user", "--mount", "sh", "-c")
TOO_LITTLE = 256 << 10
"""Bytes of a file at most: enough for the run folder's files, too little for a ring of 1 MiB."""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return str(make_tiny("qwen3", tmp_path_factory.mktemp("model") / "tiny"))


def test_a_full_dev_shm_is_not_noticed(tiny, tmp_path, fault_table):
    if subprocess.run([*IN_NAMESPACE, f"{FULL} true"], check=False).returncode:
        pytest.skip("mount namespaces cannot be made here")
    command = (*IN_NAMESPACE, f'{FULL} "$0" "$@"', *serve(tiny))
    with fault_server(tmp_path, *command) as server, Client(server.address) as client:
        undisturbed = Load(client).finish()
        load = Load(client)
        load.wait_tokens(20)
        recovery = server.watch_recovery(server.send(server.workers()[1], "kill"))
        lost = tokens_lost(load.finish(), undisturbed)
    assert lost == 0
    fault_table.add("all", "start, kill", "/dev/shm full: tmpfs", recovery, lost)


def limit_files(pid: int, size: int) -> None:
    _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, hard))


def is_tried_again(server: FaultServer) -> bool:
    return server.program.text().count("shares with the coordinator cannot be had") >= 2


def test_workers_wait_for_memory_that_is_short_for_a_moment(tiny, tmp_path, fault_table):
    with fault_server(tmp_path, *serve(tiny)) as server, Client(server.address) as client:
        undisturbed = Load(client).finish()
        load = Load(client)
        load.wait_tokens(20)
        coordinator = server.coordinator
        limit_files(coordinator.pid, TOO_LITTLE)
        happened = server.send(server.workers()[1], "kill")
        recovery = server.watch_recovery(happened, until=lambda: is_tried_again(server))
        limit_files(coordinator.pid, resource.RLIM_INFINITY)
        server.wait_ready()
        recovery.recovered_s = time.monotonic() - happened()
        lost = tokens_lost(load.finish(), undisturbed)
        assert server.coordinator == coordinator
    assert lost == 0
    fault_table.add("coordinator", "recovery", "memory full: limit", recovery, lost)


def test_memory_that_stays_short_is_a_typed_error_and_the_end(tiny, tmp_path):
    command = serve(tiny, "--max-worker-restarts", "3")
    with fault_server(tmp_path, *command) as server, Client(server.address) as client:
        load = Load(client, max_tokens=150)
        load.wait_tokens(10)
        limit_files(server.coordinator.pid, TOO_LITTLE)
        server.send(server.workers()[1], "kill")
        with pytest.raises(WorkerFailedError, match="cannot be had"):
            load.finish()
        assert server.program.wait(10) == exit_status.FAILED
        server.program.assert_all_gone()
