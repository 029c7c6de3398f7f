"""A rank that computes nothing: a real keeper whose worker answers every plan at once.

    python -m tp_runtime.launch.bench.null_rank RUN_DIR OWNER_PID STEP_US

The coordinator cannot tell it from a worker, so what is measured with it is the coordinator, its
rings and its sockets. STEP_US: how long a step is said to take, microseconds.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable

import msgspec

from tp_runtime.coordinator.null_worker import NullWorker
from tp_runtime.engine_config import EngineConfig
from tp_runtime.launch.rank_environment import RankPlace
from tp_runtime.launch.serve import RankProcess
from tp_runtime.messages import AllocateKV, StepPlan, Stop, WorkerLoaded, WorkerReady, encode
from tp_runtime.run_folder import ProcessId, RunFolder
from tp_runtime.transport.fd_socket import FdSocket
from tp_runtime.transport.ring import RingReader, RingWriter
from tp_runtime.transport.worker_fds import WorkerDescriptors

BLOCK_SIZE = 16
GRAPH_SIZES = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]
GRAPHS_LEFT = 3
"""Of which nothing is recorded, but they are asked for as a worker's are."""
ENVIRONMENT = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}


def null_worker(step_us: int) -> Callable[[EngineConfig, RankPlace, int, list[int]], None]:
    """The worker's main function, for a keeper."""

    def main(config: EngineConfig, place: RankPlace, generation: int, fds: list[int]) -> None:
        ends = WorkerDescriptors(*fds)
        status: FdSocket[AllocateKV] = FdSocket(socket.socket(fileno=ends.status), AllocateKV)
        status.send(
            WorkerLoaded(
                rank=place.rank,
                digest="null",
                num_parameters=0,
                max_kv_blocks=config.num_kv_blocks or 1 << 16,
                block_size=config.block_size or BLOCK_SIZE,
                kv_block_bytes=0,
                attention_backend="none (null worker)",
            )
        )
        status.receive()
        status.send(WorkerReady(place.rank, GRAPH_SIZES, GRAPHS_LEFT))
        _answer_plans(
            RingReader(ends.plan_ring, ends.plan_doorbell, place.local_rank),
            RingWriter(ends.answer_ring, [ends.answer_doorbell]),
            step_us / 1e6,
        )

    return main


def _answer_plans(plans: RingReader, answers: RingWriter, step_s: float) -> None:
    worker = NullWorker()
    decode = msgspec.msgpack.Decoder(StepPlan | Stop).decode
    free_at = time.monotonic()
    while True:
        message = plans.read()
        if message is None:
            continue
        plan = decode(message)
        if isinstance(plan, Stop):
            return
        if step_s:
            free_at = max(free_at, time.monotonic()) + step_s
            time.sleep(max(0.0, free_at - time.monotonic()))
        answers.write(encode(worker.answer(plan)))


def main() -> None:
    run_dir, owner, step_us = sys.argv[1:]
    os.environ.update(ENVIRONMENT)
    process = RankProcess(
        RankPlace.from_environment(),
        RunFolder(run_dir),
        ProcessId.of(int(owner)),
        coordinator_elsewhere=True,
    )
    os._exit(process.run(EngineConfig(model="given by the coordinator"), null_worker(int(step_us))))


if __name__ == "__main__":
    main()
