"""Plants faults in the workers of a test's server; no shipped code knows of it.

Loaded into every process of the server through `sitecustomize` on PYTHONPATH. A fault is a file in
the folder that the variable names: `<rank>.<phase>` with the action as its text. The worker that
finds it takes it away, leaves the time in `<rank>.<phase>.done` and does as told; so a fault
happens once. The file `poison` ("<rank> <token id> <action>") stays: every prefill with this token
meets it.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.change_on_import import change_on_import

VARIABLE = "TP_RUNTIME_TEST_FAULTS"
GARBAGE = b"\xc1 no message"
"""0xc1 is the one byte that MessagePack never uses."""


def plant(rank: int | str, phase: str) -> str:
    """Do what is planned for this rank in this phase, if anything, and say what it was."""
    file = Path(os.environ[VARIABLE]) / f"{rank}.{phase}"
    try:
        action = file.read_text()
        file.unlink()
    except FileNotFoundError:
        return ""
    act(action, file.with_name(f"{file.name}.done"))
    return action


def act(action: str, done: Path) -> None:
    done.write_text(repr(time.monotonic()))
    if action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif action == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif action == "abort":
        os.abort()
    elif action == "exit":
        os._exit(0)
    elif action == "close":
        for fd in map(int, os.listdir("/proc/self/fd")):
            with suppress(OSError), socket.socket(fileno=os.dup(fd)) as one:
                one.shutdown(socket.SHUT_RDWR)
    elif action == "raise":
        raise RuntimeError("a planted failure")


def poison(rank: int, plan: Any) -> None:
    """Do as `poison` says when a chunk of the plan holds its token."""
    file = Path(os.environ[VARIABLE]) / "poison"
    try:
        victim, token, action = file.read_text().split()
    except (FileNotFoundError, ValueError):
        return
    if rank == int(victim):
        from tp_runtime.messages import unpack_ids

        if any(int(token) in unpack_ids(chunk.token_ids) for chunk in plan.chunks):
            act(action, file.with_name("poison.done"))


def change_runner(module: Any) -> None:
    original = module.Runner.step

    def step(self: Any, plan: Any) -> Any:
        rank = self.group.rank
        plant(rank, "prefill" if plan.chunks else "decode")
        poison(rank, plan)
        return original(self, plan)

    module.Runner.step = step


def change_worker(module: Any) -> None:
    original = module.Worker.enter

    def enter(self: Any, phase: Any, step: int = 0) -> None:
        original(self, phase, step)
        if plant(self.rank, phase.name.lower()) == "garbage":
            self.status._socket.send(GARBAGE)

    module.Worker.enter = enter


def change_engine(module: Any) -> None:
    original = module.Engine._tick

    def tick(self: Any, now: float) -> None:
        action = plant("coordinator", "tick")
        if action == "garbage to keepers":
            for keeper in self.group._local._keepers.values():
                keeper._socket.send(GARBAGE)
        elif action == "garbage to clients":
            from tp_runtime.coordinator.text_threads import Outgoing

            clients = list(self._frontend._clients)
            self._frontend._outgoing.put([Outgoing(client, GARBAGE) for client in clients])
        original(self, now)

    module.Engine._tick = tick


def change_ring(module: Any) -> None:
    """`<rank>.frame` and `coordinator.frame`: the next record to be read is damaged."""
    original = module.RingReader._take

    def take(self: Any) -> Any:
        coordinator = "tp_runtime.coordinator.engine" in sys.modules
        if plant("coordinator" if coordinator else os.environ["RANK"], "frame"):
            ring = self._ring
            ring.data[(self._read + module._RECORD.size) % ring.capacity] ^= 0x40
        return original(self)

    module.RingReader._take = take


def change_keeper(module: Any) -> None:
    original = module.Keeper._turn

    def turn(self: Any) -> None:
        if plant(f"keeper{self._place.rank}", "turn") and self._coordinator is not None:
            self._coordinator._socket.send(GARBAGE)
        original(self)

    module.Keeper._turn = turn


CHANGES: dict[str, Callable[[Any], None]] = {
    "tp_runtime.workers.runner": change_runner,
    "tp_runtime.workers.worker": change_worker,
    "tp_runtime.coordinator.engine": change_engine,
    "tp_runtime.transport.ring": change_ring,
    "tp_runtime.launch.keeper": change_keeper,
}


if VARIABLE in os.environ:
    change_on_import(CHANGES)
