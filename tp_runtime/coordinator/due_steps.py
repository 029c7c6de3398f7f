"""What will be due for decode rows at steps known ahead: their next block, their last token.

Every decode row runs in every step, so both are known when it starts to decode. A steady step then
looks at one bucket of each and not at all rows.
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

    def take(self, step: int) -> list[Sequence]:
        """Removes and returns what is due at `step`, in the order it was added."""
        bucket = self._buckets.pop(step, None)
        return list(bucket) if bucket else []

    def __len__(self) -> int:
        return sum(map(len, self._buckets.values()))


class DecodeDue:
    """`ends`: rows by the step that samples their last token."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._growing: list[dict[Sequence, None]] = [{} for _ in range(block_size)]
        """Rows by the remainder of the steps in which they begin a block: every step feeds one
        position of each, so that a row stays where it is for as long as it decodes."""
        self.ends = DueSteps()

    def start(self, seq: Sequence, step: int, to_sample: int) -> None:
        """`step` samples the first token after the prefill, `to_sample` follow. The decode step
        after `step` feeds position len(tokens)."""
        self._begin(seq, step + to_sample, step + 1 - len(seq.tokens))

    def resume(self, seq: Sequence, step: int, to_sample: int) -> None:
        """A row whose tokens are all known decodes again: `step` feeds the newest one and samples
        the first of `to_sample`."""
        self._begin(seq, step + to_sample - 1, step + 1 - len(seq.tokens))

    def _begin(self, seq: Sequence, end_due: int, origin: int) -> None:
        """Position p of `seq` is fed by step `origin` + p."""
        seq.end_due = end_due
        self.ends.add(end_due, seq)
        seq.block_phase = origin % self._block_size
        self._growing[seq.block_phase][seq] = None

    def growing(self, step: int) -> list[Sequence]:
        """Rows that begin a block in `step`, which feeds the first position of it."""
        return list(self._growing[step % self._block_size])

    def num_growing(self, step: int) -> int:
        return len(self._growing[step % self._block_size])

    def drop(self, seq: Sequence) -> None:
        """A decode row is gone."""
        self._growing[seq.block_phase].pop(seq, None)
        self.ends.discard(seq.end_due, seq)

    def __len__(self) -> int:
        return sum(map(len, self._growing)) + len(self.ends)
