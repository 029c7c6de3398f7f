"""One line every ten seconds while there is work: what runs, how fast, how full the cache is."""

from __future__ import annotations

import sys
from collections.abc import Callable

from tp_runtime.coordinator.scheduler_stats import SchedulerStats

INTERVAL_S = 10.0


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


class LoadLog:
    """`turn` may be called at any time; `say` gets the line."""

    def __init__(self, say: Callable[[str], None] = _to_stderr) -> None:
        self._say = say
        self._since = 0.0
        self._before = (0, 0, 0, 0)

    def turn(self, now: float, stats: SchedulerStats) -> None:
        """`now` in seconds. Rates are those of the time since the last line."""
        if not self._since:
            self._since = now
        seconds = now - self._since
        if seconds < INTERVAL_S:
            return
        counters = stats.counters
        totals = (
            counters.prompt_tokens,
            counters.generated_tokens,
            counters.prefix_queries,
            counters.prefix_hits,
        )
        prompt, generated, queries, hits = (
            new - old for new, old in zip(totals, self._before, strict=True)
        )
        self._since, self._before = now, totals
        if not (prompt or generated or stats.running or stats.waiting):
            return
        used = stats.blocks_used / stats.blocks_total if stats.blocks_total else 0.0
        self._say(
            f"tp_runtime: running {stats.running}, waiting {stats.waiting}, "
            f"prompt {prompt / seconds:.1f} tok/s, generated {generated / seconds:.1f} tok/s, "
            f"KV cache {used:.1%}, prefix hits {hits / queries if queries else 0.0:.1%}"
        )
