"""`tp-runtime bench broadcast`: from the publication of a plan until a rank has it.

One writer and a process for each rank on the ring that plans take, with readers that wait as
workers do: they spin for a moment after a message and sleep then. Idle: messages come so far apart
that every reader sleeps. Busy: the next comes while the readers still look for it.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from typing import Any, NamedTuple

import click

from tp_runtime.errors import ConfigError, WorkerFailedError
from tp_runtime.launch.bench.report import print_json, print_table
from tp_runtime.local_server import child_environment
from tp_runtime.transport.ring import RingReader, RingWriter, create_doorbell, create_ring

_SPIN_S = 0.0001
"""As a worker's loop does (workers/loop.py)."""
_PAUSES_S = {"busy": 0.00005, "idle": 0.02}
_START_S = 30.0
_STAMP = 8
"""Bytes of a message's time; the rest is padding to the size of a plan."""


class Latency(NamedTuple):
    """Microseconds over all ranks and messages; `cpu_percent`: of a core, the busiest reader."""

    readers: str
    p50_us: float
    p99_us: float
    cpu_percent: float


@click.command("broadcast")
@click.option("-tp", "--tensor-parallel-size", "ranks", default=2, show_default=True)
@click.option("--messages", default=500, show_default=True, help="Of each kind.")
@click.option("--size", default=200, show_default=True, help="Bytes; a steady plan of 256 rows.")
def broadcast_command(ranks: int, messages: int, size: int) -> int:
    """From the publication of a plan until every rank of this host has it."""
    if ranks < 1 or messages < 1 or size < _STAMP:
        raise ConfigError(
            f"--tensor-parallel-size {ranks}, --messages {messages} and --size {size}: give at "
            f"least 1, 1 and {_STAMP}."
        )
    rows = [measure(kind, ranks, messages, size) for kind in _PAUSES_S]
    head = ["readers", "ranks", "p50 us", "p99 us", "% of a core"]
    print_table(head, [[row.readers, ranks, *row[1:]] for row in rows])
    conditions = {"dtype": "", "tensor_parallel_size": ranks, "messages": messages, "bytes": size}
    print_json("broadcast", conditions, [row._asdict() for row in rows])
    return 0


def measure(kind: str, ranks: int, messages: int, size: int) -> Latency:
    """Raises WorkerFailedError when a reader does not answer."""
    ring, bells = create_ring("tp_runtime-bench"), [create_doorbell() for _ in range(ranks)]
    readers = [_start(ring, bell, index, messages) for index, bell in enumerate(bells)]
    writer = RingWriter(ring, bells)
    try:
        for reader in readers:
            if reader.stdout is None or reader.stdout.readline() != "ready\n":
                raise WorkerFailedError("A reader of the benchmark did not start; look above.")
        for _ in range(messages):
            time.sleep(_PAUSES_S[kind])
            writer.write(time.monotonic_ns().to_bytes(_STAMP, "little") + bytes(size - _STAMP))
        found = [json.loads(reader.communicate(timeout=_START_S)[0]) for reader in readers]
    finally:
        for reader in readers:
            reader.kill()
            reader.wait()
        writer.close()
    times = sorted(us for one in found for us in one["us"])
    return Latency(
        kind,
        times[len(times) // 2],
        times[int(len(times) * 0.99)],
        max(one["cpu_percent"] for one in found),
    )


def _start(ring: int, bell: int, index: int, messages: int) -> subprocess.Popen[str]:
    arguments = [str(number) for number in (ring, bell, index, messages)]
    return subprocess.Popen(
        [sys.executable, "-m", "tp_runtime.launch.bench.broadcast", *arguments],
        env=child_environment(),
        pass_fds=(ring, bell),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
    )


def _read(ring: int, bell: int, index: int, messages: int) -> dict[str, Any]:
    reader = RingReader(ring, bell, index)
    print("ready", flush=True)
    times: list[float] = []
    started, used = time.monotonic(), _cpu_s()
    while len(times) < messages:
        message = reader.read(timeout_s=_START_S, spin_s=_SPIN_S)
        now = time.monotonic_ns()
        if message is None:
            raise WorkerFailedError(f"Reader {index} had {len(times)} of {messages} messages.")
        times.append((now - int.from_bytes(message[:_STAMP], "little")) / 1000)
    wall = time.monotonic() - started
    return {"us": times, "cpu_percent": 100 * (_cpu_s() - used) / wall}


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    print(json.dumps(_read(*(int(argument) for argument in sys.argv[1:]))), flush=True)
