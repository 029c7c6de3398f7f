"""Who runs in a step: decode rows first, then chunks within the budget, first come first served."""

from __future__ import annotations

import pytest

from tests.coordinator.driving import Drive, check_outputs, make_limits, make_seq
from tp_runtime.coordinator.sequence import SeqKey
from tp_runtime.messages import StepPlan, unpack_ids


def _chunks(plan: StepPlan | None) -> list[tuple[int, int, int, bool]]:
    """(row, start, tokens, samples) of each chunk."""
    assert plan is not None
    return [(c.row, c.start, len(c.token_ids) // 4, c.sample) for c in plan.chunks]


def _step(drive: Drive) -> StepPlan:
    plan = drive.plan()
    assert plan is not None
    drive.commit()
    return plan


@pytest.mark.parametrize("prompt", [1, 3, 4, 5, 8, 15, 16, 17, 33, 63])
def test_prompts_of_any_length_around_blocks_and_chunks_are_right(prompt):
    drive = Drive(make_limits())
    drive.add(make_seq("r", prompt, 8))
    drive.run()
    check_outputs(drive)


def test_a_long_prompt_is_prefilled_in_chunks_and_only_the_last_one_samples():
    drive = Drive(make_limits())
    drive.add(make_seq("r", 37, 3))
    assert _chunks(_step(drive)) == [(0, 0, 16, False)]
    assert _chunks(_step(drive)) == [(0, 16, 16, False)]
    assert drive.outputs[SeqKey("r")] == []
    assert _chunks(_step(drive)) == [(0, 32, 5, True)]
    assert len(drive.outputs[SeqKey("r")]) == 1


def test_a_long_prompt_never_stops_running_streams():
    drive = Drive(make_limits(max_model_len=200, num_blocks=200))
    drive.add(make_seq("a", 4, 30), make_seq("b", 4, 30))
    _step(drive)
    drive.add(make_seq("long", 150, 1))
    for _ in range(10):
        before = [len(drive.outputs[SeqKey(k)]) for k in "ab"]
        plan = _step(drive)
        assert [len(drive.outputs[SeqKey(k)]) for k in "ab"] == [n + 1 for n in before]
        assert sum(size for _, _, size, _ in _chunks(plan)) == 14  # 16 less two decode rows
        assert unpack_ids(plan.decode_rows or b"") == [0, 1]
    drive.run()
    check_outputs(drive)


def test_the_budget_is_filled_in_order_of_arrival():
    drive = Drive(make_limits())
    drive.add(make_seq("a", 6), make_seq("b", 7), make_seq("c", 8))
    assert _chunks(_step(drive)) == [(0, 0, 6, True), (1, 0, 7, True), (2, 0, 3, False)]
    assert _chunks(_step(drive)) == [(2, 3, 5, True)]


def test_no_more_rows_than_max_num_seqs_and_the_next_enters_when_one_leaves():
    drive = Drive(make_limits(max_num_seqs=2))
    drive.add(make_seq("a", 2, 2), make_seq("b", 2, 5), make_seq("c", 2, 5))
    assert _step(drive).num_rows == 2
    plan = _step(drive)  # the last token of a
    assert (plan.num_rows, plan.new_rows) == (2, [])
    assert drive.ends == {SeqKey("a"): "length"}
    plan = _step(drive)
    assert [row.row for row in plan.new_rows] == [0]
    assert plan.moves == []
    drive.run()
    check_outputs(drive)


def test_a_row_is_given_on_as_soon_as_its_last_token_is_planned():
    drive = Drive(make_limits(max_num_seqs=1))
    drive.add(make_seq("a", 2, 1), make_seq("b", 2, 1))
    first, second = drive.plan(), drive.plan()
    assert first is not None
    assert second is not None
    assert [row.row for row in second.new_rows] == [0]
    drive.run()
    check_outputs(drive)


@pytest.mark.parametrize("budget", [1, 2, 3])
def test_a_budget_smaller_than_the_number_of_rows_starves_nobody(budget):
    drive = Drive(make_limits(max_num_batched_tokens=budget, max_num_seqs=4))
    drive.add(*[make_seq(i, 5, 6) for i in range(6)])
    drive.run()
    check_outputs(drive)
    assert max(drive.worker.tokens_per_step) <= budget
    assert len(drive.ends) == 6


def test_nobody_overtakes_a_head_of_the_queue_that_waits_for_blocks():
    drive = Drive(make_limits(num_blocks=10, run_ahead=1))
    drive.add(make_seq("running", 20, 4), make_seq("large", 30, 1), make_seq("small", 2, 1))
    drive.run()
    check_outputs(drive)
    order = [update.seq.key.request for update in drive.updates if update.finish_reason]
    assert order == ["running", "large", "small"]


def test_a_request_under_a_steady_stream_of_others_is_served():
    drive = Drive(make_limits(num_blocks=12, run_ahead=1, max_num_seqs=3))
    drive.add(*[make_seq(i, 3, 6) for i in range(3)])
    drive.add(make_seq("large", 40, 2))
    for i in range(3, 60):
        if SeqKey("large") in drive.ends:
            break
        drive.add(make_seq(i, 3, 6))
        drive.round()
    assert SeqKey("large") in drive.ends
    drive.run()
    check_outputs(drive)


def test_steady_decode_names_no_rows_and_uses_the_smallest_graph():
    drive = Drive(make_limits(graph_sizes=(1, 2, 4, 8), max_num_seqs=8))
    drive.add(*[make_seq(i, 2, 10) for i in range(3)])
    mixed, steady = _step(drive), _step(drive)
    assert (mixed.padded, mixed.decode_rows) == (0, b"")
    assert (steady.padded, steady.decode_rows) == (4, None)
    assert not (steady.chunks or steady.moves or steady.new_rows or steady.blocks)


def test_rows_close_up_when_one_in_the_middle_ends():
    drive = Drive(make_limits())
    drive.add(make_seq("a", 2, 9), make_seq("b", 2, 2), make_seq("c", 2, 9))
    _step(drive)
    _step(drive)
    plan = _step(drive)
    assert (plan.num_rows, plan.moves) == (2, [(2, 1)])
    drive.run()
    check_outputs(drive)


def test_the_checksum_is_asked_for_every_so_many_steps():
    for every, wanted in ((0, []), (1, [1, 2, 3, 4]), (2, [2, 4])):
        drive = Drive(make_limits(check_every=every))
        drive.add(make_seq("a", 2, 4))
        drive.run()
        assert [plan.step for plan in drive.plans if plan.check] == wanted


def test_an_idle_scheduler_plans_nothing():
    drive = Drive(make_limits())
    assert drive.plan() is None
    drive.add(make_seq("a", 2, 2))
    drive.run()
    assert drive.plan() is None
    assert not drive.scheduler.has_work


def test_stats_count_what_happened():
    drive = Drive(make_limits(max_num_seqs=2))
    drive.add(*[make_seq(i, 6, 4) for i in range(3)])
    drive.plan()
    stats = drive.scheduler.stats()
    assert (stats.running, stats.waiting, stats.steps_in_flight) == (2, 1, 1)
    assert (stats.blocks_total, stats.blocks_used, stats.blocks_free) == (64, 4, 60)
    drive.run()
    counters = drive.scheduler.counters
    assert (counters.prompt_tokens, counters.generated_tokens) == (18, 12)
    assert counters.ended == {"length": 3}


def test_the_time_of_leaving_the_queue_is_kept_from_the_first_admission():
    drive = Drive(make_limits())
    seq = make_seq("a", 2, 9)
    assert seq.admitted_at == 0.0
    drive.add(seq)
    _step(drive)
    first = seq.admitted_at
    assert first > 0.0
    assert drive.scheduler.preempt_youngest()
    _step(drive)
    assert seq.admitted_at == first
