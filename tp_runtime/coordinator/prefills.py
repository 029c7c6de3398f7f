"""The way from the queue into the batch: admission, and chunks of prompts within a token budget.

First come, first served: the oldest prefill takes what it needs of a step's budget, the next one
the rest, and the queue's head is admitted only when budget, a row and blocks for its whole prompt
are there. So at most one prefill is ever half done because of the budget, none waits for blocks in
its middle, and nobody is overtaken. A preempted sequence comes here again, its generated tokens
now part of what is prefilled.
"""

from __future__ import annotations

from collections.abc import Callable

from tp_runtime.coordinator.block_tables import BlockTables
from tp_runtime.coordinator.limits import SchedulerLimits
from tp_runtime.coordinator.sequence import SeqKey, Sequence, SequenceState
from tp_runtime.coordinator.steps_in_flight import PlannedChunk
from tp_runtime.coordinator.waiting_queue import WaitingQueue

RESERVE_SHARE = 64
"""One block per row, but at most 1/64 of the pool, stays free when a sequence is admitted, so that
the rows which run do not at once push it (or another) out again."""


class Prefills:
    """`queue` outlives a generation of workers, the rest does not. `clock` as in Scheduler."""

    def __init__(
        self,
        limits: SchedulerLimits,
        tables: BlockTables,
        queue: WaitingQueue,
        clock: Callable[[], float],
    ) -> None:
        self._limits = limits
        self._tables = tables
        self._queue = queue
        self._clock = clock
        self.active: list[Sequence] = []
        """Rows in prefill state, oldest first."""
        self._refused: tuple[Sequence, int] | None = None

    def continue_chunks(self, budget: int) -> list[PlannedChunk]:
        """The next chunk of every active prefill, `budget` tokens in all at most."""
        chunks: list[PlannedChunk] = []
        for seq in self.active:
            if budget <= 0:
                break
            chunks.append(self._chunk(seq, budget))
            budget -= chunks[-1].size
        return chunks

    def admit(self, budget: int, rows: int, only: frozenset[SeqKey] | None) -> list[PlannedChunk]:
        """First chunks of sequences that leave the queue now, `budget` tokens in all at most.
        `rows` are in use already; `only` restricts who may be admitted."""
        chunks: list[PlannedChunk] = []
        while budget > 0 and rows < self._limits.max_rows:
            seq = self._next(only)
            if seq is None or not self._enter(seq, rows):
                break
            chunks.append(self._chunk(seq, budget))
            budget -= chunks[-1].size
            rows += 1
        return chunks

    def _next(self, only: frozenset[SeqKey] | None) -> Sequence | None:
        """Whoever waits for a mask (for a moment, after a preemption or crash) is passed over."""
        for seq in self._queue:
            if (only is None or seq.key in only) and (seq.grammar is None or seq.mask is not None):
                return seq
        return None

    def _enter(self, seq: Sequence, rows: int) -> bool:
        pool = self._tables.pool
        reserve = min(rows, max(1, pool.num_blocks // RESERVE_SHARE))
        available = pool.num_free - reserve
        # Looking up a long prompt in every step while the pool is full would cost more than the
        # step; only blocks that were freed can make a difference.
        if self._refused is not None:
            refused, then = self._refused
            if refused is seq and available <= then:
                return False
        if not self._tables.open(seq, reserve):
            self._refused = (seq, available)
            return False
        self._refused = None
        self._queue.remove(seq)
        seq.state = SequenceState.PREFILL
        self.active.append(seq)
        seq.admitted_at = seq.admitted_at or self._clock()
        return True

    def _chunk(self, seq: Sequence, budget: int) -> PlannedChunk:
        start, length = seq.computed, len(seq.tokens)
        stop = min(length, start + budget)
        last = stop == length
        seq.computed = stop
        # Known to others from here on: steps run in order, and within a step all tokens are
        # stored before any is read (see StepPlan). The samples of a request share its prompt so.
        self._tables.offer(seq)
        return PlannedChunk(seq, start, stop, last, last and seq.total_len > length)
