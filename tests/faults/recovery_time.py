"""Where the time from a fault to the next token goes, as the runtime itself measures it.

    python -m tests.faults.recovery_time --repeat 3

"client" is what a client saw: from the fault to the next token of its stream. The parts are those
of the coordinator's log; "detect" begins at the last heartbeat, a little before the fault.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from tests.faults.fault_server import FaultServer, fault_server, serve, wait_for
from tests.tiny_models import make_tiny
from tp_runtime import Client
from tp_runtime.messages import RestartReport

PARTS = ("detect", "kill", "fork", "load", "re-prefill")
CASES = [(rank, action) for rank in (0, 1) for action in ("kill", "abort", "raise", "exit")]
STEP_DEADLINE_S = 2.0


@dataclass
class Times:
    """Seconds. `parts` by name; `client` from the fault to the next token."""

    parts: dict[str, float]
    client: float

    @property
    def total(self) -> float:
        return sum(self.parts.values())


def measure(server: FaultServer, client: Client, rank: int, action: str) -> Times:
    """A worker fails in the middle of a stream."""
    before = newest(client)
    stream = client.generate(
        [5, 6, 7], temperature=0, ignore_eos=True, max_tokens=120, stream=True, timeout=60
    )
    for _ in range(10):
        next(stream)
    happened = server.plan(rank, "decode", action)
    arrivals = [time.monotonic()]
    for _ in stream:
        arrivals.append(time.monotonic())
    fault = happened()
    assert fault is not None
    _, resumed = max((b - a, b) for a, b in itertools.pairwise(arrivals))
    last = wait_for(lambda: recovered(client, before), 10)
    return Times(last.seconds, resumed - fault)


def newest(client: Client) -> RestartReport | None:
    return next(reversed(client.info().activity.restarts), None)


def recovered(client: Client, before: RestartReport | None) -> RestartReport | None:
    """The report of a recovery that came after `before` and is over."""
    time.sleep(0.05)
    found = newest(client)
    is_new = found is not None and (before is None or found.at != before.at)
    return found if found is not None and is_new and found.seconds else None


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=2, help="of every fault")
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="tpr_") as folder:
        os.environ.update(XDG_RUNTIME_DIR=folder, TP_RUNTIME_HTTP="0", HF_HUB_OFFLINE="1")
        tiny = str(make_tiny("qwen3", Path(folder) / "tiny"))
        command = serve(tiny, "--step-deadline", str(STEP_DEADLINE_S))
        with fault_server(Path(folder), *command) as server, Client(server.address) as client:
            rows = [
                (f"worker {rank} {action}", measure(server, client, rank, action))
                for rank, action in CASES
                for _ in range(given.repeat)
            ]
    print(f"{'fault':18}" + "".join(f"{part:>12}" for part in (*PARTS, "total", "client")))
    for name, times in rows:
        print_row(name, [*(times.parts[part] for part in PARTS), times.total, times.client])
    middle = [median(times.parts[part] for _, times in rows) for part in PARTS]
    totals = median(t.total for _, t in rows), median(t.client for _, t in rows)
    print_row("median", [*middle, *totals])
    return 0


def print_row(name: str, seconds: list[float]) -> None:
    print(f"{name:18}" + "".join(f"{value:12.3f}" for value in seconds))


if __name__ == "__main__":
    sys.exit(main())
