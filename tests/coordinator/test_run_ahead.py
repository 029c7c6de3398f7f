"""How many steps are under way, and what happens to those that turn out to be too many."""

from __future__ import annotations

from typing import Any

import pytest

from tests.coordinator.driving import VOCAB, Drive, alone, check_outputs, make_limits, make_seq
from tp_runtime.coordinator.sequence import SeqKey

EOS = frozenset(range(0, VOCAB, 5))
"""Every fifth id, so that most sequences end early."""


def _windows(drive: Drive, rounds: int) -> list[int]:
    found = []
    for _ in range(rounds):
        found.append(drive.fill_window())
        drive.commit()
    return found


def _decoding(run_ahead: int, **params: Any) -> Drive:
    drive = Drive(make_limits(run_ahead=run_ahead, max_model_len=200, num_blocks=200))
    drive.add(make_seq("a", 3, 60, **params))
    drive.fill_window()
    drive.commit()
    return drive


@pytest.mark.parametrize("run_ahead", [1, 2, 3, 8])
def test_the_window_is_run_ahead_while_nothing_can_change(run_ahead):
    assert _windows(_decoding(run_ahead), 3) == [run_ahead] * 3


@pytest.mark.parametrize(("run_ahead", "window"), [(1, 1), (2, 2), (8, 2)])
@pytest.mark.parametrize(
    "params", [{"stop_token_ids": [1]}, {"stop": ["x"]}, {"stop": ["x"], "ignore_eos": True}]
)
def test_the_window_is_two_while_a_row_may_meet_an_end(run_ahead, window, params):
    assert _windows(_decoding(run_ahead, **params), 2) == [window] * 2


def test_end_ids_that_min_tokens_forbids_to_the_end_do_not_matter():
    drive = _decoding(8, stop_token_ids=[1], min_tokens=60)
    assert _windows(drive, 1) == [8]
    drive.run()
    check_outputs(drive)


def test_an_arrival_waits_for_the_steps_published_and_no_more():
    drive = _decoding(8)
    drive.fill_window()
    published = drive.plans[-1].step
    drive.add(make_seq("b", 3, 5))
    while (plan := drive.plan()) is None:
        drive.commit()
    assert plan.step == published + 1
    assert len(plan.new_rows) == 1
    assert len(drive.under_way) == 2


def test_the_window_is_two_while_a_sequence_waits_or_prefills():
    drive = _decoding(8)
    drive.fill_window()
    drive.add(make_seq("long", 60, 30))
    windows = []
    while not drive.outputs[SeqKey("long")]:
        if drive.plan() is None:
            drive.commit()
        elif drive.plans[-1].chunks:
            windows.append(len(drive.under_way))
    assert windows == [2] * 4  # 60 tokens in chunks of 15
    assert drive.fill_window() == 8
    drive.run()
    check_outputs(drive)


def test_the_window_is_two_while_a_cancelled_row_is_under_way():
    drive = Drive(make_limits(run_ahead=8))
    drive.add(make_seq("a", 3, 50), make_seq("b", 3, 50))
    drive.fill_window()
    drive.commit()
    assert drive.fill_window() == 8
    drive.scheduler.cancel(SeqKey("a"))
    for left in (7, 6, 5, 4, 3, 2):
        drive.commit()
        assert drive.plan() is None or left == 2
    drive.commit()
    assert drive.fill_window() <= 8
    drive.run()
    check_outputs(drive)


def test_steps_past_the_length_are_never_planned():
    drive = _decoding(8)
    drive.run()
    check_outputs(drive)
    assert len(drive.plans) == 60
    assert drive.scheduler.counters.dropped_tokens == 0


