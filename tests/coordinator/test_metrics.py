"""Histograms and counters of the coordinator, and the line about the load."""

from __future__ import annotations

import re

import pytest

from tests.coordinator.driving import make_limits, make_seq
from tp_runtime.coordinator.load_log import INTERVAL_S, LoadLog
from tp_runtime.coordinator.metrics import Histogram, Metrics
from tp_runtime.coordinator.null_worker import NullWorker
from tp_runtime.coordinator.recovery_clock import RecoveryClock
from tp_runtime.coordinator.scheduler import Scheduler
from tp_runtime.coordinator.scheduler_stats import SchedulerCounters, SchedulerStats
from tp_runtime.messages import StepPlan

SECOND = 1_000_000_000


def answer(scheduler: Scheduler, metrics: Metrics, plan: StepPlan, received: int) -> None:
    """As the engine does it: 1 ms under way, 0.1 ms to take the answer."""
    (record,) = scheduler.in_flight.oldest_steps(1)
    updates = scheduler.commit(NullWorker().answer(plan))
    metrics.ended([update for update in updates if update.finish_reason is not None], received)
    metrics.answered(record, received - SECOND // 1000, received, received + SECOND // 10_000)


def test_buckets_are_cumulative_and_a_bound_belongs_to_its_own_bucket():
    histogram = Histogram("x_seconds", (0.1, 1.0))
    for value, times in ((0.1, 1), (0.5, 3), (7.0, 1)):
        histogram.observe(value, times)
    assert dict(histogram.samples()) == {
        'x_seconds_bucket{le="0.1"}': 1.0,
        'x_seconds_bucket{le="1"}': 4.0,
        'x_seconds_bucket{le="+Inf"}': 5.0,
        "x_seconds_sum": pytest.approx(8.6),
        "x_seconds_count": 5.0,
    }


def test_first_tokens_and_the_times_between_tokens_are_counted_once_each():
    scheduler, metrics = Scheduler(make_limits(run_ahead=1)), Metrics()
    for name in ("a", "b"):
        seq = make_seq(name, max_tokens=4, ignore_eos=True)
        seq.arrival = 0.5
        scheduler.add(seq)
    now = SECOND
    while (plan := scheduler.plan()) is not None:
        answer(scheduler, metrics, plan, now)
        now += SECOND // 100
    samples = metrics.samples(scheduler.stats(), RecoveryClock())
    assert samples["time_to_first_token_seconds_count"] == 2
    assert samples["time_to_first_token_seconds_sum"] == pytest.approx(1.0)
    assert samples["inter_token_latency_seconds_count"] == 2 * 3
    assert samples["inter_token_latency_seconds_sum"] == pytest.approx(6 * 0.01)
    assert samples["e2e_request_latency_seconds_count"] == 2
    assert samples["step_wait_seconds_sum"] == pytest.approx(4 * 0.001)
    assert samples["step_post_process_seconds_sum"] == pytest.approx(4 * 0.0001)
    assert samples["generation_tokens_total"] == 8
    assert samples['request_success_total{finished_reason="length"}'] == 2
    assert samples["num_requests_running"] == samples["num_requests_waiting"] == 0


def test_the_pause_of_a_recovery_is_no_time_between_tokens():
    scheduler, metrics = Scheduler(make_limits(run_ahead=1)), Metrics()
    scheduler.add(make_seq("a", max_tokens=4, ignore_eos=True))
    for received in (SECOND, 2 * SECOND):
        plan = scheduler.plan()
        assert plan is not None
        answer(scheduler, metrics, plan, received)
        metrics.interrupted()
    assert metrics.inter_token.count == 0


def stats(counters: SchedulerCounters, running: int) -> SchedulerStats:
    return SchedulerStats(running, 3, 2, 200, 50, 150, 10, counters)


def test_the_load_is_told_every_ten_seconds_and_only_while_there_is_work():
    lines: list[str] = []
    log, counters = LoadLog(lines.append), SchedulerCounters()
    log.turn(100.0, stats(counters, 2))
    log.turn(100.0 + INTERVAL_S / 2, stats(counters, 2))
    assert lines == []
    counters.prompt_tokens, counters.generated_tokens = 50, 1000
    counters.prefix_queries, counters.prefix_hits = 80, 20
    log.turn(100.0 + INTERVAL_S, stats(counters, 2))
    assert len(lines) == 1
    numbers = re.findall(r"[\d.]+", lines[0])
    assert numbers == ["2", "3", "5.0", "100.0", "25.0", "25.0"]
    idle = SchedulerStats(0, 0, 0, 200, 0, 200, 10, counters)
    for turn in range(2, 5):
        log.turn(100.0 + turn * INTERVAL_S, idle)
    assert len(lines) == 1
