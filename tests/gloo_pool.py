"""Pools of real gloo processes, one per tensor-parallel size, kept for the whole test session.

    def check(group: TPGroup, hidden: int) -> torch.Tensor: ...   # module level

    def test_something(gloo_pool):
        results = gloo_pool(3).run(check, 64)   # one result per rank

An exception or a hang fails the test and names the rank; the pool is then killed, and the next
test gets a fresh one. As pytest plugin (`pytest_plugins = ["tests.gloo_pool"]`) this module gives
the `gloo_pool` fixture.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing as mp
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest

START_TIMEOUT_S = 120.0
RUN_TIMEOUT_S = 60.0
_GRACE_S = 1.0
"""After one rank failed, how long the others may still report their own failure."""
_TRACE_S = 0.3
"""Time for a hung rank to write where it hangs."""


class PoolFailure(AssertionError):
    """A rank raised, died or hung; the message says which and where."""


class GlooPool:
    """`size` processes in one gloo group over the loopback interface, one torch thread each."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.alive = False
        self._folder = tempfile.TemporaryDirectory(prefix="gloo_pool_")
        self._traces = [Path(self._folder.name) / f"trace_{rank}" for rank in range(size)]
        # A fork server that has torch loaded starts ten ranks in the time of one import.
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(["torch", "torch.distributed", "tp_runtime.ops.group"])
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        store = str(Path(self._folder.name) / "store")
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve,
                args=(rank, size, store, theirs, str(self._traces[rank])),
                daemon=True,
            )
            with _environment(GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1"):
                process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        self.alive = True
        self._collect("start", START_TIMEOUT_S)

    def run(self, fn: Callable[..., Any], *args: Any, timeout: float = RUN_TIMEOUT_S) -> list[Any]:
        """`fn(group, *args)` on every rank; results in rank order. `fn` lives at module level.

        Raises PoolFailure naming the ranks that raised, died or did not answer in `timeout` s."""
        if not self.alive:
            raise PoolFailure("this pool was closed; ask the gloo_pool fixture for a new one")
        path = [str(Path(__file__).parents[1]), *sys.path]
        job = pickle.dumps((path, pickle.dumps((fn, args))))
        for pipe in self._pipes:
            with contextlib.suppress(OSError):  # a rank that died is found by _collect
                pipe.send_bytes(job)
        return self._collect(f"{fn.__module__}.{fn.__qualname__}", timeout)

    def close(self) -> None:
        """Kills the processes; may be called twice."""
        self.alive = False
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._folder.cleanup()

    def _collect(self, what: str, timeout: float) -> list[Any]:
        deadline = time.monotonic() + timeout
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        waiting = {pipe: rank for rank, pipe in enumerate(self._pipes)}
        while waiting:
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = waiting.pop(pipe)
                try:
                    good, value = pickle.loads(pipe.recv_bytes())
                except EOFError:
                    self._processes[rank].join(1.0)
                    code = self._processes[rank].exitcode
                    good, value = False, f"the process died, exit status {code}"
                if good:
                    results[rank] = value
                else:
                    failures[rank] = value
                    deadline = min(deadline, time.monotonic() + _GRACE_S)
        if failures or waiting:
            lines = [f"rank {rank} of {self.size}: {text}" for rank, text in failures.items()]
            lines += [
                f"rank {rank} of {self.size} did not answer; it is at\n{self._where(rank)}"
                for rank in sorted(waiting.values())
            ]
            self.close()
            raise PoolFailure("\n".join([f"{what} failed in the gloo pool", *lines]))
        return [results[rank] for rank in range(self.size)]

    def _where(self, rank: int) -> str:
        """The Python stack of a rank that does not answer."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._processes[rank].pid, signal.SIGUSR1)
        time.sleep(_TRACE_S)
        return self._traces[rank].read_text()


def _serve(rank: int, size: int, store: str, pipe: Connection, trace: str) -> None:
    """One rank: joins the group, then runs jobs until the parent goes away.

    SIGUSR1 makes it write its stack to the file `trace`."""
    faulthandler.register(signal.SIGUSR1, open(trace, "w"), all_threads=False)  # noqa: SIM115
    import torch
    import torch.distributed as dist

    from tp_runtime.ops.group import TPGroup

    try:
        torch.set_num_threads(1)
        dist.init_process_group(
            "gloo", store=dist.FileStore(store, size), rank=rank, world_size=size
        )
        group = TPGroup.from_process_group("gloo", "cpu")
        pipe.send_bytes(pickle.dumps((True, None)))
    except Exception:
        pipe.send_bytes(pickle.dumps((False, traceback.format_exc())))
        return
    while True:
        try:
            path, job = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        try:
            sys.path[:] = path
            fn, args = pickle.loads(job)
            with torch.inference_mode():
                answer = pickle.dumps((True, fn(group, *args)))
        except BaseException:
            answer = pickle.dumps((False, traceback.format_exc()))
        pipe.send_bytes(answer)


@contextlib.contextmanager
def _environment(**values: str) -> Iterator[None]:
    before = {key: os.environ.get(key) for key in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for key, value in before.items():
            if value is None:
                del os.environ[key]
            else:
                os.environ[key] = value


@pytest.fixture(scope="session")
def gloo_pool() -> Iterator[Callable[[int], GlooPool]]:
    """`gloo_pool(size)` gives the session's pool of that size, starting it when needed."""
    pools: dict[int, GlooPool] = {}

    def pool(size: int) -> GlooPool:
        if size not in pools or not pools[size].alive:
            pools[size] = GlooPool(size)
        return pools[size]

    yield pool
    for started in pools.values():
        started.close()
