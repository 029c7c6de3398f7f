"""Sequences that wait for a row, oldest first, whatever way they came in."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator

from tp_runtime.coordinator.sequence import SeqKey, Sequence


class WaitingQueue:
    """Ordered by `Sequence.order`. Every operation is constant time except putting back a
    sequence that is not the oldest (after a preemption while admission is restricted)."""

    def __init__(self) -> None:
        self._seqs: OrderedDict[SeqKey, Sequence] = OrderedDict()

    def __len__(self) -> int:
        return len(self._seqs)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._seqs.values())

    def append(self, seq: Sequence) -> None:
        """A new arrival, younger than all others."""
        self._seqs[seq.key] = seq

    def put_back(self, seq: Sequence) -> None:
        """A sequence that was running takes its old place."""
        oldest = next(iter(self), None)
        self._seqs[seq.key] = seq
        if oldest is None or seq.order < oldest.order:
            self._seqs.move_to_end(seq.key, last=False)
        else:
            self.replace(list(self))

    def remove(self, seq: Sequence) -> None:
        del self._seqs[seq.key]

    def replace(self, seqs: Iterable[Sequence]) -> None:
        """The whole contents anew, in any order."""
        self._seqs = OrderedDict((s.key, s) for s in sorted(seqs, key=lambda s: s.order))
