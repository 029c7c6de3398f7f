"""What the scheduler counts, for the log line, metrics and Info."""

from __future__ import annotations

import dataclasses
from collections import Counter


@dataclasses.dataclass
class SchedulerCounters:
    """Totals since start; they outlive the replacement of workers."""

    steps: int = 0
    prompt_tokens: int = 0
    """Computed by chunks: without prefix hits, with what is computed again after preemption."""
    generated_tokens: int = 0
    """Handed to the front end."""
    dropped_tokens: int = 0
    """Sampled by steps under way for sequences that had ended."""
    preemptions: int = 0
    prefix_queries: int = 0
    """Tokens of admitted sequences, at their first admission, while prefix caching is on."""
    prefix_hits: int = 0
    """Those of them found in the cache."""
    ended: Counter[str] = dataclasses.field(default_factory=Counter)
    """Sequences by reason: stop, length, error, and the reasons given to `cancel`."""


@dataclasses.dataclass(frozen=True)
class SchedulerStats:
    """A moment. `running` are sequences admitted and not finished; blocks are KV blocks; `cached`
    are blocks with known contents, in use or free (free ones count as free)."""

    running: int
    waiting: int
    steps_in_flight: int
    blocks_total: int
    blocks_used: int
    blocks_free: int
    blocks_cached: int
    counters: SchedulerCounters
