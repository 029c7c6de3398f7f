"""Things that will be due for a row at a step known ahead.

Every decode row runs in every step, so the step in which it needs its next block, and the one that
samples its last token, are known when it starts to decode. A steady step then looks at one bucket
and not at all rows.
"""

from __future__ import annotations

from tp_runtime.coordinator.sequence import Sequence


class DueSteps:
    """Sequences by step. A sequence is in at most one bucket; the caller remembers which."""

    def __init__(self) -> None:
        self._buckets: dict[int, dict[Sequence, None]] = {}

    def add(self, step: int, seq: Sequence) -> None:
        self._buckets.setdefault(step, {})[seq] = None

    def discard(self, step: int, seq: Sequence) -> None:
        """No error when it is not there."""
        bucket = self._buckets.get(step)
        if bucket is not None and seq in bucket:
            del bucket[seq]
            if not bucket:
                del self._buckets[step]

    def count(self, step: int) -> int:
        bucket = self._buckets.get(step)
        return len(bucket) if bucket else 0

    def take(self, step: int) -> list[Sequence]:
        """Removes and returns what is due at `step`, in the order it was added."""
        bucket = self._buckets.pop(step, None)
        return list(bucket) if bucket else []

    def __len__(self) -> int:
        return sum(map(len, self._buckets.values()))
