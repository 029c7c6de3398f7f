"""Rows with a grammar take part in a step only under a mask of their own; the others go on.

The toy network and a toy grammar stand for the real ones, so every token of every row is checked.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.coordinator.driving import (
    VOCAB,
    Drive,
    alone,
    check_outputs,
    make_limits,
    make_seq,
    toy_grammar,
    with_grammar,
)
from tp_runtime.coordinator.sequence import SeqKey
from tp_runtime.messages import unpack_ids

EOS = frozenset(range(0, VOCAB, 5))


def _mixed(run_ahead: int = 2, **limits: Any) -> Drive:
    """Rows with and without a grammar, which begin and end at different times."""
    drive = Drive(make_limits(run_ahead=run_ahead, **limits))
    drive.add(
        with_grammar(make_seq("a", 5, 30, temperature=1.0, seed=1)),
        make_seq("b", 30, 9, presence_penalty=1.0),
        with_grammar(make_seq("c", 9, 4)),
        make_seq("d", 9, 20, temperature=1.0, seed=2),
        with_grammar(make_seq("e", 3, 30, presence_penalty=0.5, logprobs=1)),
        make_seq("f", 4, 25),
    )
    return drive


@pytest.mark.parametrize("run_ahead", [1, 2, 8])
@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("end_ids", [frozenset(), EOS])
def test_every_row_gets_what_it_would_get_alone(run_ahead, caching, end_ids):
    drive = _mixed(run_ahead, enable_prefix_caching=caching, eos_token_ids=end_ids)
    drive.run()
    check_outputs(drive)
    assert len(drive.ends) == 6


def test_a_text_that_is_complete_ends_with_stop_and_one_that_is_cut_with_length():
    drive = _mixed().run()
    reasons = {key.request: drive.ends[key] for key in drive.ends}
    assert (reasons["a"], reasons["c"], reasons["e"]) == ("stop", "length", "stop")
    assert toy_grammar(drive.outputs[SeqKey("a")]) is None
    assert len(drive.outputs[SeqKey("c")]) == 4
    assert drive.scheduler.counters.ended == {"stop": 2, "length": 4}
    assert drive.scheduler.counters.dropped_tokens == 0


def test_without_its_mask_a_row_is_in_no_step_and_the_others_are_in_every_one():
    drive = Drive(make_limits())
    drive.add(with_grammar(make_seq("g", 3, 30)), make_seq("other", 3, 12, ignore_eos=True))
    while SeqKey("other") not in drive.ends:
        drive.fill_window()
        drive.commit()  # and nobody makes masks
    assert len(drive.outputs[SeqKey("g")]) == 1
    assert [len(plan.masks) for plan in drive.plans] == [1] + [0] * (len(drive.plans) - 1)
    assert len(drive.plans) == 12
    assert drive.plan() is None
    drive.run()
    check_outputs(drive)


def test_a_row_under_a_mask_waits_for_two_steps_at_most():
    drive = Drive(make_limits(run_ahead=8, max_model_len=200, num_blocks=200))
    drive.add(make_seq("other", 3, 100), with_grammar(make_seq("g", 3, 30)))
    drive.round()
    while SeqKey("g") not in drive.ends:
        drive.make_masks()
        assert drive.fill_window() <= 2
        drive.commit()
    while drive.under_way:
        drive.commit()
    assert drive.fill_window() == 8


def test_each_mask_is_that_of_the_newest_token_and_comes_once():
    drive = Drive(make_limits())
    seq = with_grammar(make_seq("g", 3, 30))
    drive.add(seq)
    drive.run()
    masks = [plan.masks[0] for plan in drive.plans if plan.masks]
    output = drive.outputs[seq.key]
    assert len(masks) == len(output)
    for count, mask in enumerate(masks):
        assert unpack_ids(mask.ids) == toy_grammar(output[:count])


@pytest.mark.parametrize("rounds", range(14))
def test_a_crash_at_any_step_changes_no_token(rounds):
    drive = _mixed()
    for _ in range(rounds):
        drive.round()
    drive.fill_window()
    drive.crash()
    drive.run()
    check_outputs(drive)
    assert len(drive.ends) == 6


def test_a_crash_while_a_mask_is_being_made_waits_for_it():
    drive = Drive(make_limits())
    drive.add(with_grammar(make_seq("g", 3, 30)), make_seq("other", 3, 6))
    drive.fill_window()
    drive.commit()
    drive.crash()
    drive.fill_window()
    again = [plan for plan in drive.plans if plan.generation == drive.scheduler.generation]
    assert sum(len(plan.new_rows) for plan in again) == 1  # the other one alone
    drive.run()
    check_outputs(drive)


@pytest.mark.parametrize("blocks", [12, 15, 20])
def test_preemption_keeps_grammar_and_mask(blocks):
    drive = Drive(make_limits(num_blocks=blocks, max_num_batched_tokens=40))
    drive.add(*[with_grammar(make_seq(i, 3 + i, 30, seed=i)) for i in range(3)])
    drive.add(*[make_seq(10 + i, 4, 30) for i in range(3)])
    drive.run()
    check_outputs(drive)
    if blocks == 12:
        assert drive.scheduler.counters.preemptions


def test_preempting_a_held_row_while_its_mask_is_made():
    drive = Drive(make_limits())
    drive.add(with_grammar(make_seq("g", 3, 30)))
    drive.fill_window()
    drive.commit()
    assert drive.scheduler.preempt_youngest()
    assert drive.plan() is None
    drive.make_masks()
    assert drive.plan() is not None
    drive.run()
    check_outputs(drive)


def test_cancelling_a_held_row_frees_its_place_and_its_late_mask_harms_nobody():
    drive = Drive(make_limits())
    seq = with_grammar(make_seq("g", 3, 30))
    drive.add(seq)
    drive.fill_window()
    drive.commit()
    assert drive.scheduler.cancel(seq.key)
    drive.add(with_grammar(make_seq("g", 4, 30)))  # another one of this name
    drive.make_masks()
    drive.run()
    assert drive.outputs[SeqKey("g")] == alone(drive.seqs[SeqKey("g")])


def test_rows_with_a_grammar_are_last_so_that_the_others_replay_graphs():
    limits = make_limits(
        graph_sizes=(1, 2, 4, 8), max_num_seqs=8, max_num_batched_tokens=64, run_ahead=2
    )
    drive = Drive(limits)
    drive.add(with_grammar(make_seq("g", 3, 30)), with_grammar(make_seq("h", 4, 30)))
    drive.fill_window()
    drive.add(make_seq("x", 3, 40), make_seq("y", 3, 4), make_seq("z", 3, 40))
    drive.run()
    check_outputs(drive)
    without_chunks = [plan for plan in drive.plans if not plan.chunks]
    assert len(without_chunks) > 20
    assert all(plan.padded for plan in without_chunks if len(plan.masks) != 1)
    assert any(plan.padded and plan.decode_rows is not None for plan in without_chunks)
    assert any(plan.padded and plan.masks for plan in without_chunks)


def test_a_resumed_sample_goes_on_under_the_mask_of_its_last_token():
    whole = Drive(make_limits())
    whole.add(with_grammar(make_seq("g", 3, 30)))
    whole.run()
    output = whole.outputs[SeqKey("g")]
    for had in range(1, len(output)):
        drive = Drive(make_limits())
        drive.add(with_grammar(make_seq("g", 3, 30, generated=output[:had])))
        drive.run()
        assert drive.outputs[SeqKey("g")] == output
