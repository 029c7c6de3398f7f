"""Where things are kept that were made once on this machine and can be made again."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """`$XDG_CACHE_HOME/tp_runtime`, or `~/.cache/tp_runtime`; not made here."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification: a path that is not absolute is to be ignored.
    return (Path(base) if base.startswith("/") else Path.home() / ".cache") / "tp_runtime"
