"""A keeper with a worker that reports about itself instead of computing; started by tests.

usage: keeper_program.py RUN_DIR AGENT_PID [thread] -- with RANK and the like in the environment
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import time

from tp_runtime.engine_config import EngineConfig
from tp_runtime.launch.rank_environment import RankPlace
from tp_runtime.launch.serve import RankProcess
from tp_runtime.run_folder import ProcessId, RunFolder


def reporting_worker(
    config: EngineConfig, place: RankPlace, generation: int, fds: list[int]
) -> None:
    """Says what it finds in itself, then does what it is told: exit N, or raise."""
    status = socket.socket(fileno=fds[5])
    facts = {
        "pid": os.getpid(),
        "rank": place.rank,
        "generation": generation,
        "stdin": os.readlink("/proc/self/fd/0"),
        "open": sorted(int(fd) for fd in os.listdir("/proc/self/fd")),
        "given": sorted(fds),
        "ignores": [signal.getsignal(s) == signal.SIG_IGN for s in (signal.SIGINT, signal.SIGTERM)],
        "omp": os.environ["OMP_NUM_THREADS"],
        "session": os.getsid(0) == os.getsid(os.getppid()),
    }
    status.send(json.dumps(facts).encode())
    order = status.recv(100).decode()
    if order.startswith("exit"):
        os._exit(int(order.split()[1]))
    raise RuntimeError(order or "the test is gone")


if __name__ == "__main__":
    if "thread" in sys.argv:
        threading.Thread(target=time.sleep, args=(1000,), name="a-thread", daemon=True).start()
    folder, agent = RunFolder(sys.argv[1]), ProcessId.of(int(sys.argv[2]))
    process = RankProcess(RankPlace.from_environment(), folder, agent, coordinator_elsewhere=True)
    os._exit(process.run(EngineConfig(model="unused"), reporting_worker))
