"""What will be due for decode rows at steps known ahead: their next block, their last token.

Every decode row runs in every step, so both are known when it starts to decode. A steady step then
looks at one bucket and not at all rows.
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


class DecodeDue:
    """`blocks`: rows that begin a block, by the step that feeds its first position. `ends`: rows by
    the step that samples their last token."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self.blocks = DueSteps()
        self.ends = DueSteps()

    def start(self, seq: Sequence, step: int, to_sample: int) -> None:
        """`step` samples the first token after the prefill, `to_sample` follow. The decode step
        after `step` feeds position len(tokens)."""
        seq.end_due = step + to_sample
        self.ends.add(seq.end_due, seq)
        places = len(seq.blocks) * self._block_size - len(seq.tokens)
        seq.block_due = step + places + 1
        self.blocks.add(seq.block_due, seq)

    def resume(self, seq: Sequence, step: int, to_sample: int) -> None:
        """A row whose tokens are all known decodes again: `step` feeds the newest one and samples
        the first of `to_sample`."""
        seq.end_due = step + to_sample - 1
        self.ends.add(seq.end_due, seq)
        seq.block_due = step + len(seq.blocks) * self._block_size - len(seq.tokens) + 1
        self.blocks.add(seq.block_due, seq)

    def grown(self, seqs: list[Sequence], step: int) -> None:
        """These took their block at `step` and will need the next one when it is full."""
        for seq in seqs:
            seq.block_due = step + self._block_size
            self.blocks.add(seq.block_due, seq)

    def drop(self, seq: Sequence) -> None:
        """A decode row is gone."""
        self.blocks.discard(seq.block_due, seq)
        self.ends.discard(seq.end_due, seq)

    def __len__(self) -> int:
        return len(self.blocks) + len(self.ends)
