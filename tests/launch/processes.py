"""Starting programs as a user does, and seeing that nothing of them is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tp_runtime.launch.descendants import descendants
from tp_runtime.run_folder import ProcessId, RunFolder, ServerInfo, run_root

ROOT = Path(__file__).resolve().parents[2]
TP_RUNTIME = (sys.executable, "-m", "tp_runtime.launch.cli")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2")
SMALL = ("--device", "cpu", "--max-model-len", "256", "--num-kv-blocks", "64")
"""Flags of every test server. The tiny models have 512 positions."""


class Program:
    """A program that was started, everything that came of it, and what it printed.

    Its children may be in sessions of their own and be adopted by others, so they are collected
    while they live (`watch`)."""

    def __init__(self, command: tuple[str, ...], output: Path, **variables: str) -> None:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **variables}
        self.output = output
        with output.open("wb") as file:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
        self.seen: set[ProcessId] = {ProcessId.of(self.process.pid)}

    def watch(self) -> None:
        self.seen.update(descendants(self.process.pid))
        for folder in self.folders():
            coordinator = folder.read_coordinator()
            if coordinator is not None:
                self.seen.add(coordinator)

    def folders(self) -> list[RunFolder]:
        """Run folders owned by this program or by a process of it."""
        pids = {str(process.pid) for process in self.seen}
        return [RunFolder(p) for p in run_root().iterdir() if p.name.split("-")[0] in pids]

    def wait_ready(self, seconds: float = 60) -> ServerInfo:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self.watch()
            for folder in self.folders():
                status, info = folder.read_status(), folder.read_server()
                if status is not None and status.state == "ready" and info is not None:
                    return info
            assert self.process.poll() is None, self.text()
            time.sleep(0.05)
        raise AssertionError(f"not ready after {seconds} s: {self.text()}")

    def wait_for(self, what: str, seconds: float = 60) -> None:
        """Until this text has been printed."""
        deadline = time.monotonic() + seconds
        while what not in self.text():
            self.watch()
            assert time.monotonic() < deadline, f"no {what!r} in: {self.text()}"
            assert self.process.poll() is None, self.text()
            time.sleep(0.05)

    def wait(self, seconds: float = 60) -> int:
        deadline = time.monotonic() + seconds
        while self.process.poll() is None:
            self.watch()
            assert time.monotonic() < deadline, f"still runs after {seconds} s: {self.text()}"
            time.sleep(0.02)
        return self.process.returncode

    def signal(self, signum: int) -> None:
        self.watch()
        self.process.send_signal(signum)

    def left(self, but: int = 0) -> list[str]:
        return [command_of(p) for p in self.seen if p.pid != but and p.alive()]

    def assert_all_gone(self, seconds: float = 2.0, *, but_torchrun: bool = False) -> None:
        """No process and no run folder of this program is left within `seconds`.

        `but_torchrun`: the program itself is torchrun, and takes its own time after a signal."""
        deadline = time.monotonic() + seconds
        while self.left(but=self.process.pid) or (self.process.poll() is None and not but_torchrun):
            assert time.monotonic() < deadline, f"left after {seconds} s: {self.left()}"
            time.sleep(0.02)
        assert self.folders() == [], [list(f.path.iterdir()) for f in self.folders()]

    def workers(self) -> set[ProcessId]:
        """Worker processes that live now: forked by a keeper, so they have its very command."""
        found = set()
        for process in descendants(self.process.pid):
            command = command_of_pid(process.pid)
            if "tp_runtime.launch.serve" in command and command == command_of_pid(
                parent_of(process)
            ):
                found.add(process)
        return found

    def text(self) -> str:
        return self.output.read_text(errors="replace")

    def lines(self) -> list[str]:
        """What was printed, without this runtime's own notices."""
        return [s for s in self.text().splitlines() if not s.startswith("tp_runtime: ")]

    def kill(self) -> None:
        self.watch()
        for process in [*self.seen]:
            if process.alive():
                os.kill(process.pid, signal.SIGKILL)
        self.process.wait()


@contextmanager
def program(output: Path, *command: str, **variables: str) -> Iterator[Program]:
    """A Program that is killed, with all that came of it, when the block ends."""
    shared_memory = set(os.listdir("/dev/shm"))
    started = Program(command, output, **variables)
    try:
        yield started
        left = set(os.listdir("/dev/shm")) - shared_memory
        assert not {name for name in left if "tp_runtime" in name}
    finally:
        started.kill()


def command_of(process: ProcessId) -> str:
    return f"{process.pid}: {command_of_pid(process.pid)[:120]}"


def command_of_pid(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


def parent_of(process: ProcessId) -> int:
    try:
        status = Path(f"/proc/{process.pid}/stat").read_text()
    except OSError:
        return 0
    return int(status.rpartition(")")[2].split()[1])
