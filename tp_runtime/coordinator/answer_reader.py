"""Takes answers for the scheduler: tokens to their sequences, and counted.

What an answer means is read by `answers`; who ends with it is the scheduler's to act on.
"""

from __future__ import annotations

from tp_runtime.coordinator.answers import check_answer, count_steady, read_answer, take_steady
from tp_runtime.coordinator.limits import SchedulerLimits
from tp_runtime.coordinator.scheduler_stats import SchedulerCounters
from tp_runtime.coordinator.sequence import SequenceUpdate, SteadyTokens
from tp_runtime.coordinator.steps_in_flight import StepRecord, StepsInFlight
from tp_runtime.coordinator.watched_ids import WatchedIds
from tp_runtime.messages import Answer


class AnswerReader:
    """Of one generation of workers."""

    def __init__(
        self,
        generation: int,
        limits: SchedulerLimits,
        in_flight: StepsInFlight,
        watched: WatchedIds,
        counters: SchedulerCounters,
    ) -> None:
        self._generation = generation
        self._vocab_size = limits.vocab_size
        self._in_flight = in_flight
        self._watched = watched
        self._counters = counters

    def take_steady(self, answers: list[Answer]) -> SteadyTokens | None:
        """As many of the first answers as are steady; None: the first one is not."""
        in_flight = self._in_flight
        if in_flight.holds_blocks:  # some of the rows may have ended
            return None
        number = count_steady(answers, in_flight, self._generation, self._vocab_size, self._watched)
        if not number:
            return None
        steady = take_steady(answers[:number], in_flight.rows)
        for _ in range(number):
            in_flight.answered()
        self._counters.generated_tokens += number * len(steady.rows)
        return steady

    def take(self, answer: Answer) -> tuple[StepRecord, list[SequenceUpdate]]:
        """The answer to the oldest step under way. Raises WorkerFailedError when it is not that;
        nothing has changed then."""
        record = self._in_flight.oldest
        ids = check_answer(answer, record, self._generation, self._vocab_size)
        assert record is not None  # checked above
        updates = read_answer(answer, ids, record, self._watched, self._in_flight.holds_blocks)
        self._in_flight.answered()
        tokens = sum(update.token_id >= 0 for update in updates)
        self._counters.generated_tokens += tokens
        self._counters.dropped_tokens += len(ids) - tokens
        return record, updates
