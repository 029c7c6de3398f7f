"""What a steady step costs, in bytes and in work: proportional to the rows that change."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from tp_runtime.coordinator.limits import SchedulerLimits
from tp_runtime.coordinator.null_worker import NullWorker, measure_scheduler
from tp_runtime.coordinator.scheduler import Scheduler
from tp_runtime.coordinator.sequence import SeqKey, Sequence
from tp_runtime.messages import StepPlan, encode
from tp_runtime.sampling_params import SamplingParams

KIB = 1024


def _decoding(
    rows: int, context: int, block_size: int = 16, **params: Any
) -> tuple[Scheduler, NullWorker]:
    """All rows prefilled, nothing under way."""
    length = context + 2000
    limits = SchedulerLimits(
        max_model_len=length,
        vocab_size=1 << 17,
        num_blocks=rows * (length // block_size + 1),
        block_size=block_size,
        max_num_seqs=rows,
        max_num_batched_tokens=rows * context,
        eos_token_ids=frozenset((0,)),
    )
    scheduler, worker = Scheduler(limits), NullWorker()
    for i in range(rows):
        prompt = [(i + j) % 1000 + 1 for j in range(context)]
        scheduler.add(Sequence(SeqKey(i), prompt, SamplingParams(**params), seed=i))
    plan = scheduler.plan()
    while plan is not None and plan.decode_rows is not None:
        scheduler.commit(worker.answer(plan))
        plan = scheduler.plan()
    assert plan is not None
    scheduler.commit(worker.answer(plan))
    return scheduler, worker


def _calls(action: Callable[[], object]) -> int:
    """Python functions entered and C functions called by `action`."""
    count = 0

    def profile(_frame: FrameType, event: str, _argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(profile)
    try:
        action()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize(("rows", "context"), [(256, 1024), (32, 32768)])
def test_the_thousandth_steady_plan_is_small_whatever_the_context(rows, context):
    times = measure_scheduler(rows, context, steps=1000)
    assert times.last_plan <= KIB + 8 * times.last_growth
    assert times.largest_plan <= KIB + 8 * times.largest_growth


def test_a_plan_stays_small_when_all_rows_begin_a_block_at_once():
    scheduler, worker = _decoding(512, 32)
    for _ in range(40):
        plan = scheduler.plan()
        assert isinstance(plan, StepPlan)
        grown = len(plan.grown) // 8
        assert grown in (0, 512)
        assert len(encode(plan)) <= 64 + 8 * grown
        scheduler.commit(worker.answer(plan))


def test_planning_a_steady_step_costs_the_same_for_any_number_of_rows_and_any_context():
    counts = set()
    for rows, context in ((1, 40), (64, 40), (256, 40), (8, 4000)):
        scheduler, _ = _decoding(rows, context // 16 * 16)
        scheduler.plan()
        counts.add(_calls(scheduler.plan))
        assert scheduler.stats().steps_in_flight == 2
    assert len(counts) == 1
    assert counts.pop() < 60


@pytest.mark.parametrize("steps", [1, 2, 8])
def test_steady_answers_cost_one_call_per_row_however_many_there_are(steps):
    counts = []
    for rows in (64, 256):
        scheduler, worker = _decoding(rows, 32, ignore_eos=True)
        answers = [worker.answer(plan) for _ in range(steps) if (plan := scheduler.plan())]
        assert len(answers) == steps
        counts.append(_calls(lambda: list(scheduler.commit_all(answers))))  # noqa: B023
    assert counts[1] - counts[0] == 256 - 64


def test_a_full_pool_is_not_searched_for_a_waiting_prompt_in_every_step():
    """The fault: the queue's head had its whole prompt looked up in each step it waited."""
    limits = SchedulerLimits(
        max_model_len=4096, vocab_size=1000, num_blocks=230, block_size=16, run_ahead=1
    )
    scheduler, worker = Scheduler(limits), NullWorker()
    shared = [1] * 1600  # found in the cache, block for block
    scheduler.add(Sequence(SeqKey("runs"), shared + [2] * 400, SamplingParams(max_tokens=600)))
    scheduler.add(Sequence(SeqKey("waits"), shared + [3] * 2000, SamplingParams(max_tokens=10)))
    counts = []
    for _ in range(20):
        plan = None

        def act() -> None:
            nonlocal plan
            plan = scheduler.plan()

        counts.append(_calls(act))
        assert plan is not None
        scheduler.commit(worker.answer(plan))
    assert scheduler.stats().waiting == 1
    assert max(counts[2:]) < 100
