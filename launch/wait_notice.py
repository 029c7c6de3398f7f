"""Saying what is being waited for, once a wait lasts longer than two seconds."""

from __future__ import annotations

import sys
import time
from typing import TextIO

QUIET_S = 2.0
"""A wait shorter than this needs no explanation."""
REPEAT_S = 10.0
"""A wait with an unchanged text is told again after this long, with the time it has taken."""


class WaitNotice:
    """Give it the current reason at every turn of a polling loop; it prints when that is due.

    The two seconds count from the start of the whole wait, so that many short phases in a row are
    told too; after that each new phase is told when it has lasted half a second."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._start = time.monotonic()
        self._text = ""
        self._since = self._start
        self._told_at = 0.0
        self._told_text = ""

    def update(self, text: str) -> None:
        now = time.monotonic()
        if text != self._text:
            self._text, self._since = text, now
        if not text or now - self._start < QUIET_S or now - self._since < 0.5:
            return
        if text == self._told_text and now - self._told_at < REPEAT_S:
            return
        again = f" ({now - self._start:.0f} s)" if text == self._told_text else ""
        self._told_text, self._told_at = text, now
        print(f"tp_runtime: {text}{again} ...", file=self._stream, flush=True)
