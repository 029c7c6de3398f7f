"""The parts of a recovery: all there, and they add up to the whole."""

from __future__ import annotations

import pytest

from tests.coordinator.fake_keepers import GroupUnderTest
from tp_runtime.coordinator.group_events import GroupState
from tp_runtime.coordinator.recovery_clock import Part, RecoveryClock, in_words
from tp_runtime.coordinator.restart_limit import RestartLimit
from tp_runtime.transport.heartbeat import Phase


class Time:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_every_second_belongs_to_exactly_one_part():
    time = Time()
    clock = RecoveryClock(time)
    clock.failed(0.5)
    for part, seconds in ((Part.FORK, 1.0), (Part.LOAD, 0.25), (Part.PREFILL, 2.0)):
        time.now += seconds
        clock.enter(part)
    time.now += 4.0
    parts = clock.over()
    assert parts == {"detect": 0.5, "kill": 1.0, "fork": 0.25, "load": 2.0, "re-prefill": 4.0}
    assert in_words(parts).startswith("Recovered in 7.750 s: detect 0.500, kill 1.000, fork")
    assert not clock.running


def test_a_failure_during_a_recovery_is_part_of_it():
    time = Time()
    clock = RecoveryClock(time)
    for _ in range(2):  # killed, forked, and again before they are loaded
        clock.failed(9.0)
        time.now += 1.0
        clock.enter(Part.FORK)
        time.now += 0.5
        clock.enter(Part.LOAD)
        time.now += 0.25
    parts = clock.over()
    assert parts == {"detect": 9.0, "kill": 2.0, "fork": 1.0, "load": 0.5, "re-prefill": 0.0}
    assert clock.recoveries == 1


def test_what_ended_adds_up_and_what_is_outside_does_not_count():
    time = Time()
    clock = RecoveryClock(time)
    clock.enter(Part.LOAD)  # the first start
    time.now += 50.0
    for _ in range(3):
        clock.failed(0.0)
        time.now += 1.0
        clock.over()
    assert clock.recoveries == 3
    assert sum(clock.seconds.values()) == clock.seconds[Part.KILL] == 3.0


def test_restarts_count_within_the_window_only():
    time = Time()
    limit = RestartLimit(2, 10.0, time)
    assert [limit.take() for _ in range(3)] == [True, True, False]
    time.now += 11.0
    assert limit.take()
    assert limit.used == 1
    limit.forgive()
    assert limit.take() and limit.take() and not limit.take()


@pytest.fixture
def under(tmp_path):
    group = GroupUnderTest(tmp_path)
    yield group
    group.close()


def test_the_group_sees_every_part(under):
    under.start()
    clock = under.group.recovery
    assert not clock.running
    under.keepers[1].beat(7, Phase.RUN)
    under.keepers[1].exit(-9)
    under.killed([0])
    under.until(lambda: under.group.state is GroupState.STARTING)
    for keeper in under.keepers:
        under.until(lambda keeper=keeper: keeper.next() is not None and keeper.generation == 2)
    under.become_ready()
    parts = clock.over()
    assert all(seconds > 0.0 for seconds in parts.values()), parts
    assert sum(parts.values()) < 5.0


def test_nobody_is_waited_for_when_all_workers_have_ended(under, monkeypatch):
    """A killed rank takes the other along; then there is nothing more to be reported."""
    monkeypatch.setattr("tp_runtime.coordinator.worker_group.GRACE_S", 60.0)
    under.start()
    under.keepers[1].exit(-9)
    under.keepers[0].raise_error("[gloo] Connection closed by peer")
    under.keepers[0].exit(1)
    under.until(lambda: under.group.restarts == 1)
    assert under.events.causes[0].rank == 1
