"""From a keeper to a worker: the fork, and what the child does before its first own line.

The keeper has imported everything and holds no thread and no GPU, so a fork is a complete new
worker in milliseconds. The child is tied to the keeper, keeps nothing of its descriptors, leaves
Ctrl-C and SIGTERM to it, and leaves the process only through `os._exit`.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

from tp_runtime.engine_config import EngineConfig
from tp_runtime.launch.parent_death import die_with_parent
from tp_runtime.launch.rank_environment import THREAD_VARIABLES, RankPlace

WORKER_DESCRIPTORS = 6
"""Plan ring, its doorbell, answer ring, its doorbell, heartbeat page, status socket."""

_FOR_GPUS = (
    "triton",
    "triton.experimental.gluon.nvidia.hopper",
    "tp_runtime.ops.kernels.paged_decode",
    "tp_runtime.ops.kernels.row_linear",
    "tp_runtime.ops.kernels.skinny_linear",
)
"""Imported by a keeper once, or else by each worker at its first kernel."""

WorkerMain = Callable[[EngineConfig, RankPlace, int, list[int]], None]
"""Runs a worker: config, place, generation, the six descriptors. Need not return."""


def load_worker_main(device: str, attention_backend: str) -> WorkerMain:
    """Import torch and the worker, and return what to call in the child. The arguments are those of
    EngineConfig."""
    from tp_runtime.transport.worker_fds import WorkerDescriptors
    from tp_runtime.workers.worker import run_worker

    if device != "cpu":
        _import_for_gpus(attention_backend)

    def worker_main(
        config: EngineConfig, place: RankPlace, generation: int, fds: list[int]
    ) -> None:
        run_worker(
            config,
            place.rank,
            place.local_rank,
            place.world_size,
            generation,
            WorkerDescriptors(*fds),
        )

    return worker_main


def _import_for_gpus(attention_backend: str) -> None:
    """What a worker on a GPU would import itself each time it is forked. (Asking torch for the
    number of GPUs would open them.)"""
    if not any(Path("/dev").glob("nvidia[0-9]*")):
        return
    flash = attention_backend == "auto" or attention_backend.startswith("flash-attn")
    for name in (*_FOR_GPUS, *(("flash_attn_interface", "flash_attn") if flash else ())):
        with contextlib.suppress(Exception):  # the worker says what it misses, if it needs it
            importlib.import_module(name)
    with contextlib.suppress(Exception):  # a hash of all of Triton, which it remembers
        importlib.import_module("triton.runtime.cache").triton_key()


def fork_hazard() -> str | None:
    """Why this process must not fork now: other threads, or an open GPU. None when it may."""
    tasks = [task for task in os.listdir("/proc/self/task") if int(task) != os.getpid()]
    if tasks:
        return f"it runs {len(tasks)} other thread(s): {', '.join(map(_thread_name, tasks))}"
    gpus = sorted({target for target in _open_files() if target.startswith("/dev/nvidia")})
    if gpus:
        return f"it has {', '.join(gpus)} open"
    return None


def _thread_name(task: str) -> str:
    try:
        return Path(f"/proc/self/task/{task}/comm").read_text().strip()
    except OSError:
        return task


def _open_files() -> list[str]:
    targets = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the descriptor of the listing itself
            targets.append(os.readlink(f"/proc/self/fd/{fd}"))
    return targets


def fork_worker(
    worker_main: WorkerMain,
    config: EngineConfig,
    place: RankPlace,
    generation: int,
    fds: list[int],
    threads: int,
    close_inherited: Callable[[], None],
) -> int:
    """Fork a worker and return its pid. `fds` stay open here and belong to the child there.

    `close_inherited` closes, in the child, every descriptor that is the keeper's own."""
    keeper = os.getpid()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        if not die_with_parent(keeper):
            os._exit(1)
        _leave_keeper(close_inherited)
        _use_threads(threads)
        worker_main(config, place, generation, fds)
        status = 0
    except SystemExit as stop:
        status = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _leave_keeper(close_inherited: Callable[[], None]) -> None:
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    close_inherited()
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    if nothing != 0:
        os.close(nothing)


def _use_threads(threads: int) -> None:
    for name in THREAD_VARIABLES:
        os.environ[name] = str(threads)  # for libraries and compilers that start later
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(threads)
