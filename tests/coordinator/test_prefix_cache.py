"""Known prefixes are not computed again, and nothing else is taken for one."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from tests.coordinator.driving import Drive, check_outputs, make_limits, make_seq
from tp_runtime.coordinator import block_tables
from tp_runtime.coordinator.sequence import SeqKey, Sequence

PROMPT = [(5 * i) % 31 for i in range(24)]


def _after_one(prompt: list[int], max_tokens: int = 3, **limits: Any) -> Drive:
    drive = Drive(make_limits(max_num_batched_tokens=100, **limits))
    drive.add(make_seq("first", prompt, max_tokens))
    return drive.run()


def _starts(drive: Drive, *seqs: object) -> list[int]:
    """First position computed of each sequence."""
    drive.add(*seqs)  # type: ignore[arg-type]
    plan = drive.plan()
    assert plan is not None
    starts = [chunk.start for chunk in plan.chunks]
    drive.run()
    check_outputs(drive)
    return starts


@pytest.mark.parametrize(
    ("length", "start"), [(1, 0), (3, 0), (4, 0), (5, 4), (7, 4), (8, 4), (9, 8), (24, 20)]
)
def test_a_prompt_seen_before_computes_at_least_one_token(length, start):
    drive = _after_one(PROMPT[:length])
    assert _starts(drive, make_seq("again", PROMPT[:length])) == [start]
    assert drive.seqs[SeqKey("again")].num_cached_tokens == start


@pytest.mark.parametrize("block_size", [1, 2, 3, 8])
def test_block_sizes_other_than_the_default(block_size):
    drive = _after_one(PROMPT, block_size=block_size)
    (start,) = _starts(drive, make_seq("again", PROMPT))
    assert start == 23 // block_size * block_size


def test_prompts_share_only_what_is_equal_from_the_start():
    drive = _after_one(PROMPT)
    other = [*PROMPT[:6], 40, *PROMPT[7:]]
    shifted = [40, *PROMPT[:-1]]
    assert _starts(drive, make_seq("other", other), make_seq("shifted", shifted)) == [4, 0]


def test_the_next_turn_finds_prompt_and_answer_of_the_last_one():
    drive = _after_one(PROMPT, max_tokens=10)
    turn = PROMPT + drive.outputs[SeqKey("first")] + [1, 2, 3]
    assert _starts(drive, make_seq("next", turn)) == [32]  # 33 of 34 tokens were fed


def test_tokens_generated_past_an_end_id_are_not_found():
    """Steps under way go on writing behind the end; those positions hold ids nobody was shown."""
    drive = Drive(make_limits(eos_token_ids=frozenset(range(0, 50, 3)), block_size=1))
    drive.add(make_seq("first", PROMPT[:5], 30))
    drive.run()
    assert drive.ends[SeqKey("first")] == "stop"
    turn = PROMPT[:5] + drive.outputs[SeqKey("first")] + [1, 2, 3, 4]
    (start,) = _starts(drive, make_seq("next", turn, 5))
    assert start == 5 + len(drive.outputs[SeqKey("first")]) - 1


def test_samples_of_one_request_share_the_prompt_in_the_very_step_that_computes_it():
    drive = Drive(make_limits(max_num_batched_tokens=100))
    seqs = [make_seq("r", PROMPT, 6, sample=i, temperature=1.0) for i in range(4)]
    assert _starts(drive, *seqs) == [0, 20, 20, 20]
    assert drive.scheduler.counters.prompt_tokens == 24 + 3 * 4


def test_a_prompt_is_found_while_the_request_that_brought_it_still_runs():
    drive = Drive(make_limits(max_num_batched_tokens=100))
    drive.add(make_seq("first", PROMPT, 20))
    drive.fill_window()
    assert _starts_after_commit(drive) == 20
    drive.run()
    check_outputs(drive)


def _starts_after_commit(drive: Drive) -> int:
    drive.commit()
    drive.add(make_seq("again", PROMPT, 3))
    plan = drive.plan()
    assert plan is not None
    return plan.chunks[0].start


@pytest.mark.parametrize("block_size", [1, 4])
@pytest.mark.parametrize("time_to_spare", [False, True])
def test_what_a_running_request_generated_is_found_up_to_its_newest_fed_token(
    block_size, time_to_spare
):
    drive = Drive(make_limits(max_num_batched_tokens=100, block_size=block_size))
    drive.add(make_seq("first", PROMPT, 30))
    for _ in range(24):
        drive.fill_window()
        drive.commit()
        if time_to_spare:
            drive.scheduler.do_spare_work()
    turn = PROMPT + drive.outputs[SeqKey("first")] + [1, 2, 3]
    assert len(turn) == 24 + 24 + 3
    assert drive.scheduler.find(SeqKey("first")) is not None
    assert _starts(drive, make_seq("next", turn, 5)) == [47 // block_size * block_size]


def test_of_two_that_say_the_same_the_one_that_goes_on_is_found_to_its_end():
    """The blocks of the first end are known then, those behind them only to the one that runs."""
    drive = Drive(make_limits(max_num_batched_tokens=100))
    drive.add(make_seq("short", PROMPT, 10), make_seq("long", PROMPT, 30))
    while len(drive.outputs[SeqKey("long")]) < 25:
        drive.round()
    assert drive.ends == {SeqKey("short"): "length"}
    turn = PROMPT + drive.outputs[SeqKey("long")][:25] + [1, 2, 3]
    assert _starts(drive, make_seq("next", turn, 5)) == [48]


def test_an_arrival_hashes_no_more_of_others_than_it_has_tokens_itself():
    drive = Drive(make_limits(max_num_batched_tokens=100))
    drive.add(make_seq("first", PROMPT, 36), make_seq("other", [40, *PROMPT], 36))
    for _ in range(35):
        drive.fill_window()
        drive.commit()
    first, other = (drive.scheduler.find(SeqKey(name)) for name in ("first", "other"))
    assert first is not None and other is not None
    turn = PROMPT + drive.outputs[SeqKey("first")][:9]
    assert _plan_starts(drive, make_seq("next", turn, 2)) == [32]
    assert (first.num_registered, other.num_registered) == (8, 6)
    drive.run()
    check_outputs(drive)


def _plan_starts(drive: Drive, seq: Sequence) -> list[int]:
    drive.add(seq)
    plan = drive.plan()
    assert plan is not None
    return [chunk.start for chunk in plan.chunks]


def test_blocks_that_never_found_time_are_known_all_the_same(monkeypatch):
    monkeypatch.setattr(block_tables, "FEW_LATE", 1)
    monkeypatch.setattr(block_tables, "MOST_LATE", 3)
    drive = Drive(make_limits(max_num_batched_tokens=100, block_size=1))
    drive.add(make_seq("first", [1, 2, 3], 30))
    seq = drive.seqs[SeqKey("first")]
    late = []
    for _ in range(28):
        drive.fill_window()
        drive.commit()
        late.append(len(seq.blocks) - seq.num_registered)
    assert 3 <= max(late) <= 3 + 2 + 2  # and the window


def test_time_to_spare_is_used_in_small_portions_until_nothing_is_left(monkeypatch):
    monkeypatch.setattr(block_tables, "AT_ONCE", 3)
    drive = Drive(make_limits(max_num_batched_tokens=100, block_size=1, num_blocks=200))
    drive.add(make_seq("a", PROMPT, 30), make_seq("b", [40, *PROMPT], 30))
    scheduler, known = drive.scheduler, []
    for _ in range(20):
        drive.fill_window()
        drive.commit()
    assert scheduler.has_spare_work
    while scheduler.has_spare_work:
        known.append(scheduler.stats().blocks_cached)
        scheduler.do_spare_work()
    steps = [b - a for a, b in pairwise(known)]
    assert set(steps) <= {1, 2, 3} and len(steps) > 10
    assert scheduler.stats().blocks_cached == 24 + 25 + 2 * 19
    drive.run()
    check_outputs(drive)


def test_without_a_cache_nothing_waits_for_time_to_spare():
    drive = Drive(make_limits(enable_prefix_caching=False, block_size=1))
    drive.add(make_seq("first", PROMPT, 30))
    for _ in range(24):
        drive.fill_window()
        drive.commit()
    assert not drive.scheduler.has_spare_work


def test_only_chunks_that_were_planned_are_found():
    drive = Drive(make_limits(max_num_batched_tokens=10))
    drive.add(make_seq("first", PROMPT, 3), make_seq("again", PROMPT, 3))
    drive.run()
    check_outputs(drive)
    starts = [[(c.row, c.start) for c in plan.chunks] for plan in drive.plans if plan.chunks]
    # Rest of the budget of the third step: the second sequence finds all the first one has planned.
    assert starts == [[(0, 0)], [(0, 10)], [(0, 20), (1, 20)]]


def test_switched_off_nothing_is_found_or_counted():
    drive = _after_one(PROMPT, enable_prefix_caching=False)
    assert _starts(drive, make_seq("again", PROMPT)) == [0]
    stats = drive.scheduler.stats()
    assert stats.blocks_cached == 0
    assert (stats.counters.prefix_queries, stats.counters.prefix_hits) == (0, 0)


def test_hits_and_queries_are_counted_in_tokens():
    drive = _after_one(PROMPT)
    _starts(drive, make_seq("again", PROMPT), make_seq("other", [40] * 6))
    counters = drive.scheduler.counters
    assert (counters.prefix_queries, counters.prefix_hits) == (24 + 24 + 6, 20)


def test_known_blocks_are_given_up_when_others_need_the_room():
    drive = _after_one(PROMPT, num_blocks=8)
    drive.add(make_seq("large", [40] * 32, 1))
    drive.run()
    check_outputs(drive)
    assert _starts(drive, make_seq("again", PROMPT)) == [0]


def test_a_prefix_in_use_is_never_given_up():
    drive = Drive(make_limits(num_blocks=12, max_num_batched_tokens=100))
    drive.add(make_seq("a", PROMPT, 12), make_seq("b", PROMPT, 12), make_seq("c", [40] * 20, 12))
    drive.run()
    check_outputs(drive)


def test_positions_whose_logprobs_are_wanted_are_not_skipped():
    drive = _after_one(PROMPT)
    assert _starts(drive, make_seq("again", PROMPT, prompt_logprobs=0)) == [0]
    entries = drive.updates[-1].seq.params.prompt_logprobs
    assert entries == 0
    assert _starts(drive, make_seq("third", PROMPT)) == [20]


def test_a_request_that_met_nan_leaves_nothing_to_be_found():
    drive = Drive(make_limits(max_num_batched_tokens=100), not_finite=[40])
    drive.add(make_seq("bad", [*PROMPT, 40], 5))
    drive.run()
    assert drive.ends == {SeqKey("bad"): "error"}
    assert drive.scheduler.stats().blocks_cached == 0
    assert _starts(drive, make_seq("good", PROMPT)) == [0]
