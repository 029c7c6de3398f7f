"""When the workers are asked to record what they put off."""

from __future__ import annotations

from tests.coordinator.driving import Drive, check_outputs, make_limits, make_seq
from tp_runtime.coordinator.activity import ActivityLog
from tp_runtime.coordinator.graph_recording import (
    BUSY_S,
    IDLE_S,
    MOST_CRASHES,
    GraphRecording,
)
from tp_runtime.coordinator.metrics import Metrics
from tp_runtime.coordinator.steps_in_flight import StepRecord


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_nothing_is_due_before_ready_and_after_the_last() -> None:
    clock = Clock()
    recording = GraphRecording(clock)
    clock.now += 10
    assert not recording.due(has_work=False, is_idle=True)
    recording.begin(1)
    clock.now += IDLE_S
    assert recording.due(has_work=False, is_idle=True)
    recording.asked()
    clock.now += 10
    assert not recording.due(has_work=False, is_idle=True)
    assert not recording.due(has_work=True, is_idle=False)


def test_an_idle_server_records_one_after_the_other() -> None:
    clock = Clock()
    recording = GraphRecording(clock)
    recording.begin(3)
    assert not recording.due(has_work=False, is_idle=True)
    clock.now += IDLE_S
    for left in (2, 1, 0):
        assert recording.due(has_work=False, is_idle=True)
        recording.asked()
        assert recording.left == left
        assert not recording.due(has_work=False, is_idle=False)  # that one is under way


def test_requests_put_it_off() -> None:
    clock = Clock()
    recording = GraphRecording(clock)
    recording.begin(3)
    clock.now += BUSY_S - 0.01
    assert not recording.due(has_work=True, is_idle=False)
    clock.now += 0.005
    assert not recording.due(has_work=False, is_idle=True)
    clock.now += IDLE_S
    assert recording.due(has_work=False, is_idle=True)


def test_a_busy_server_records_one_at_a_time() -> None:
    clock = Clock()
    recording = GraphRecording(clock)
    recording.begin(2)
    clock.now += BUSY_S
    assert recording.due(has_work=True, is_idle=False)
    recording.asked()
    clock.now += BUSY_S / 2
    assert not recording.due(has_work=True, is_idle=False)
    clock.now += BUSY_S / 2
    assert recording.due(has_work=True, is_idle=False)


def test_steps_that_record_disturb_nobody() -> None:
    drive = Drive(make_limits(run_ahead=4, graph_sizes=(1, 2, 4)))
    plan = drive.plan(records_graph=True)
    assert plan is not None
    assert (plan.records_graph, plan.num_rows, plan.num_decode) == (True, 0, 0)
    assert not drive.scheduler.is_idle
    assert drive.plan() is None
    drive.commit()
    assert drive.scheduler.is_idle
    drive.add(make_seq("a", 5, 20), make_seq("b", 9, 12))
    while drive.scheduler.has_work:
        plan = drive.plan(records_graph=True)
        assert plan is None or plan.records_graph
        drive.commit()
    drive.run()
    check_outputs(drive)
    assert drive.ends


def test_workers_that_die_of_it_go_on_with_what_they_have() -> None:
    clock = Clock()
    recording = GraphRecording(clock)
    for crash in range(MOST_CRASHES):
        recording.begin(5)
        assert recording.left == 5, crash
        recording.crashed()
    recording.begin(5)
    clock.now += 10
    assert not recording.due(has_work=False, is_idle=True)
    assert not recording.due(has_work=True, is_idle=False)


def test_a_step_that_records_is_neither_steady_nor_slow() -> None:
    drive = Drive(make_limits(run_ahead=4))
    drive.add(make_seq("a", 5, 12, ignore_eos=True))
    drive.plan()
    assert drive.scheduler.in_flight.num_recording == 0
    drive.plan(records_graph=True)
    assert drive.scheduler.in_flight.num_recording == 1
    prefill, recorded = drive.scheduler.in_flight
    assert (recorded.records_graph, recorded.is_steady) == (True, False)
    activity, metrics = ActivityLog(), Metrics()
    for record in (prefill, recorded):
        activity.answered(record, 0, 10**9)
        metrics.answered(record, 0, 10**9, 10**9)
    assert [step.step for step in activity.snapshot([]).slow_steps] == [prefill.step]
    assert metrics.wait.count == 1
    drive.run()
    check_outputs(drive)


def test_a_steady_step_is_one_that_records_nothing() -> None:
    seqs = (make_seq("a"),)
    assert StepRecord(1, seqs, [], seqs, []).is_steady
    assert not StepRecord(1, seqs, [], seqs, [], records_graph=True).is_steady
