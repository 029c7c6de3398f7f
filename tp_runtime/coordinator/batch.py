"""The dense rows of the batch, as the workers will hold them after the next plan.

Leaving a row makes a hole at once; holes are closed when the next plan is formed, by the sequences
that enter and by moves from the end. What a steady step needs (decode rows in order, their packed
numbers, graph size) is computed when the composition changes and kept otherwise.

Rows with a grammar are the last ones: they miss steps, and the others are then still the first
rows, as a graph needs them.
"""

from __future__ import annotations

from bisect import bisect_left
from heapq import heappop, heappush

from tp_runtime.coordinator.sequence import Sequence, SequenceState
from tp_runtime.messages import pack_ids


class Batch:
    """`graph_sizes`: see SchedulerLimits."""

    def __init__(self, graph_sizes: tuple[int, ...] = ()) -> None:
        self._graph_sizes = sorted(graph_sizes)
        self._rows: list[Sequence | None] = []
        self._holes: list[int] = []  # heap: the lowest is filled first
        self._stale = False
        self.num_decode = 0
        """Rows in decode state, always current."""
        self.num_needing_answer = 0
        self.num_with_grammar = 0
        self.decode: tuple[Sequence, ...] = ()
        """Decode rows in row order; valid after `settle`, like the two below."""
        self.decode_rows: bytes | None = None
        """As in StepPlan."""
        self.padded = 0

    def __len__(self) -> int:
        """Rows in use, holes not counted."""
        return len(self._rows) - len(self._holes)

    def sequences(self) -> list[Sequence]:
        return [seq for seq in self._rows if seq is not None]

    def leave(self, seq: Sequence) -> None:
        """The row of `seq` is gone with the next plan. The caller sets the new state after this."""
        self._rows[seq.row] = None
        heappush(self._holes, seq.row)
        seq.row = -1
        self.num_decode -= seq.state is SequenceState.DECODE
        self.num_needing_answer -= seq.needs_answer
        self.num_with_grammar -= seq.grammar is not None
        self._stale = True

    def start_decode(self, seq: Sequence) -> None:
        """`seq` (its prefill is planned to the end, or its mask is known) decodes from the next
        plan on."""
        seq.state = SequenceState.DECODE
        self.num_decode += 1
        self._stale = True

    def hold(self, seq: Sequence) -> None:
        """`seq` keeps its row and is in no plan before `start_decode`."""
        self.num_decode -= seq.state is SequenceState.DECODE
        seq.state = SequenceState.HELD
        self._stale = True

    def settle(self, entering: list[Sequence]) -> list[tuple[int, int]]:
        """Gives `entering` their rows, closes the holes and returns the moves (source, target)."""
        self.num_with_grammar += sum(seq.grammar is not None for seq in entering)
        places: list[tuple[Sequence, int]] = []
        if self.num_with_grammar and (entering or self._stale):
            places = [(seq, seq.row) for seq in self.sequences()]
        for seq in entering:
            if self._holes:
                seq.row = heappop(self._holes)
                self._rows[seq.row] = seq
            else:
                seq.row = len(self._rows)
                self._rows.append(seq)
            self.num_needing_answer += seq.needs_answer
            self._stale = True
        moves = self._close_holes() if self._holes else []
        if self.num_with_grammar and self._stale:
            self._put_grammars_last()
            moves = [(row, seq.row) for seq, row in places if seq.row != row]
        if self._stale:
            self._refresh()
        return moves

    def _close_holes(self) -> list[tuple[int, int]]:
        moves: list[tuple[int, int]] = []
        rows, holes = self._rows, self._holes
        while holes:
            while rows and rows[-1] is None:
                rows.pop()
            target = heappop(holes)
            if target >= len(rows):
                continue
            last = rows.pop()
            assert last is not None
            rows[target] = last
            moves.append((last.row, target))
            last.row = target
        while rows and rows[-1] is None:
            rows.pop()
        return moves

    def _put_grammars_last(self) -> None:
        """By exchanging as few rows as can be."""
        rows = self.sequences()  # without holes now
        first = len(rows) - self.num_with_grammar
        ahead = [seq for seq in rows[:first] if seq.grammar is not None]
        behind = [seq for seq in rows[first:] if seq.grammar is None]
        for one, other in zip(ahead, behind, strict=True):
            one.row, other.row = other.row, one.row
            self._rows[one.row], self._rows[other.row] = one, other

    def _refresh(self) -> None:
        rows = self.sequences()
        decode = [seq for seq in rows if seq.state is SequenceState.DECODE]
        everything = len(decode) == len(rows)
        self.decode_rows = None if everything else pack_ids([seq.row for seq in decode])
        self.decode = tuple(decode)
        prefills = any(seq.state is SequenceState.PREFILL for seq in rows)
        first = bool(decode) and decode[-1].row == len(decode) - 1
        self.padded = self._graph_size(len(decode)) if first and not prefills else 0
        self._stale = False

    def _graph_size(self, rows: int) -> int:
        at = bisect_left(self._graph_sizes, rows)
        return self._graph_sizes[at] if at < len(self._graph_sizes) else 0
