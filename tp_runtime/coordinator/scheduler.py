"""The one scheduler: decides which rows run in each step, and what answers mean.

`plan` forms the next step, `commit` takes the answer to the oldest one; between them up to a window
of steps is under way. A sequence waits, is prefilled in chunks, decodes in every step, ends.
Decode rows never wait for prefill: chunks fill what they leave of the token budget, oldest first. A
row with a grammar is held back until the mask of its next token is known, and the others go on.

Everything runs on one thread. A steady decode step does work for the rows that change in it, and
one pass over the answered ids. Text, sockets, clocks of clients and devices are not known here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator

from tp_runtime.coordinator.admission import finish_on_arrival, fit_again, prepare
from tp_runtime.coordinator.answer_reader import AnswerReader
from tp_runtime.coordinator.batch import Batch
from tp_runtime.coordinator.block_tables import BlockTables
from tp_runtime.coordinator.due_steps import DecodeDue
from tp_runtime.coordinator.limits import SchedulerLimits
from tp_runtime.coordinator.plan_builder import build_plan
from tp_runtime.coordinator.prefills import Prefills
from tp_runtime.coordinator.scheduler_stats import SchedulerCounters, SchedulerStats
from tp_runtime.coordinator.sequence import (
    SeqKey,
    Sequence,
    SequenceState,
    SequenceUpdate,
    SteadyTokens,
)
from tp_runtime.coordinator.steps_in_flight import PlannedChunk, StepRecord, StepsInFlight
from tp_runtime.coordinator.waiting_queue import WaitingQueue
from tp_runtime.coordinator.watched_ids import WatchedIds
from tp_runtime.errors import InvalidRequestError, OverloadedError, TPRuntimeError
from tp_runtime.messages import Answer, StepPlan
from tp_runtime.text.grammar import TokenMask

WINDOW = 2
"""Steps under way while anything may change soon: one runs, the next is ready behind it."""


class Scheduler:
    """`limits` hold for one generation of workers, `clock` gives seconds as `Sequence.arrival`."""

    def __init__(
        self,
        limits: SchedulerLimits,
        generation: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.limits = limits
        self.counters = SchedulerCounters()
        self._clock = clock
        self._seqs: dict[SeqKey, Sequence] = {}
        self._queue = WaitingQueue()
        self._next_order = 0
        self._only: frozenset[SeqKey] | None = None
        self.steps_ahead = limits.run_ahead
        """So many are enough; more than `limits.run_ahead` are never published."""
        self.masks_wanted: list[Sequence] = []
        """With a grammar and a new token since; whoever makes masks empties this."""
        self._start(generation)

    def _start(self, generation: int) -> None:
        self.generation = generation
        self._step = 1
        self._tables = BlockTables(self.limits, self.counters)
        self._batch = Batch(self.limits.graph_sizes)
        self.in_flight = StepsInFlight()
        self._watched = WatchedIds()
        self._answers = AnswerReader(
            generation, self.limits, self.in_flight, self._watched, self.counters
        )
        self._prefills = Prefills(self.limits, self._tables, self._queue, self._clock)
        self._due = DecodeDue(self.limits.block_size)

    # ------------------------------------------------------------ arrivals and departures

    def add(self, seq: Sequence) -> list[SequenceUpdate]:
        """As `add_all` with one sequence."""
        return self.add_all([seq])

    def add_all(self, seqs: list[Sequence]) -> list[SequenceUpdate]:
        """Puts the samples of a request into the queue, all or none.

        Returns the updates of those that end at once (no token wanted, or resumed complete).
        Raises InvalidRequestError or OverloadedError, and then nothing has changed."""
        keys = {seq.key for seq in seqs}
        if len(keys) != len(seqs) or any(key in self._seqs for key in keys):
            raise InvalidRequestError("The request id is in use by a request that still runs.")
        for seq in seqs:
            prepare(seq, self.limits)
        ends = [finish_on_arrival(seq) for seq in seqs]
        self._check_queue(ends.count(None))
        updates = []
        for seq, end in zip(seqs, ends, strict=True):
            seq.order = self._next_order
            self._next_order += 1
            if end is None:
                self._seqs[seq.key] = seq
                self._queue.append(seq)
            else:
                seq.state = SequenceState.FINISHED
                self.counters.ended[end[0]] += 1
                updates.append(SequenceUpdate(seq, finish_reason=end[0], stop_reason=end[1]))
        return updates

    def _check_queue(self, arriving: int) -> None:
        bound = self.limits.max_num_queued_requests
        seats = self.limits.max_rows - len(self._batch)
        if arriving and len(self._queue) + arriving > bound + seats:
            raise OverloadedError(
                f"{len(self._queue)} requests wait already (at most {bound} may, see "
                "--max-num-queued-requests); try again later."
            )

    def cancel(self, key: SeqKey, reason: str = "cancelled") -> bool:
        """Ends a sequence from outside (client gone, timeout, stop string found in its text).

        Its row is gone with the next plan, its blocks are free once no step under way can write to
        them. No update is given. False when there is no such sequence (any more)."""
        seq = self._seqs.get(key)
        if seq is None:
            return False
        self._finish(seq, reason)
        return True

    def _finish(self, seq: Sequence, reason: str) -> None:
        if seq.state is SequenceState.WAITING:
            self._queue.remove(seq)
        else:
            last = self._step - 1 if seq.row >= 0 else seq.last_step
            self._close_table(seq, last, trusted=reason != "error")
            self._watched.remove(seq)
            if seq.row >= 0:
                self._drop_row(seq)
        seq.state = SequenceState.FINISHED
        del self._seqs[seq.key]
        self.counters.ended[reason] += 1

    def _close_table(self, seq: Sequence, last: int, trusted: bool = True) -> None:
        """Lets go of the blocks of `seq`, which takes part in steps up to `last`."""
        blocks = self._tables.close(seq, trusted)
        oldest = self.in_flight.oldest
        if oldest is not None and last >= oldest.step:
            self.in_flight.hold(blocks, self._step - 1)
        else:
            self._tables.pool.release(blocks)

    def _drop_row(self, seq: Sequence) -> None:
        if seq.state is SequenceState.DECODE:
            self._due.drop(seq)
        elif seq.state is SequenceState.PREFILL:
            self._prefills.active.remove(seq)
        self._batch.leave(seq)

    # ------------------------------------------------------------ planning

    def plan(self, records_graph: bool = False) -> StepPlan | None:
        """The next step, to be published in this order; `records_graph`: a graph is recorded before
        it, and it may have no rows. None: nothing runs or waits, or answers come first."""
        full = len(self.in_flight) >= self._window()
        if full or not self._clear_rows() or not self._make_room():
            return None
        batch = self._batch
        grown = self._due.growing(self._step)
        if grown:
            self._tables.grow(grown)
        chunks: list[PlannedChunk] = []
        entering: list[Sequence] = []
        if self._prefills.active or self._queue:
            budget = self.limits.max_num_batched_tokens - batch.num_decode
            chunks = self._prefills.continue_chunks(budget)
            budget -= sum(chunk.size for chunk in chunks)
            admitted = self._prefills.admit(budget, len(batch), self._only)
            entering = [chunk.seq for chunk in admitted]
            chunks += admitted
        if not (batch.num_decode or chunks or records_graph):
            return None
        moves = batch.settle(entering)
        step = StepRecord(self._step, batch.decode, chunks, batch.decode, grown)
        step.records_graph = records_graph
        if chunks:
            step.sampled += tuple(chunk.seq for chunk in chunks if chunk.sample)
            self.counters.prompt_tokens += sum(chunk.size for chunk in chunks)
        if batch.num_with_grammar:
            step.with_grammar = tuple(s for s in step.sampled if s.grammar is not None)
        for seq in entering:
            self._watched.add(seq)
        check = bool(self.limits.check_every) and self._step % self.limits.check_every == 0
        plan = build_plan(self.generation, step, batch, entering, moves, check)
        self._advance(step)
        return plan

    def _window(self) -> int:
        if (
            self._queue
            or self._prefills.active
            or self._batch.num_needing_answer
            or self.in_flight.holds_blocks
        ):
            return min(WINDOW, self.limits.run_ahead)
        return min(self.steps_ahead, self.limits.run_ahead)

    def _make_room(self) -> bool:
        """Sees to a block for every decode row that begins one; False: answers must come first.

        The youngest sequences give way. Only with nothing under way: then all their tokens are
        known and their blocks are free at once."""
        while self._due.num_growing(self._step) > self._tables.pool.num_free:
            if not self.preempt_youngest():
                return False
        return True

    def _clear_rows(self) -> bool:
        """Takes out the rows that `admit_only` excludes; False: answers must come first."""
        if self._only is None:
            return True
        while any(seq.key not in self._only for seq in self._batch.sequences()):
            if not self.preempt_youngest():
                return False
        return True

    def preempt_youngest(self) -> bool:
        """Puts the sequence that arrived last among the rows back into the queue, tokens kept.

        False, and nothing changed, while steps are under way or when there is no row."""
        if self.in_flight or not len(self._batch):
            return False
        seq = max(self._batch.sequences(), key=lambda s: s.order)
        self._close_table(seq, last=0)
        self._watched.remove(seq)
        self._drop_row(seq)
        seq.return_to_queue()
        seq.num_preemptions += 1
        self.counters.preemptions += 1
        self._queue.put_back(seq)
        return True

    def _advance(self, record: StepRecord) -> None:
        """What is known of later steps once `record` is published."""
        step = record.step
        self._step += 1
        self.counters.steps += 1
        self.in_flight.publish(record)
        for seq in self._due.ends.take(step):
            self._end(seq, record)
        for chunk in record.chunks:
            if chunk.last:
                self._end_prefill(chunk.seq, record)
        for seq in record.with_grammar:
            if seq.state is SequenceState.DECODE:
                self._due.drop(seq)
                self._batch.hold(seq)

    def _end_prefill(self, seq: Sequence, record: StepRecord) -> None:
        to_sample = seq.total_len - len(seq.tokens) - 1  # after the one of this step
        if to_sample <= 0:
            self._end(seq, record)
            return
        self._prefills.active.remove(seq)
        self._batch.start_decode(seq)
        self._due.start(seq, record.step, to_sample)

    def _end(self, seq: Sequence, record: StepRecord) -> None:
        """`record` computes the last that is wanted of `seq`; the next plan is without it."""
        self._drop_row(seq)
        seq.state = SequenceState.ENDING
        seq.last_step = record.step
        record.ending.append(seq)

    # ------------------------------------------------------------ answers

    def commit_all(self, answers: list[Answer]) -> Iterator[SteadyTokens | list[SequenceUpdate]]:
        """Takes the answers to the oldest steps under way, in order; nothing is taken beyond what
        was asked for. What it gives is one step's, or that of several steady ones.

        Raises WorkerFailedError as `commit` does; what was given before then holds."""
        at = 0
        while at < len(answers):
            steady = self._answers.take_steady(answers[at:])
            yield self.commit(answers[at]) if steady is None else steady
            at += 1 if steady is None else steady.num_steps

    def commit(self, answer: Answer) -> list[SequenceUpdate]:
        """Takes the answer to the oldest step under way.

        Raises WorkerFailedError when it is not that answer; the workers must then be replaced."""
        record, updates = self._answers.take(answer)
        for update in updates:
            if update.finish_reason is not None:
                self._finish(update.seq, update.finish_reason)
        for blocks in self.in_flight.releasable(record.step):
            self._tables.pool.release(blocks)
        for seq in record.with_grammar:
            if seq.is_alive:
                seq.mask = None
                self.masks_wanted.append(seq)
        return updates

    # ------------------------------------------------------------ grammars

    def allow(self, seq: Sequence, mask: TokenMask) -> None:
        """What the next token of `seq` may be; it takes part in the next step. It may have ended
        meanwhile."""
        if self._seqs.get(seq.key) is not seq:
            return
        seq.mask = mask
        if seq.state is SequenceState.HELD:
            self._batch.start_decode(seq)
            self._due.resume(seq, self._step, seq.total_len - len(seq.tokens))

    def complete(self, seq: Sequence) -> list[SequenceUpdate]:
        """Nothing may follow the text of `seq`, which ends so; no update when it has ended."""
        if self._seqs.get(seq.key) is not seq:
            return []
        self._finish(seq, "stop")
        return [SequenceUpdate(seq, finish_reason="stop")]

    # ------------------------------------------------------------ recovery

    def reset(self, generation: int, limits: SchedulerLimits | None = None) -> list[SequenceUpdate]:
        """The workers were replaced: their KV cache is empty and nothing is under way.

        Every sequence goes back into the queue at its old place with all tokens that were
        answered; the next plan is step 1 of `generation`. `limits` are those of the new workers;
        the updates returned end sequences that no longer fit."""
        self.limits = limits or self.limits
        self._start(generation)
        for seq in self._seqs.values():
            seq.return_to_queue()
        self._queue.replace(self._seqs.values())
        ends = [fit_again(seq, self.limits) for seq in self._queue]
        updates = [update for update in ends if update is not None]
        for update in updates:
            self._finish(update.seq, update.finish_reason or "")
        return updates

    def admit_only(self, keys: Iterable[SeqKey] | None) -> None:
        """Until called with None, only these sequences run; others are put back into the queue.
        For replaying suspected requests alone."""
        self._only = None if keys is None else frozenset(keys)

    # ------------------------------------------------------------ what others may see

    @property
    def has_work(self) -> bool:
        """Whether any sequence waits or runs."""
        return bool(self._seqs)

    @property
    def is_idle(self) -> bool:
        """Nothing waits, runs or is under way."""
        return not self._seqs and not self.in_flight

    @property
    def has_spare_work(self) -> bool:
        """Whether there is something for `do_spare_work` to do."""
        return self._tables.has_late

    def do_spare_work(self) -> None:
        """A little of what would cost a step more later: to be called while nothing else is due."""
        self._tables.offer_late()

    @property
    def next_step(self) -> int:
        """The number the next plan will have."""
        return self._step

    def find(self, key: SeqKey) -> Sequence | None:
        """A sequence that waits or runs."""
        return self._seqs.get(key)

    def stats(self) -> SchedulerStats:
        pool = self._tables.pool
        return SchedulerStats(
            running=len(self._seqs) - len(self._queue),
            waiting=len(self._queue),
            steps_in_flight=len(self.in_flight),
            blocks_total=pool.num_blocks,
            blocks_used=pool.num_blocks - pool.num_free,
            blocks_free=pool.num_free,
            blocks_cached=pool.num_cached,
            counters=self.counters,
        )

    def check_invariants(self) -> None:
        """Every block is where it should be. Constant time when idle, so that production can ask
        then; all blocks and tables otherwise. Raises TPRuntimeError."""
        pool = self._tables.pool
        if self.is_idle:
            pool.check_idle()
            kept = (self._batch, self._due, self._tables, self._prefills.active)
            if any(kept) or self._watched.num_users:
                raise TPRuntimeError("The scheduler still keeps rows though nothing runs.")
        else:
            tables = [seq.blocks for seq in self._seqs.values()]
            pool.check_invariants(tables + self.in_flight.held_tables())
