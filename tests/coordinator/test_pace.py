"""How many steps are published ahead follows from how long they take."""

from __future__ import annotations

import pytest

from tests.coordinator.driving import Drive, make_limits, make_seq
from tp_runtime.coordinator.pace import StepPace

MS = 1_000_000


def after(step_ms: float, turns: int = 40, together: int = 1) -> StepPace:
    """Answers that came so many at a time."""
    pace = StepPace()
    for turn in range(turns):
        pace.answered(together, True, True, int(turn * together * step_ms * MS))
    return pace


@pytest.mark.parametrize(
    ("step_ms", "ahead"), [(0.5, 8), (1.0, 8), (2.6, 5), (4.4, 4), (5.5, 3), (8.0, 3), (200.0, 2)]
)
@pytest.mark.parametrize("together", [1, 3])
def test_short_steps_need_many_ahead_and_long_ones_few(
    step_ms: float, ahead: int, together: int
) -> None:
    assert after(step_ms, together=together).steps_ahead(2, 8) == ahead


def test_nothing_is_known_at_first_and_after_a_restart() -> None:
    pace = StepPace()
    assert pace.steps_ahead(2, 8) == 8
    pace.answered(1, True, True, 5 * MS)
    assert pace.steps_ahead(2, 8) == 8
    pace = after(20.0)
    pace.forget()
    assert pace.steps_ahead(2, 8) == 8


def test_bounds_are_kept() -> None:
    assert after(0.01).steps_ahead(2, 4) == 4
    assert after(500.0).steps_ahead(2, 8) == 2
    assert after(5.0).steps_ahead(1, 1) == 1


def test_steps_with_prompts_and_the_pauses_before_them_do_not_count() -> None:
    pace = after(1.0)
    last = 40 * MS
    for _ in range(20):
        last += 400 * MS
        pace.answered(1, False, True, last)
    assert pace.steps_ahead(2, 8) == 8
    pace.answered(1, True, True, last + 1 * MS)
    assert pace.steps_ahead(2, 8) == 8


def test_a_new_pace_is_learnt_within_a_few_steps() -> None:
    pace, last = after(1.0), 40 * MS
    for _ in range(20):
        last += 50 * MS
        pace.answered(1, True, True, last)
    assert pace.steps_ahead(2, 8) == 2


def test_nothing_answered_is_no_measurement() -> None:
    pace = after(20.0)
    pace.answered(0, True, True, 1_000_000 * MS)
    pace.answered(1, True, True, 40 * 20 * MS)
    assert pace.steps_ahead(2, 8) == 2


@pytest.mark.parametrize(("step_ms", "turn_ms"), [(2.5, 20), (1.0, 20), (1.0, 6), (4.0, 18)])
def test_a_coordinator_that_comes_late_is_not_taken_for_long_steps(
    step_ms: float, turn_ms: float
) -> None:
    """It reads and publishes only so often; as many steps are done as with eight always ahead."""

    def steps_done(most: int, pace: StepPace | None) -> int:
        ahead, under_way, free_at, done = most, 0, 0.0, 0
        finishes: list[float] = []
        for turn in range(1, 200):
            now = turn * turn_ms
            ready = [finish for finish in finishes if finish <= now]
            finishes = finishes[len(ready) :]
            under_way -= len(ready)
            done += len(ready)
            if pace is not None and ready:
                pace.answered(len(ready), True, under_way > 0, int(now * MS))
                ahead = pace.steps_ahead(2, most)
            while under_way < ahead:
                free_at = max(free_at, now) + step_ms
                finishes.append(free_at)
                under_way += 1
        return done

    assert steps_done(8, StepPace()) >= 0.95 * steps_done(8, None)


def test_the_scheduler_publishes_no_more_than_that_and_never_more_than_it_may() -> None:
    drive = Drive(make_limits(run_ahead=8, max_model_len=200, num_blocks=200))
    drive.add(make_seq("a", 3, 150))
    drive.fill_window()
    for ahead, expected in ((3, 3), (8, 8), (50, 8)):
        drive.commit(len(drive.under_way))
        drive.scheduler.steps_ahead = ahead
        assert drive.fill_window() == expected