def test_blocks_of_the_whole_window_are_given_before_the_answers():
    drive = _decoding(8)
    drive.fill_window()
    grown = [len(plan.grown) // 8 for plan in drive.plans]
    assert sum(grown) == 2  # positions 3 to 10, one block of 4 from the prompt


@pytest.mark.parametrize("run_ahead", [1, 2, 8])
@pytest.mark.parametrize("caching", [False, True])
def test_outputs_are_the_same_for_every_run_ahead(run_ahead, caching):
    drive = Drive(
        make_limits(run_ahead=run_ahead, eos_token_ids=EOS, enable_prefix_caching=caching)
    )
    drive.add(*[make_seq(i, 3 + i, 20, ignore_eos=i % 3 == 0, seed=i) for i in range(12)])
    drive.run()
    check_outputs(drive)
    assert "stop" in drive.ends.values()
    assert "length" in drive.ends.values()


def test_ids_sampled_past_an_end_id_are_dropped_and_counted():
    drive = Drive(make_limits(eos_token_ids=EOS))
    drive.add(*[make_seq(i, 4 + i, 30) for i in range(4)])
    drive.run()
    check_outputs(drive)
    early = sum(reason == "stop" for reason in drive.ends.values())
    assert early == 4
    assert drive.scheduler.counters.dropped_tokens == early


def test_blocks_of_a_late_stop_are_free_once_no_step_under_way_writes_to_them():
    drive = Drive(make_limits(eos_token_ids=EOS, enable_prefix_caching=False))
    seq = make_seq("a", 4, 30)
    drive.add(seq)
    while not drive.ends:
        drive.fill_window()
        drive.commit()
    assert drive.outputs[seq.key] == alone(seq)
    assert drive.scheduler.stats().running == 0
    assert len(drive.under_way) == 1
    assert drive.scheduler.stats().blocks_used > 0
    assert drive.commit() == []
    assert drive.scheduler.stats().blocks_used == 0


def test_a_cancelled_request_is_gone_from_the_next_plan_and_its_blocks_one_step_later():
    drive = Drive(make_limits())
    drive.add(make_seq("a", 4, 30), make_seq("b", 4, 30))
    drive.fill_window()
    drive.commit()
    used = drive.scheduler.stats().blocks_used
    assert drive.scheduler.cancel(SeqKey("a"), "timeout")
    assert drive.scheduler.stats().blocks_used == used
    assert all(update.seq.key != SeqKey("a") for update in drive.commit())
    assert drive.scheduler.stats().blocks_used < used
    plan = drive.plan()
    assert plan is not None
    assert (plan.num_rows, plan.moves) == (1, [(1, 0)])
    assert not drive.scheduler.cancel(SeqKey("a"))
    drive.run()
    check_outputs(drive)
    assert drive.scheduler.counters.ended == {"timeout": 1, "length": 1}


def test_cancelling_what_waits_costs_nothing():
    drive = Drive(make_limits(max_num_seqs=1))
    drive.add(make_seq("a", 4, 5), make_seq("b", 4, 5), make_seq("c", 4, 5))
    drive.plan()
    assert drive.scheduler.cancel(SeqKey("b"))
    drive.run()
    check_outputs(drive)
    assert set(drive.ends) == {SeqKey("a"), SeqKey("c")}


def test_cancelling_in_the_middle_of_a_prefill_frees_the_budget_for_others():
    drive = Drive(make_limits(max_model_len=200, num_blocks=60))
    drive.add(make_seq("long", 150, 5), make_seq("b", 4, 5))
    drive.fill_window()
    drive.scheduler.cancel(SeqKey("long"))
    plan = drive.plan()
    assert plan is None  # the window is two
    drive.commit()
    plan = drive.plan()
    assert plan is not None
    assert len(plan.new_rows) == 1
    drive.run()
    check_outputs(drive)


def test_a_request_id_can_be_used_again_at_once_after_cancelling():
    drive = Drive(make_limits())
    drive.add(make_seq("a", 4, 30))
    drive.fill_window()
    drive.scheduler.cancel(SeqKey("a"))
    drive.add(make_seq("a", 7, 5))
    drive.run()
    check_outputs(drive)
    assert len(drive.outputs[SeqKey("a")]) == 5
