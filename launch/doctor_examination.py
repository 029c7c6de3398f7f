"""Gathering the facts: child processes with time limits, and what became of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from tp_runtime.launch.doctor_facts import (
    Copy,
    MachineFacts,
    Reduce,
    TorchFacts,
    gpus_of_the_driver,
    package_versions,
    python_version,
    read_limits,
    system_name,
)
from tp_runtime.local_server import child_environment

T = TypeVar("T")
PROBE = (sys.executable, "-m", "tp_runtime.launch.doctor_probe")
_TIME_S = 60.0
_DRIVER_VERSION = "import pynvml; pynvml.nvmlInit(); print(pynvml.nvmlSystemGetDriverVersion())"

Say = Callable[[str], None]


def examine(say: Say, head_size: int, dtype: str, windows: Sequence[int | None]) -> MachineFacts:
    """Everything about this machine; takes a few seconds per GPU. `say` is told what is waited for.

    The attention back-ends are asked for heads of `head_size` and these sliding windows."""
    gpus, gpu_error = gpus_of_the_driver()
    say("importing torch in a child process")
    torch, torch_error = run_probe(
        TorchFacts, "torch", str(head_size), dtype, msgspec.json.encode(list(set(windows))).decode()
    )
    torch = torch or TorchFacts()
    copied: list[Copy] = []
    copy_error = ""
    if len(torch.gpus) > 1:
        say(f"copying between {len(torch.gpus)} GPUs")
        found, copy_error = run_probe(list[Copy], "copies")
        copied = found or []
    backend, ranks = ("nccl", len(torch.gpus)) if torch.gpus else ("gloo", 2)
    reduced = None
    if not torch_error:
        say(f"adding up numbers over {ranks} processes with {backend}")
        reduced = all_reduce(backend, ranks)
    return MachineFacts(
        python=python_version(),
        system=system_name(),
        packages=package_versions(),
        driver=_driver_version() if gpus.present else "",
        present=len(gpus.present),
        visible=gpus.visible,
        mask=gpus.mask,
        gpu_error=gpu_error,
        torch=torch,
        torch_error=torch_error,
        copies=copied,
        copy_error=copy_error,
        reduce=reduced,
        limits=read_limits(),
    )


def run_probe(kind: type[T], *arguments: str) -> tuple[T | None, str]:
    """The object that a probe prints, or None and why there is none."""
    try:
        done = subprocess.run(
            [*PROBE, *arguments],
            env=child_environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_TIME_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return None, f"it gave no answer within {_TIME_S:.0f} s"
    return read_answer(kind, done.returncode, done.stdout, done.stderr)


def read_answer(kind: type[T], status: int, stdout: str, stderr: str) -> tuple[T | None, str]:
    """What a probe that has ended said; its last line is the object."""
    lines = [line for line in stderr.splitlines() if line.strip()]
    if status < 0:
        return None, f"its process was killed by {signal.Signals(-status).name}"
    if status > 0:
        return None, lines[-1].strip() if lines else f"its process ended with status {status}"
    try:
        return msgspec.json.decode(stdout.strip().splitlines()[-1], type=kind), ""
    except (IndexError, msgspec.DecodeError) as error:
        return None, f"its answer cannot be read ({error})"


def all_reduce(backend: str, ranks: int) -> Reduce:
    """The worst of what the ranks report."""
    with tempfile.TemporaryDirectory(prefix="tp_runtime_doctor_") as folder:
        store = str(Path(folder, "store"))
        environment = child_environment()
        # One host: as the ranks of a server meet.
        environment |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
        environment |= {"OMP_NUM_THREADS": "1", "NCCL_DEBUG": os.environ.get("NCCL_DEBUG", "WARN")}
        children = [
            subprocess.Popen(
                [*PROBE, "reduce", backend, str(rank), str(ranks), store],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=open(Path(folder, f"out{rank}"), "w"),  # noqa: SIM115 - the child's
                stderr=open(Path(folder, f"err{rank}"), "w"),  # noqa: SIM115
            )
            for rank in range(ranks)
        ]
        late = _wait_all(children)
        results = [
            read_answer(
                Reduce,
                child.returncode,
                Path(folder, f"out{rank}").read_text(errors="replace"),
                Path(folder, f"err{rank}").read_text(errors="replace"),
            )
            for rank, child in enumerate(children)
        ]
    return worst_of(backend, results, late)


def worst_of(
    backend: str, results: Sequence[tuple[Reduce | None, str]], late: Sequence[int]
) -> Reduce:
    """One result from those of all ranks; `late`: ranks that had to be killed. A rank that failed
    by itself is the cause, those that waited for it are not."""
    ranks = len(results)
    for rank, (found, error) in enumerate(results):
        if found is not None and found.error:
            return found
        if found is None and rank not in late:
            return Reduce(backend, ranks, f"rank {rank}: {error}")
    if late:
        named = ", ".join(map(str, late))
        return Reduce(backend, ranks, f"no answer within {_TIME_S:.0f} s from rank {named}")
    return min((found for found, _ in results if found), key=lambda each: each.gb_per_s)


def _wait_all(children: list[subprocess.Popen[bytes]]) -> list[int]:
    """Ranks that had to be killed. After one has failed the others get two seconds."""
    deadline = time.monotonic() + _TIME_S
    while any(child.poll() is None for child in children) and time.monotonic() < deadline:
        if any(child.poll() for child in children):
            deadline = min(deadline, time.monotonic() + 2.0)
        time.sleep(0.05)
    late = [rank for rank, child in enumerate(children) if child.poll() is None]
    for rank in late:
        children[rank].kill()
        children[rank].wait()
    return late


def _driver_version() -> str:
    done = subprocess.run(
        [sys.executable, "-c", _DRIVER_VERSION], capture_output=True, text=True, check=False
    )
    return done.stdout.strip()
