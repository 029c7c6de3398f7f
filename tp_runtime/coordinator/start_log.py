"""Where the start of the workers spent its time, for the log."""

from __future__ import annotations

import logging

from tp_runtime.messages import WorkerReady

logger = logging.getLogger(__name__)

_LONG_START_S = 3.0
"""A start that nobody waited for needs no line."""


def log_start(message: WorkerReady) -> None:
    """`message` of the rank that was ready last."""
    seconds = sum(message.start_s.values())
    if seconds > _LONG_START_S:
        parts = ", ".join(f"{part} {took:.2f}" for part, took in message.start_s.items())
        logger.warning("Rank %d started in %.1f s: %s.", message.rank, seconds, parts)
