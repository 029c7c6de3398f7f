"""Workers that compute nothing: every sampled id is the same, and the answer is there at once.

With them the scheduler's own time can be measured, without a model and without processes. The
`coordinator` benchmark and the tests' figures come from `measure_scheduler`.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections import deque

from tp_runtime.coordinator.limits import SchedulerLimits
from tp_runtime.coordinator.scheduler import Scheduler
from tp_runtime.coordinator.sequence import SeqKey, Sequence
from tp_runtime.messages import Answer, StepPlan, encode, pack_ids
from tp_runtime.sampling_params import SamplingParams


class NullWorker:
    """Answers plans; `token_id` for every row."""

    def __init__(self, token_id: int = 7) -> None:
        self._id = pack_ids([token_id])

    def answer(self, plan: StepPlan) -> Answer:
        sampled = plan.num_decode + sum(chunk.sample for chunk in plan.chunks)
        return Answer(plan.generation, plan.step, self._id * sampled)


@dataclasses.dataclass(frozen=True)
class SchedulerTimes:
    """Microseconds per steady step, medians; `plan` with the encoding of its message. Bytes of the
    message and blocks given out in the largest and in the last step."""

    rows: int
    context: int
    run_ahead: int
    steps: int
    plan_us: float
    commit_us: float
    p99_us: float
    """Of plan and commit together."""
    largest_plan: int
    largest_growth: int
    last_plan: int
    last_growth: int

    @property
    def total_us(self) -> float:
        return self.plan_us + self.commit_us


def measure_scheduler(
    rows: int,
    context: int,
    *,
    steps: int = 1000,
    run_ahead: int = 8,
    block_size: int = 16,
    eos_token_ids: frozenset[int] = frozenset((0,)),
) -> SchedulerTimes:
    """`rows` sequences of `context` prompt tokens decode `steps` steps, end ids and lengths being
    checked (`eos_token_ids` empty: the window is `run_ahead` instead of 2)."""
    scheduler = _filled_scheduler(rows, context, steps, run_ahead, block_size, eos_token_ids)
    worker = NullWorker()
    under_way: deque[Answer] = deque()
    filling = True
    while filling:
        while (plan := scheduler.plan()) is not None:
            under_way.append(worker.answer(plan))
            filling = plan.decode_rows is not None
        scheduler.commit(under_way.popleft())
    clock = time.perf_counter
    plan_s, commit_s, sizes = [], [], []
    for _ in range(steps):
        started = clock()
        plan = scheduler.plan()
        while plan is not None:
            data = encode(plan)
            planned = clock()
            plan_s.append(planned - started)
            sizes.append((len(data), len(plan.grown) // 8))
            under_way.append(worker.answer(plan))
            started = clock()
            plan = scheduler.plan()
        started = clock()
        scheduler.commit(under_way.popleft())
        commit_s.append(clock() - started)
    both = sorted(a + b for a, b in zip(plan_s, commit_s, strict=False))
    largest, last = max(sizes), sizes[-1]
    return SchedulerTimes(
        rows,
        context,
        run_ahead,
        steps,
        plan_us=1e6 * statistics.median(plan_s),
        commit_us=1e6 * statistics.median(commit_s),
        p99_us=1e6 * both[int(len(both) * 0.99)],
        largest_plan=largest[0],
        largest_growth=largest[1],
        last_plan=last[0],
        last_growth=last[1],
    )


def _filled_scheduler(
    rows: int,
    context: int,
    steps: int,
    run_ahead: int,
    block_size: int,
    eos_token_ids: frozenset[int],
) -> Scheduler:
    length = context + 2 * steps + 64
    limits = SchedulerLimits(
        max_model_len=length,
        vocab_size=1 << 17,
        num_blocks=(rows + 1) * (length // block_size + 1),
        block_size=block_size,
        eos_token_ids=eos_token_ids,
        max_num_seqs=rows,
        max_num_batched_tokens=8192,
        run_ahead=run_ahead,
        graph_sizes=(1, 2, 4, 8, 16, 32, 64, 128, 256, 512),
    )
    scheduler = Scheduler(limits)
    params = SamplingParams(temperature=0.6)
    for i in range(rows):
        prompt = [(i * 7919 + j) % 100_000 + 1 for j in range(context)]
        scheduler.add(Sequence(SeqKey(i), prompt, params, seed=i))
    return scheduler
