"""Names that `top -H`, /proc and the coordinator benchmark show for a process's threads."""

from __future__ import annotations

import contextlib
from pathlib import Path


def name_this_thread(name: str) -> None:
    """The kernel keeps 15 characters. Without /proc nothing happens."""
    with contextlib.suppress(OSError):
        Path("/proc/thread-self/comm").write_text(name[:15])
