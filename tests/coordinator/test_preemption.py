"""When blocks run out the youngest gives way, and goes on later as if nothing had been."""

from __future__ import annotations

import pytest

from tests.coordinator.driving import Drive, check_outputs, make_limits, make_seq
from tp_runtime.coordinator.sequence import SeqKey
from tp_runtime.messages import unpack_ids


@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("run_ahead", [1, 2, 8])
def test_a_pool_too_small_for_all_still_serves_all(caching, run_ahead):
    drive = Drive(
        make_limits(num_blocks=9, run_ahead=run_ahead, enable_prefix_caching=caching, block_size=2)
    )
    drive.add(*[make_seq(i, 4, 10, seed=i, temperature=1.0) for i in range(5)])
    drive.run()
    check_outputs(drive)
    assert drive.scheduler.counters.preemptions > 0
    assert len(drive.ends) == 5


def test_the_youngest_gives_way_and_keeps_its_place_before_later_arrivals():
    drive = Drive(make_limits(num_blocks=6, block_size=2, run_ahead=1, max_num_seqs=2))
    old, young, later = make_seq("old", 4, 8), make_seq("young", 4, 8), make_seq("later", 4, 8)
    drive.add(old, young, later)
    while not drive.scheduler.counters.preemptions:
        drive.round()
    assert (old.num_preemptions, young.num_preemptions) == (0, 1)
    drive.run()
    check_outputs(drive)
    ended = [update.seq.key.request for update in drive.updates if update.finish_reason]
    assert ended == ["old", "young", "later"]


def test_generated_tokens_are_part_of_the_prompt_the_second_time():
    drive = Drive(make_limits(run_ahead=1, enable_prefix_caching=False))
    seq = make_seq("a", 5, 12, presence_penalty=1.0, min_tokens=9, stop_token_ids=[3])
    drive.add(seq)
    for _ in range(4):
        drive.round()
    assert drive.scheduler.preempt_youngest()
    assert drive.scheduler.stats().blocks_used == 0
    plan = drive.plan()
    assert plan is not None
    assert unpack_ids(plan.chunks[0].token_ids) == seq.tokens.tolist()
    assert len(seq.tokens) == 5 + 4
    new = plan.new_rows[0]
    assert new.prompt_len == 5
    assert unpack_ids(new.history) == seq.tokens.tolist()
    assert new.sampling.min_position == 5 + 9
    drive.run()
    check_outputs(drive)


@pytest.mark.parametrize("caching", [False, True])
def test_preemption_at_every_step_changes_no_token(caching):
    # The budget holds all prompts: a prefill that is interrupted at every step would never end.
    drive = Drive(
        make_limits(
            run_ahead=1,
            enable_prefix_caching=caching,
            block_size=2,
            max_num_batched_tokens=100,
        )
    )
    drive.add(*[make_seq(i, 3 + 4 * i, 8, temperature=1.0, seed=i, logprobs=1) for i in range(4)])
    for _ in range(8):
        drive.round()
        while drive.scheduler.preempt_youngest():
            pass
    assert drive.scheduler.is_idle
    check_outputs(drive)
    assert drive.scheduler.counters.preemptions > 20


def test_nothing_is_preempted_while_steps_are_under_way():
    drive = Drive(make_limits())
    drive.add(make_seq("a", 3, 9))
    assert not drive.scheduler.preempt_youngest()
    drive.plan()
    assert not drive.scheduler.preempt_youngest()
    drive.commit()
    assert drive.scheduler.preempt_youngest()
    drive.run()
    check_outputs(drive)


def test_a_row_that_needs_a_block_waits_for_answers_before_anyone_is_preempted():
    """With blocks held by steps under way the first answer may free enough."""
    drive = Drive(make_limits(num_blocks=4, block_size=2, max_num_seqs=2))
    drive.add(make_seq("a", 3, 5), make_seq("b", 3, 2))
    drive.run()
    check_outputs(drive)
    assert drive.scheduler.counters.preemptions == 0


def test_a_preempted_sequence_finds_its_own_blocks_again():
    drive = Drive(make_limits(run_ahead=1))
    drive.add(make_seq("a", 10, 12))
    for _ in range(6):
        drive.round()
    drive.scheduler.preempt_youngest()
    plan = drive.plan()
    assert plan is not None
    assert plan.chunks[0].start == 12  # 16 tokens, the last block is computed again
    drive.run()
    check_outputs(drive)
    assert drive.scheduler.counters.prefix_queries == 10  # only the first admission counts
    assert drive.seqs[SeqKey("a")].num_cached_tokens == 0


def test_prompt_logprobs_are_delivered_once_in_spite_of_preemption():
    drive = Drive(make_limits(run_ahead=1, max_num_batched_tokens=4))
    drive.add(make_seq("a", 10, 6, prompt_logprobs=1))
    drive.round()
    assert drive.scheduler.preempt_youngest()  # in the middle of the prefill
    for _ in range(4):
        drive.round()
    assert len(drive.outputs[SeqKey("a")]) == 2
    assert drive.scheduler.preempt_youngest()
    plan = drive.plan()
    assert plan is not None
    assert plan.new_rows[0].sampling.prompt_logprobs == -1
    drive.run()
    check_outputs(drive)
    delivered = [u.prompt_logprobs for u in drive.updates if u.prompt_logprobs is not None]
    assert [len(entries) for entries in delivered] == [10]


def test_what_was_just_preempted_does_not_come_back_in_the_same_step():
    drive = Drive(make_limits(num_blocks=6, block_size=2, run_ahead=1, max_num_seqs=2))
    drive.add(make_seq("old", 4, 8), make_seq("young", 4, 8))
    while not drive.scheduler.counters.preemptions:
        drive.round()
    assert drive.plans[-1].new_rows == []
    drive.run()
    check_outputs(drive)
