"""Times of steps, read from a `--trace` file."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

from tp_runtime.launch.bench.report import percentile

_PARTS = ("plan", "publish", "commit")


class StepTimes(NamedTuple):
    """Milliseconds. `period`: of steady steps, the time between two publications. `turn`: from the
    receipt of a step's ids to the publication of the next plan that waited for them. The parts are
    means per step, waiting for the interpreter lock included."""

    steps: int
    period: float
    turn_p50: float
    turn_p99: float
    plan: float
    publish: float
    commit: float


def read_step_times(trace: Path, start_s: float, end_s: float, window: int) -> StepTimes:
    """Steps whose ids were received between two times of CLOCK_MONOTONIC, seconds."""
    events = json.loads(trace.read_text())["traceEvents"]
    pid = next(e["pid"] for e in events if e["args"].get("name") == "coordinator")
    spans: dict[str, dict[int, tuple[float, float]]] = defaultdict(dict)
    for event in events:
        if event["ph"] == "X" and event["pid"] == pid:
            spans[event["name"]][event["args"]["step"]] = event["ts"], event["dur"]
    commits, publications = spans["commit"], spans["publish"]
    steps = [n for n, (ts, _) in commits.items() if start_s * 1e6 <= ts <= end_s * 1e6]
    steps = sorted(n for n in steps if n in spans["plan"] and n + window in publications)
    turns = [sum(publications[n + window]) - commits[n][0] for n in steps]
    means = {
        part: sum(spans[part][n][1] for n in steps) / max(1, len(steps)) / 1000 for part in _PARTS
    }
    first, last = (publications[n][0] for n in (steps[0], steps[-1])) if steps else (0.0, 0.0)
    return StepTimes(
        len(steps),
        (last - first) / 1000 / max(1, len(steps) - 1),
        percentile(turns, 50) / 1000,
        percentile(turns, 99) / 1000,
        **means,
    )
