"""`tp-runtime bench comm`: how long the ranks need to agree on a tensor, by size."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import click

from tp_runtime.errors import ConfigError, WorkerFailedError
from tp_runtime.launch.bench.coordinator import int_list
from tp_runtime.launch.bench.report import print_json, print_table
from tp_runtime.launch.gpus import Gpus
from tp_runtime.local_server import child_environment

DEFAULT_SIZES = "8192,65536,524288,4194304,16777216"
TIMEOUT_S = 300


@click.command("comm")
@click.option("-tp", "--tensor-parallel-size", "ranks", default=2, show_default=True)
@click.option("--device", type=click.Choice(["auto", "cuda", "cpu"]), default="auto")
@click.option("--sizes", default=DEFAULT_SIZES, show_default=True, help="Bytes of each rank.")
@click.option("--iterations", default=50, show_default=True, help="Calls of each; medians.")
def comm_command(ranks: int, device: str, sizes: str, iterations: int) -> int:
    """all-reduce, all-gather, gather to rank 0 and broadcast through the ranks' own TPGroup; on
    GPUs also replayed inside a CUDA graph."""
    if device == "auto":
        device = "cuda" if Gpus.seen().visible >= ranks else "cpu"
    if device == "cuda":
        Gpus.seen().require(ranks)
    if ranks < 2:
        raise ConfigError(f"--tensor-parallel-size {ranks}: one rank has nobody to talk to.")
    times = measure_comm(ranks, device, int_list(sizes), iterations)
    head = ["bytes", *(f"{name} us" for name in times[0] if name != "bytes")]
    print_table(head, [list(row.values()) for row in times])
    backend = "nccl" if device == "cuda" else "gloo"
    conditions = {"dtype": "bfloat16", "tensor_parallel_size": ranks, "backend": backend}
    print_json("comm", {**conditions, "iterations": iterations}, times)
    return 0


def measure_comm(
    ranks: int, device: str, sizes: list[int], iterations: int
) -> list[dict[str, Any]]:
    """Microseconds by size, as rank 0 saw them. Raises WorkerFailedError."""
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    order = json.dumps({"device": device, "sizes": sizes, "iterations": iterations})
    common = {
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tp_runtime.launch.bench.comm_rank", order],
            env={**child_environment(), **common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if rank == 0 else None,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        output, _ = processes[0].communicate(timeout=TIMEOUT_S)
        statuses = [process.wait(TIMEOUT_S) for process in processes]
    except subprocess.TimeoutExpired:
        raise WorkerFailedError(f"The ranks did not finish within {TIMEOUT_S} s.") from None
    finally:
        for process in processes:
            process.kill()
    if any(statuses):
        raise WorkerFailedError(f"Ranks ended with {statuses}; look above{os.linesep}")
    times: list[dict[str, Any]] = json.loads(output)
    return times
