"""What the coordinator measures: histograms beside the scheduler's counters.

Names are those of vLLM behind its prefix, so that dashboards need one change; values leave as the
samples of Prometheus' text format, a flat mapping. Times are seconds. Nothing is known here of how
they are exported.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator

from tp_runtime.coordinator.recovery_clock import RecoveryClock
from tp_runtime.coordinator.scheduler_stats import SchedulerStats
from tp_runtime.coordinator.sequence import SequenceUpdate
from tp_runtime.coordinator.steps_in_flight import StepRecord

# fmt: off
_LONG = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5,
         10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0)
"""Of what a request waits for: vLLM's bounds for the time to the first token."""
_TOKEN = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3,
          0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0)
_STEP = (2e-5, 5e-5, 1e-4, 2e-4, 3e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1, 0.5, 1.0)
_BYTES = (64.0, 256.0, 1024.0, 4096.0, 16384.0, 65536.0, 262144.0)
# fmt: on
_NS = 1e-9


class Histogram:
    """Cumulative as Prometheus has them, counted per bucket until asked for."""

    def __init__(self, name: str, bounds: tuple[float, ...]) -> None:
        self.name = name
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += times
        self.sum += value * times

    @property
    def count(self) -> int:
        return sum(self._counts)

    def samples(self) -> Iterator[tuple[str, float]]:
        """`NAME_bucket{le="..."}`, `NAME_sum`, `NAME_count`."""
        total = 0
        for bound, count in zip(self._bounds, self._counts, strict=False):
            total += count
            yield f'{self.name}_bucket{{le="{bound:g}"}}', float(total)
        total += self._counts[-1]
        yield f'{self.name}_bucket{{le="+Inf"}}', float(total)
        yield f"{self.name}_sum", self.sum
        yield f"{self.name}_count", float(total)


class Metrics:
    """Written by the engine thread alone."""

    def __init__(self) -> None:
        self.first_token = Histogram("time_to_first_token_seconds", _LONG)
        self.inter_token = Histogram("inter_token_latency_seconds", _TOKEN)
        self.latency = Histogram("e2e_request_latency_seconds", _LONG)
        self.queue = Histogram("request_queue_time_seconds", _LONG)
        self.plan = Histogram("step_plan_seconds", _STEP)
        self.publish = Histogram("step_publish_seconds", _STEP)
        self.wait = Histogram("step_wait_seconds", _STEP)
        self.post_process = Histogram("step_post_process_seconds", _STEP)
        self.plan_bytes = Histogram("step_plan_bytes", _BYTES)
        self._last_received = 0

    @property
    def histograms(self) -> tuple[Histogram, ...]:
        return (
            *(self.first_token, self.inter_token, self.latency, self.queue),
            *(self.plan, self.publish, self.wait, self.post_process, self.plan_bytes),
        )

    def published(self, size: int, started: int, planned: int, published: int) -> None:
        """A plan of `size` bytes; times in nanoseconds of CLOCK_MONOTONIC."""
        self.plan_bytes.observe(size)
        self.plan.observe((planned - started) * _NS)
        self.publish.observe((published - planned) * _NS)

    def answered(self, record: StepRecord, published: int, received: int, done: int) -> None:
        """The answer to `record` was taken."""
        if not record.records_graph:
            self.wait.observe((received - published) * _NS)
        self.post_process.observe((done - received) * _NS)
        if record.decode and self._last_received:
            # A decode row runs in every step, so its last token came with the last answer.
            self.inter_token.observe((received - self._last_received) * _NS, len(record.decode))
        self._last_received = received
        for chunk in record.chunks:
            seq = chunk.seq
            if chunk.sample and seq.num_generated == 1:
                self.first_token.observe(received * _NS - seq.arrival)
                self.queue.observe(max(0.0, seq.admitted_at - seq.arrival))

    def interrupted(self) -> None:
        """Workers were replaced: the next answer follows no other."""
        self._last_received = 0

    def ended(self, updates: list[SequenceUpdate], now: int) -> None:
        """These samples are over."""
        for update in updates:
            self.latency.observe(now * _NS - update.seq.arrival)

    def samples(self, stats: SchedulerStats, recovery: RecoveryClock) -> dict[str, float]:
        """Everything, by sample name."""
        counters = stats.counters
        usage = stats.blocks_used / stats.blocks_total if stats.blocks_total else 0.0
        samples = {
            "num_requests_running": float(stats.running),
            "num_requests_waiting": float(stats.waiting),
            "kv_cache_usage_perc": usage,
            "prefix_cache_queries_total": float(counters.prefix_queries),
            "prefix_cache_hits_total": float(counters.prefix_hits),
            "prompt_tokens_total": float(counters.prompt_tokens),
            "generation_tokens_total": float(counters.generated_tokens),
            "num_preemptions_total": float(counters.preemptions),
        }
        for reason, count in counters.ended.items():
            samples[f'request_success_total{{finished_reason="{reason}"}}'] = float(count)
        samples["recoveries_total"] = float(recovery.recoveries)
        for part, seconds in recovery.seconds.items():
            samples[f'recovery_seconds_total{{part="{part.value}"}}'] = seconds
        for histogram in self.histograms:
            samples.update(histogram.samples())
        return samples
