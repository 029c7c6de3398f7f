"""A server without a model: the real coordinator, and a null rank (launch.bench.null_rank)."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import time
from types import TracebackType

from tp_runtime.engine_config import EngineConfig
from tp_runtime.errors import WorkerFailedError
from tp_runtime.launch.coordinator_process import COORDINATOR_MODULE
from tp_runtime.launch.preflight import preflight
from tp_runtime.local_server import child_environment
from tp_runtime.run_folder import ProcessId, RunFolder

_START_S = 60.0
_STOP_S = 30.0
_numbers = itertools.count()


class NullServer:
    """Ready when the constructor returns; `address` is where clients connect, `pid` the
    coordinator's. `step_us`: how long a step takes; 0: answered at once. `profile`: a file for the
    engine thread's cProfile statistics, written at the end. `rank`: the module of the null rank."""

    def __init__(
        self,
        config: EngineConfig,
        step_us: int = 0,
        profile: str = "",
        rank: str = "tp_runtime.launch.bench.null_rank",
    ) -> None:
        me = ProcessId.current()
        self.folder = RunFolder.for_owner(me, f"null-{next(_numbers)}")
        self.folder.create(claimed=True, private=True)
        config = preflight(config)
        self.folder.write_config(config)
        module = [COORDINATOR_MODULE]
        if profile:
            module = ["tp_runtime.launch.bench.profiled_coordinator", profile]
        arguments = ["--config", config.to_json(), "--run-dir", str(self.folder.path)]
        self._coordinator = _start(*module, *arguments, "--watch-pid", str(os.getpid()))
        self.folder.write_coordinator(ProcessId.of(self._coordinator.pid))
        self._rank = _start(rank, str(self.folder.path), str(me.pid), str(step_us))
        try:
            self.address = self._wait_ready()
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        return self._coordinator.pid

    def _wait_ready(self) -> str:
        deadline = time.monotonic() + _START_S
        while time.monotonic() < deadline:
            failure = self.folder.read_failure()
            if failure is not None:
                raise failure.error()
            status, info = self.folder.read_status(), self.folder.read_server()
            if status is not None and status.state == "ready" and info is not None:
                return info.address
            if self._coordinator.poll() is not None or self._rank.poll() is not None:
                break
            time.sleep(0.02)
        raise WorkerFailedError("The server with null workers did not start; look above.")

    def close(self) -> None:
        """Ends it; a trace or profile is written when this returns."""
        if self._coordinator.poll() is None:
            self._coordinator.send_signal(signal.SIGINT)
        for process in (self._coordinator, self._rank):
            try:
                process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self.folder.remove()

    def __enter__(self) -> NullServer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _start(module: str, *arguments: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        env=child_environment(),
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )
