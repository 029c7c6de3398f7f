"""What went wrong with a generation of workers, and how it is told.

When one rank fails the others fail too: their collectives break. The report must name the first
cause and not an echo, so reports are collected for a moment and ranked.
"""

from __future__ import annotations

import enum
import os
import re
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path

from tp_runtime.errors import ConfigError, WeightsError
from tp_runtime.messages import WorkerFailed

GRACE_S = 0.25
"""How long reports are collected after the first one. A killed rank is noticed within milliseconds;
so are the broken collectives of its neighbours."""


class Kind(enum.IntEnum):
    """Lower is more likely to be the cause. A lost keeper or host takes its workers along, so it
    comes before whatever the others say of their broken connections."""

    HOST_LOST = 0
    KILLED = 1
    EXITED = 2
    KEEPER_LOST = 3
    HUNG = 4
    RAISED = 5
    ECHO = 6


_ECHO = re.compile(
    r"gloo|nccl|Connection (closed|reset)|Broken pipe|Socket|store|ProcessGroup|DistBackendError",
    re.IGNORECASE,
)


@dataclass
class Failure:
    """One report about one rank."""

    kind: Kind
    rank: int
    phase: str
    step: int
    error: str
    details: str = ""
    code: str = ""
    """Of tp_runtime.errors, for an error raised on purpose."""
    when: float = field(default_factory=time.monotonic)

    @classmethod
    def raised(
        cls, rank: int, phase: str, step: int, error: str, trace: str, code: str = ""
    ) -> Failure:
        """An exception; one that speaks of a broken connection is probably an echo."""
        kind = Kind.ECHO if not code and _ECHO.search(error) else Kind.RAISED
        return cls(kind, rank, phase, step, error, trace, code)

    @classmethod
    def reported(cls, rank: int, message: WorkerFailed) -> Failure:
        """What a worker said before its end."""
        return cls.raised(
            rank, message.phase, message.step, message.error, message.traceback, message.code
        )

    @property
    def refused(self) -> bool:
        """A model folder or setting that cannot work: the sentence says all there is to say."""
        return self.code in (ConfigError.code, WeightsError.code)

    @classmethod
    def exited(cls, rank: int, phase: str, step: int, status: int) -> Failure:
        """`status` >= 0: exit status; < 0: minus the signal."""
        if status < 0:
            return cls(Kind.KILLED, rank, phase, step, f"killed by {signal_name(-status)}")
        return cls(Kind.EXITED, rank, phase, step, f"exited with status {status}")


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def first_cause(failures: list[Failure]) -> Failure:
    """The most likely cause: by kind, then by time."""
    return min(failures, key=lambda f: (f.kind, f.when))


_ADVICE = (
    (
        re.compile(r"out of memory", re.I),
        "lower --gpu-memory-utilization, --max-num-batched-tokens "
        "or --max-num-seqs, or use more GPUs (--tensor-parallel-size).",
    ),
    (
        re.compile(r"SIGKILL"),
        "something outside killed it; look for the kernel's out-of-memory "
        "killer (dmesg) or an operator.",
    ),
    (
        re.compile(r"SIGSEGV|SIGABRT|SIGBUS|SIGILL|SIGFPE"),
        "native code crashed; the lines above "
        "this block may show where. Try --enforce-eager and --attention-backend reference.",
    ),
    (
        re.compile(r"its host .* is lost"),
        "look at that host and at the output of its torchrun; then start the server again on every "
        "host.",
    ),
    (
        re.compile(r"its keeper"),
        "look at what the process of this rank printed, and whether something killed it.",
    ),
    (
        re.compile(r"hangs"),
        "look whether the process is stopped or its GPU is stuck; raise "
        "--step-deadline if steps of this length are normal.",
    ),
)


def advice(failure: Failure) -> str:
    """One sentence about what to do."""
    for pattern, text in _ADVICE:
        if pattern.search(failure.error):
            return text
    return "read the traceback below; run `tp-runtime doctor` to check this machine."


def where_the_log_is() -> str:
    """The processes of a server print to one standard error, this process's own among them."""
    try:
        target = Path(os.readlink("/proc/self/fd/2"))
    except OSError:
        target = Path()
    if target.is_file():
        return str(target)
    return "what the processes printed, above (torchrun --log-dir DIR --tee 3 keeps it in files)."


def describe(failure: Failure) -> str:
    """One sentence: rank, what, when."""
    where = f"in phase {failure.phase}"
    if failure.step:
        where += f", step {failure.step}"
    if failure.kind not in (Kind.RAISED, Kind.ECHO):
        return f"Rank {failure.rank}: {failure.error} {where}."
    return f"Rank {failure.rank} failed {where}: {failure.error}"


def report(failures: list[Failure], consequence: str, log: str = "") -> str:
    """The block for the terminal. `consequence` says what the server does now; `log` where the full
    log is, found out when not given. A refusal is told in its own sentence alone."""
    cause = first_cause(failures)
    if cause.refused:
        return cause.error
    lines = [
        "---- tp_runtime: a worker failed " + "-" * 46,
        describe(cause),
        f"  what to do: {advice(cause)}",
        f"  now: {consequence}",
        f"  log: {log or where_the_log_is()}",
    ]
    others = sorted({f.rank for f in failures} - {cause.rank})
    if others:
        lines.append(f"  also failed, as a consequence: rank {', '.join(map(str, others))}")
    if cause.details:
        lines += ["  traceback:", *("    " + line for line in cause.details.rstrip().splitlines())]
    lines.append("-" * 79)
    return "\n".join(lines)
