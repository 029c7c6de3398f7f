"""How a benchmark speaks: a table for people, and one line of JSON with the conditions last."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from tp_runtime.launch.rank_environment import usable_cores

Cell = str | float | int | None


def print_table(head: Sequence[str], rows: Sequence[Sequence[Cell]]) -> None:
    """Numbers to the right, three significant digits from 100 down; None as a dash."""
    cells = [list(head), *([_text(cell) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for line in cells:
        print("  ".join(cell.rjust(w) for cell, w in zip(line, widths, strict=True)).rstrip())


def _text(cell: Cell) -> str:
    if cell is None:
        return "-"
    if isinstance(cell, float):
        return (
            f"{cell:,.0f}" if abs(cell) >= 1000 else f"{cell:.3g}" if cell < 100 else f"{cell:.1f}"
        )
    return str(cell)


def print_json(benchmark: str, conditions: Mapping[str, Any], results: Any) -> None:
    """The last line of the output."""
    record = {
        "benchmark": benchmark,
        "revision": revision(),
        "hardware": hardware(),
        **conditions,
        "results": results,
    }
    print(json.dumps(record), flush=True)


def percentile(values: Sequence[float], percent: float) -> float:
    """Nearest rank; 0 without values."""
    if not values:
        return 0.0
    return sorted(values)[min(len(values) - 1, int(len(values) * percent / 100))]


def revision() -> str:
    """The commit of a checkout ("+" with changes), the package's version otherwise."""
    root = Path(__file__).resolve().parents[2]
    try:
        found = subprocess.run(
            ["git", "-C", str(root), "describe", "--always", "--dirty=+"],
            capture_output=True,
            text=True,
            timeout=10,
        )
    except (OSError, subprocess.TimeoutExpired):
        found = None
    if found is not None and found.returncode == 0:
        return found.stdout.strip()
    try:
        return metadata.version("tp_runtime")
    except metadata.PackageNotFoundError:
        return "unknown"


def hardware() -> dict[str, Any]:
    """Processor, usable cores, and the GPUs that are visible."""
    return {"cpu": _processor(), "cores": usable_cores(), "gpus": _gpus()}


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.machine()


def _gpus() -> list[str]:
    """Names, without initialising CUDA here."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return []
    try:
        import pynvml

        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        return [str(pynvml.nvmlDeviceGetName(handle)) for handle in handles]
    except Exception:  # no driver, no library
        return []
