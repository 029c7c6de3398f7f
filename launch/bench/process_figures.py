"""What the kernel knows of another process: CPU time of its threads by name, resident memory."""

from __future__ import annotations

import os
from collections import defaultdict
from pathlib import Path

_TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")


def thread_seconds(pid: int) -> dict[str, float]:
    """CPU seconds so far, user and system, summed over threads of the same name."""
    seconds: defaultdict[str, float] = defaultdict(float)
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            name, _, rest = (task / "stat").read_text().partition("(")[2].rpartition(")")
        except OSError:
            continue  # ended meanwhile
        fields = rest.split()
        seconds[name] += (int(fields[11]) + int(fields[12])) * _TICK_S
    return seconds


def resident_bytes(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
