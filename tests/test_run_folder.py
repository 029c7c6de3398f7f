"""The run folder: found by name, written whole, left behind by nobody."""

from __future__ import annotations

import os
import resource
import subprocess
import sys

import pytest

from tp_runtime.errors import ConfigError, WeightsError
from tp_runtime.run_folder import (
    ProcessId,
    RunFolder,
    ServerInfo,
    list_servers,
    process_start_time,
    run_root,
)


@pytest.fixture(autouse=True)
def runtime_dir(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


def info_of(process: ProcessId, address: str = "ipc:///x") -> ServerInfo:
    return ServerInfo(
        address=address, model="m", tensor_parallel_size=2, device="cpu", process=process
    )


def dead_process() -> ProcessId:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    identity = ProcessId.of(process.pid)
    process.kill()
    process.wait()
    return identity


def test_a_process_is_told_from_a_later_one_with_the_same_pid():
    me = ProcessId.current()
    assert me.alive()
    assert not ProcessId(me.pid, me.start_time - 1).alive()
    assert not dead_process().alive()
    with pytest.raises(ProcessLookupError):
        process_start_time(2**22 + 1)


def test_a_zombie_counts_as_gone():
    process = subprocess.Popen([sys.executable, "-c", ""])
    identity = ProcessId(process.pid, process_start_time(process.pid))
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert not identity.alive()
    process.wait()


def test_all_processes_find_the_folder_by_the_owner_alone():
    owner = ProcessId.current()
    RunFolder.for_owner(owner).create()
    assert RunFolder.for_owner(owner).path.is_dir()
    assert RunFolder.for_owner(owner).owner_alive()
    assert os.stat(RunFolder.for_owner(owner).path).st_mode & 0o077 == 0


def test_without_a_runtime_dir_a_private_folder_in_the_temporary_directory_is_used(
    tmp_path, monkeypatch
):
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    root = run_root()
    assert root == tmp_path / f"tp_runtime-{os.getuid()}"
    assert os.stat(root).st_mode & 0o777 == 0o700


def test_a_root_open_to_others_is_refused(tmp_path):
    (tmp_path / "tp_runtime").mkdir()
    os.chmod(tmp_path / "tp_runtime", 0o777)
    with pytest.raises(ConfigError, match="0700"):
        run_root()


def test_a_root_that_is_a_link_is_refused(tmp_path):
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (tmp_path / "tp_runtime").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError):
        run_root()


def test_the_first_cause_of_failure_stays():
    folder = RunFolder.for_owner(ProcessId.current()).create()
    assert folder.write_failure("weights", "Tensor x is missing.")
    assert not folder.write_failure("worker_failed", "an echo")
    error = folder.read_failure().error()
    assert isinstance(error, WeightsError)
    assert str(error) == "Tensor x is missing."
    assert [p.name for p in folder.path.iterdir()] == ["failure.json"]


def test_servers_are_listed_while_their_coordinator_lives():
    folder = RunFolder.for_owner(ProcessId.current()).create()
    assert list_servers() == []
    folder.write_server(info_of(ProcessId.current()))
    assert [s.address for s in list_servers()] == ["ipc:///x"]


def test_a_private_server_is_not_listed():
    folder = RunFolder.for_owner(ProcessId.current(), "0").create(claimed=True, private=True)
    folder.write_server(info_of(ProcessId.current()))
    assert list_servers() == []
    assert folder.path.is_dir()


def test_leftovers_of_dead_processes_are_removed_and_others_kept():
    dead = RunFolder.for_owner(dead_process()).create()
    dead.write_server(info_of(dead_process()))
    starting = RunFolder.for_owner(ProcessId.current()).create()
    orphan = RunFolder.for_owner(dead_process(), "1").create()
    orphan.write_coordinator(ProcessId.current())  # still ends its workers
    list_servers()
    assert not dead.path.exists()
    assert starting.path.exists()
    assert orphan.path.exists()


def test_the_coordinators_end_leaves_nothing_except_for_a_living_claimer():
    unclaimed = RunFolder.for_owner(ProcessId.current(), "a").create()
    unclaimed.write_server(info_of(ProcessId.current()))
    unclaimed.close()
    assert not unclaimed.path.exists()

    claimed = RunFolder.for_owner(ProcessId.current(), "b").create(claimed=True)
    claimed.write_server(info_of(ProcessId.current()))
    claimed.write_failure("worker_failed", "why")
    claimed.close()
    assert claimed.read_failure() is not None
    assert claimed.read_server() is None

    abandoned = RunFolder.for_owner(dead_process(), "c").create(claimed=True)
    abandoned.write_failure("worker_failed", "why")
    abandoned.close()
    assert not abandoned.path.exists()


def test_half_written_files_are_never_read():
    folder = RunFolder.for_owner(ProcessId.current()).create()
    (folder.path / "server.json").write_bytes(b'{"address": "ipc')
    assert folder.read_server() is None
    assert list_servers() == []


def test_a_full_file_system_costs_the_status_and_nothing_else(tmp_path):
    """Often it is a small one in memory; a coordinator must not die of it."""
    folder = RunFolder(tmp_path / "run").create()
    folder.write_status("ready")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        folder.write_status("recovering", "workers are being replaced")
        assert not folder.write_failure("worker_failed", "Rank 1 was killed.")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert folder.read_status().state == "ready"
    assert folder.read_failure() is None
    assert [path.name for path in folder.path.iterdir()] == ["status.json"]
    assert folder.write_failure("worker_failed", "Rank 1 was killed.")
