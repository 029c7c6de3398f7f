"""Steps that were published and not yet answered, and the blocks they may still write to."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterator
from itertools import islice

from tp_runtime.coordinator.sequence import SeqKey, Sequence


@dataclasses.dataclass(slots=True)
class PlannedChunk:
    """Tokens `start` to `stop` of `seq`. `last`: the prefill ends here; it samples a token unless
    none is wanted."""

    seq: Sequence
    start: int
    stop: int
    last: bool
    sample: bool

    @property
    def size(self) -> int:
        return self.stop - self.start


@dataclasses.dataclass(slots=True)
class StepRecord:
    """What a plan asked of the workers, by sequence: rows may be others when the answer comes."""

    step: int
    decode: tuple[Sequence, ...]
    chunks: list[PlannedChunk]
    sampled: tuple[Sequence, ...]
    """Owners of the answer's ids, in order."""
    grown: list[Sequence]
    """Decode rows that began a new block in this step."""
    ending: list[Sequence] = dataclasses.field(default_factory=list)
    """Sequences whose last token, or last prompt token when none is wanted, this step computes."""
    with_grammar: tuple[Sequence, ...] = ()
    """Those of `sampled` that are drawn under a mask."""
    records_graph: bool = False
    """It takes as long as that, whatever its rows."""

    @property
    def is_steady(self) -> bool:
        """Whether its answer is one more token for some rows, so far as can be known before."""
        other = self.chunks or self.ending or self.with_grammar or self.records_graph
        return bool(self.sampled) and not other

    def sequences(self) -> list[Sequence]:
        return [*self.decode, *(chunk.seq for chunk in self.chunks)]


class StepsInFlight:
    """First in, first out: workers answer in the order of the plans."""

    def __init__(self) -> None:
        self._records: deque[StepRecord] = deque()
        self._held: deque[tuple[int, list[int]]] = deque()

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[StepRecord]:
        return iter(self._records)

    @property
    def oldest(self) -> StepRecord | None:
        return self._records[0] if self._records else None

    def oldest_steps(self, number: int) -> deque[StepRecord]:
        """Those whose answers are due next; fewer when fewer are under way."""
        return deque(islice(self._records, number))

    @property
    def num_recording(self) -> int:
        """Steps in which a graph is recorded."""
        return sum(record.records_graph for record in self._records)

    @property
    def holds_blocks(self) -> bool:
        """Whether a row was dropped while steps with it are under way."""
        return bool(self._held)

    def alive_keys(self, step: int | None = None) -> list[SeqKey]:
        """Running sequences that take part in `step`, or in any step; each once."""
        records = [r for r in self._records if step is None or r.step == step]
        seqs = dict.fromkeys(seq for record in records for seq in record.sequences())
        return [seq.key for seq in seqs if seq.is_alive]

    def publish(self, record: StepRecord) -> None:
        self._records.append(record)

    @property
    def rows(self) -> tuple[Sequence, ...]:
        """Whose ids the next answer brings."""
        return self._records[0].sampled

    def answered(self) -> StepRecord:
        """The oldest step, which is done."""
        return self._records.popleft()

    def hold(self, blocks: list[int], until: int) -> None:
        """Keeps `blocks` until step `until` is answered; `until` never falls."""
        self._held.append((until, blocks))

    def releasable(self, step: int) -> list[list[int]]:
        """Removes and returns the tables held until `step` or an earlier one."""
        found: list[list[int]] = []
        while self._held and self._held[0][0] <= step:
            found.append(self._held.popleft()[1])
        return found

    def held_tables(self) -> list[list[int]]:
        return [blocks for _, blocks in self._held]
