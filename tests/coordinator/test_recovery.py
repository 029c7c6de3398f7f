"""After the workers were replaced every request goes on at its next token; suspects run alone."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from tests.coordinator.driving import Drive, alone, check_outputs, make_limits, make_seq
from tp_runtime.coordinator.sequence import SeqKey
from tp_runtime.errors import InvalidRequestError, RequestFailedError
from tp_runtime.messages import unpack_ids


def _busy(run_ahead: int = 2, **limits: Any) -> Drive:
    drive = Drive(make_limits(run_ahead=run_ahead, **limits))
    drive.add(
        make_seq("a", 5, 20, temperature=1.0, seed=1),
        make_seq("b", 30, 9, presence_penalty=1.0),
        make_seq("c", 4, 2),
        make_seq("d", 9, 9, temperature=1.0, seed=2),
        make_seq("e", 3, 9, logprobs=1),
    )
    return drive


@pytest.mark.parametrize("run_ahead", [1, 2, 8])
@pytest.mark.parametrize("rounds", range(12))
def test_a_crash_at_any_step_changes_no_token(rounds, run_ahead):
    drive = _busy(run_ahead)
    for _ in range(rounds):
        drive.round()
    drive.fill_window()
    drive.crash()
    drive.run()
    check_outputs(drive)
    assert len(drive.ends) == 5


def test_crashes_in_a_row_lose_nothing():
    drive = _busy()
    for _ in range(5):
        drive.fill_window()
        drive.crash()
        drive.fill_window()
        drive.commit()
        drive.crash()
    drive.run()
    check_outputs(drive)


def test_sequences_return_in_order_of_arrival_with_their_tokens():
    drive = _busy(max_num_seqs=3)
    for _ in range(6):
        drive.round()
    tokens = {key: list(ids) for key, ids in drive.outputs.items()}
    drive.fill_window()
    drive.crash()
    stats = drive.scheduler.stats()
    assert (stats.running, stats.steps_in_flight, stats.blocks_used, stats.blocks_cached) == (
        0,
    ) * 4
    assert {key: list(ids) for key, ids in drive.outputs.items()} == tokens
    plan = drive.plan()
    assert plan is not None
    assert (plan.generation, plan.step) == (1, 1)
    first = drive.seqs[SeqKey("a")]
    assert unpack_ids(plan.chunks[0].token_ids) == first.tokens.tolist()[:16]
    drive.run()
    check_outputs(drive)


def test_the_answer_of_the_last_token_lost_in_a_crash_is_computed_again():
    drive = Drive(make_limits())
    drive.add(make_seq("a", 3, 2))
    drive.fill_window()
    drive.commit()
    drive.crash()  # its row was already given on
    drive.run()
    check_outputs(drive)
    assert len(drive.outputs[SeqKey("a")]) == 2


def test_new_workers_with_fewer_blocks_fail_only_what_no_longer_fits():
    drive = Drive(make_limits())
    drive.add(make_seq("small", 4, 30), make_seq("large", 40, 9))
    for _ in range(6):
        drive.round()
    drive.limits = dataclasses.replace(drive.limits, num_blocks=6)
    drive.under_way.clear()
    drive.worker = drive.new_worker(1)
    drive._take(drive.scheduler.reset(1, drive.limits))
    assert drive.ends == {SeqKey("large"): "error"}
    assert isinstance(drive.updates[-1].error, RequestFailedError)
    assert "24 that the KV cache holds" in str(drive.updates[-1].error)
    drive.run()
    check_outputs(drive)
    assert len(drive.outputs[SeqKey("small")]) == 21  # clipped: 24 places and one token more


def test_a_sequence_already_as_long_as_the_new_workers_allow_ends_by_length():
    drive = Drive(make_limits(run_ahead=1))
    drive.add(make_seq("a", 4, 30))
    while len(drive.outputs[SeqKey("a")]) < 10:
        drive.round()
    updates = drive.scheduler.reset(1, dataclasses.replace(drive.limits, num_blocks=2))
    assert [update.finish_reason for update in updates] == ["length"]
    assert drive.scheduler.is_idle
    drive.scheduler.check_invariants()


# ---------------------------------------------------------------- resumed by the client


@pytest.mark.parametrize("done", [1, 5, 11])
@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 1.0, "seed": 7},
        {"presence_penalty": 1.0},
        {"min_tokens": 10, "stop_token_ids": [3, 4, 5]},
        {"logprobs": 1},
        {"prompt_logprobs": 1},
    ],
)
def test_a_resumed_request_goes_on_at_the_next_position(done, params):
    drive = Drive(make_limits())
    drive.add(make_seq("a", 6, 12, **params))
    drive.run()
    whole = drive.outputs[SeqKey("a")]
    again = Drive(make_limits())
    again.add(make_seq("a", 6, 12, generated=whole[:done], **params))
    again.run()
    assert again.outputs[SeqKey("a")] == whole
    assert all(update.prompt_logprobs is None for update in again.updates)


def test_a_request_resumed_with_its_last_token_ends_at_once():
    drive = Drive(make_limits(eos_token_ids=frozenset((9,))))
    drive.add(make_seq("length", 3, 4, generated=[1, 2, 3, 4]))
    drive.add(make_seq("stop", 3, 8, generated=[1, 2, 9]))
    drive.add(make_seq("named", 3, 8, generated=[1, 2, 5], stop_token_ids=[5]))
    assert [(u.finish_reason, u.stop_reason, u.token_id) for u in drive.updates] == [
        ("length", None, -1),
        ("stop", None, -1),
        ("stop", 5, -1),
    ]
    assert drive.scheduler.is_idle


def test_an_end_id_that_min_tokens_or_ignore_eos_allows_does_not_end_a_resumed_request():
    drive = Drive(make_limits(eos_token_ids=frozenset((9,))))
    drive.add(make_seq("min", 3, 8, generated=[1, 9], min_tokens=4))
    drive.add(make_seq("ignore", 3, 8, generated=[1, 9], ignore_eos=True))
    assert drive.updates == []
    assert drive.scheduler.stats().waiting == 2


def test_resumed_tokens_that_are_not_in_the_vocabulary_are_refused():
    with pytest.raises(InvalidRequestError, match="not in the vocabulary"):
        Drive(make_limits()).add(make_seq("a", 3, 8, generated=[-1]))


# ---------------------------------------------------------------- suspects


def test_the_sequences_of_the_steps_under_way_are_named():
    drive = _busy(max_num_seqs=2)
    assert drive.scheduler.in_flight.alive_keys() == []
    drive.plan()
    assert drive.scheduler.in_flight.alive_keys() == [SeqKey("a"), SeqKey("b")]
    drive.plan()
    assert drive.scheduler.in_flight.alive_keys(step=1) == [SeqKey("a"), SeqKey("b")]
    assert drive.scheduler.in_flight.alive_keys(step=9) == []
    drive.scheduler.cancel(SeqKey("a"))
    assert drive.scheduler.in_flight.alive_keys() == [SeqKey("b")]


def test_suspects_run_alone_one_after_another_and_then_everybody():
    drive = _busy()
    drive.fill_window()
    drive.crash()
    for name in "ad":
        drive.scheduler.admit_only([SeqKey(name)])
        for _ in range(3):
            drive.round()
        assert drive.scheduler.in_flight.alive_keys() == [SeqKey(name)]
    drive.scheduler.admit_only(None)
    drive.run()
    check_outputs(drive)
    assert len(drive.ends) == 5


def test_restricting_admission_puts_running_rows_back_at_their_place():
    drive = _busy()
    for _ in range(4):
        drive.round()
    drive.scheduler.admit_only([SeqKey("e")])
    while drive.scheduler.in_flight.alive_keys() != [SeqKey("e")]:
        if drive.plan() is None:
            drive.commit()
    drive.scheduler.admit_only(None)
    drive.run()
    check_outputs(drive)


def test_with_nobody_admitted_nothing_runs_and_nothing_is_lost():
    drive = _busy()
    drive.scheduler.admit_only([])
    assert drive.plan() is None
    assert drive.scheduler.stats().waiting == 5
    drive.scheduler.admit_only(None)
    drive.run()
    check_outputs(drive)


def test_a_request_that_kills_the_workers_every_time_fails_alone_and_the_others_finish():
    """The engine's way with a poison request, played through: suspect, replay alone, fail it."""
    drive, poison = _busy(), SeqKey("d")

    def step_with(key: SeqKey) -> bool:
        """Goes on until `key` is in a step; whether that step kills the workers."""
        while key not in drive.scheduler.in_flight.alive_keys():
            if drive.plan() is None:
                drive.commit()
        return poison in drive.scheduler.in_flight.alive_keys()

    suspects = set(drive.seqs)
    for _ in range(2):
        assert step_with(poison)
        suspects &= set(drive.scheduler.in_flight.alive_keys())
        drive.crash()
    assert len(suspects) > 1
    for key in sorted(suspects):
        drive.scheduler.admit_only([key])
        if step_with(key):
            drive.crash()
            drive.scheduler.cancel(key, "error")
            drive.ends[key] = "error"
    drive.scheduler.admit_only(None)
    drive.run()
    check_outputs(drive)
    assert drive.ends.pop(poison) == "error"
    assert set(drive.ends.values()) == {"length"}
    assert drive.outputs[SeqKey("a")] == alone(drive.seqs[SeqKey("a")])
