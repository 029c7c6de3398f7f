"""A server on tiny random weights whose processes are killed, and what is measured meanwhile."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.faults import planted
from tests.launch.processes import ROOT, SMALL, TP_RUNTIME, Program, parent_of, program
from tp_runtime import Client, SamplingParams, StreamChunk
from tp_runtime.run_folder import ProcessId, RunFolder

FLAGS = (*SMALL, "--max-worker-restarts", "1000")
POLL_S = 0.002
FAULTS = "faults"


@dataclass
class Recovery:
    """Seconds from the fault until it was noticed, and until the server was ready again."""

    detected_s: float
    recovered_s: float


class FaultServer:
    """A started server, its run folder, and its processes by their part in it."""

    def __init__(self, program: Program, folder: Path) -> None:
        self.program = program
        self.program_folder = folder
        self.faults = folder / FAULTS
        self.address = program.wait_ready(150).address
        self.folder: RunFolder = program.folders()[0]

    # ------------------------------------------------------------ processes

    def workers(self) -> list[ProcessId]:
        """In rank order."""
        found = {rank_of(worker): worker for worker in self.program.workers()}
        return [found[rank] for rank in sorted(found)]

    def keepers(self) -> list[ProcessId]:
        return [ProcessId.of(parent_of(worker)) for worker in self.workers()]

    @property
    def coordinator(self) -> ProcessId:
        found = self.folder.read_coordinator()
        assert found is not None
        return found

    def open_files(self) -> int:
        return len(os.listdir(f"/proc/{self.coordinator.pid}/fd"))

    # ------------------------------------------------------------ faults

    def plan(self, rank: int | str, phase: str, action: str) -> Callable[[], float | None]:
        """Plants a fault; the function says when it happened (`time.monotonic()`), or None."""
        return plan_fault(self.program_folder, rank, phase, action)

    def send(self, process: ProcessId, action: str) -> Callable[[], float | None]:
        """The same for a signal from outside, at once."""
        now = time.monotonic()
        os.kill(process.pid, {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[action])
        return lambda: now

    def watch_recovery(
        self,
        happened: Callable[[], float | None],
        seconds: float = 40,
        until: Callable[[], bool] | None = None,
    ) -> Recovery:
        """Waits for the fault, its detection, and the server being ready again (or `until`)."""
        when = wait_for(happened, seconds)
        wait_for(lambda: self.state() not in ("ready", "draining"), seconds)
        detected = time.monotonic()
        wait_for(until or (lambda: self.state() in ("ready", "draining")), seconds)
        return Recovery(detected - when, time.monotonic() - when)

    def wait_ready(self, seconds: float = 60) -> None:
        """Until a living coordinator says so."""
        wait_for(lambda: self.coordinator.alive() and self.state() == "ready", seconds)

    def state(self) -> str:
        status = self.folder.read_status()
        return status.state if status is not None else ""


def rank_of(worker: ProcessId) -> int:
    variables = Path(f"/proc/{worker.pid}/environ").read_bytes().split(b"\0")
    return next(int(v.removeprefix(b"RANK=")) for v in variables if v.startswith(b"RANK="))


def wait_for(condition: Callable[[], Any], seconds: float) -> Any:
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(POLL_S)
    return value


def plan_fault(
    tmp_path: Path, rank: int | str, phase: str, action: str
) -> Callable[[], float | None]:
    """See `FaultServer.plan`; for a program that was started with `planted_program`."""
    faults = tmp_path / FAULTS
    done = faults / f"{rank}.{phase}.done"
    done.unlink(missing_ok=True)
    temporary = faults / "new"
    temporary.write_text(action)
    os.replace(temporary, faults / f"{rank}.{phase}")
    return lambda: float(done.read_text() or 0) or None if done.exists() else None


@contextmanager
def planted_program(tmp_path: Path, *command: str, **variables: str) -> Iterator[Program]:
    """Runs `command` with faults that can be planted; all of it is gone when the block ends."""
    faults, site = tmp_path / FAULTS, tmp_path / "site"
    faults.mkdir()
    site.mkdir()
    (site / "sitecustomize.py").write_text("import tests.faults.planted\n")
    with program(
        tmp_path / "out",
        *command,
        PYTHONPATH=os.pathsep.join([str(site), str(ROOT)]),
        **{planted.VARIABLE: str(faults)},
        # Threads of other tests' workers want the cores too; waiting for one's own must not spin.
        OMP_WAIT_POLICY="PASSIVE",
        GOMP_SPINCOUNT="0",
        **variables,
    ) as started:
        yield started


@contextmanager
def fault_server(tmp_path: Path, *command: str, **variables: str) -> Iterator[FaultServer]:
    """The same for a server, when it is ready."""
    with planted_program(tmp_path, *command, **variables) as started:
        yield FaultServer(started, tmp_path)


def serve(model: str, *flags: str, ranks: int = 2) -> tuple[str, ...]:
    return (*TP_RUNTIME, "serve", model, "-tp", str(ranks), *FLAGS, *flags)


# ---------------------------------------------------------------- what clients ask for meanwhile

REQUESTS: list[tuple[list[int], dict[str, Any]]] = [
    ([5, 6, 7], {"temperature": 0}),
    ([8, 9], {"temperature": 1.0, "seed": 11, "top_p": 0.9}),
    (list(range(20, 90)), {"temperature": 0.8, "seed": 12, "top_k": 20}),
    ([30] * 17, {"temperature": 0, "repetition_penalty": 1.3, "logprobs": 1}),
    ([40, 41], {"temperature": 1.5, "seed": 13, "min_p": 0.02}),
]
"""Greedy and seeded, alone and with penalties: each must come out the same whatever dies."""


class Load:
    """Streaming requests under way, all begun when this is made."""

    def __init__(self, client: Client, max_tokens: int = 60, timeout: float = 60) -> None:
        prompts = [prompt for prompt, _ in REQUESTS]
        params = [
            SamplingParams(ignore_eos=True, max_tokens=max_tokens, **fields)
            for _, fields in REQUESTS
        ]
        self._stream = client.generate(prompts, params, stream=True, timeout=timeout)
        self._chunks: list[StreamChunk] = []

    def wait_tokens(self, number: int) -> None:
        """Until so many tokens have come, of all requests together."""
        while sum(len(chunk.token_ids) for chunk in self._chunks) < number:
            self._chunks.append(next(self._stream))

    def finish(self) -> list[tuple[list[int], str, str | None]]:
        """(token ids, text, finish reason) of each, put together from what was streamed."""
        self._chunks += self._stream
        return [
            joined([c for c in self._chunks if c.prompt_index == i]) for i in range(len(REQUESTS))
        ]


def joined(chunks: list[StreamChunk]) -> tuple[list[int], str, str | None]:
    ids = [token_id for chunk in chunks for token_id in chunk.token_ids]
    return ids, "".join(chunk.text for chunk in chunks), chunks[-1].finish_reason


def tokens_lost(found: list[Any], wanted: list[Any]) -> int:
    """How many tokens differ, are missing or repeated; asserts that the texts agree when none."""
    wrong = 0
    for (ids, text, reason), (right, right_text, right_reason) in zip(found, wanted, strict=True):
        wrong += sum(a != b for a, b in zip(ids, right, strict=False)) + abs(len(ids) - len(right))
        assert ids != right or (text, reason) == (right_text, right_reason)
    return wrong
