"""What the status page is told: the slowest steps, and causes rather than echoes."""

from __future__ import annotations

import os

import pytest

from tp_runtime.coordinator import activity
from tp_runtime.coordinator.activity import NUM_SLOW_STEPS, ActivityLog, resident_bytes
from tp_runtime.coordinator.failure import Failure
from tp_runtime.coordinator.steps_in_flight import StepRecord


def record(step: int) -> StepRecord:
    return StepRecord(step, (), [], (), [])


def test_the_slowest_steps_are_kept_the_slowest_first():
    log = ActivityLog()
    for step in range(1, 101):
        milliseconds = (step * 37) % 101  # every value once, in no order
        log.answered(record(step), 0, milliseconds * 1_000_000)
    seconds = [step.seconds for step in log.snapshot([]).slow_steps]
    assert seconds == pytest.approx([(100 - i) / 1000 for i in range(NUM_SLOW_STEPS)])


def test_steps_are_forgotten_after_two_windows(monkeypatch):
    now = 1000.0
    monkeypatch.setattr(activity.time, "monotonic", lambda: now)
    log = ActivityLog()
    log.answered(record(1), 0, 5_000_000_000)
    for expected in ([1], [1], []):
        assert [step.step for step in log.snapshot([]).slow_steps] == expected
        now += activity.WINDOW_S + 1
    assert log.snapshot([]).slow_steps == []


def test_a_restart_names_the_cause_that_was_reported_after_its_echo():
    log = ActivityLog()
    failures = [Failure.raised(1, "run", 7, "gloo: Connection reset by peer", "")]
    log.failed(failures)
    failures.append(Failure.exited(0, "run", 7, -9))
    log.ready()
    (restart,) = log.snapshot([]).restarts
    assert "SIGKILL" in restart.cause
    log.ready()
    assert len(log.snapshot([]).restarts) == 1


def test_memory_is_that_of_the_process():
    assert resident_bytes(os.getpid()) > 10 << 20
    assert resident_bytes(2**22 + 1) == 0
