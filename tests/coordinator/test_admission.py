"""Requests that can never run are refused on arrival; parameters are resolved once."""

from __future__ import annotations

from typing import Any

import pytest

from tests.coordinator.driving import VOCAB, Drive, check_outputs, make_limits, make_seq
from tp_runtime.coordinator.admission import prepare, resolve_sampling, sample_seed
from tp_runtime.coordinator.scheduler import Scheduler
from tp_runtime.coordinator.sequence import SeqKey, Sequence
from tp_runtime.errors import InvalidRequestError, OverloadedError
from tp_runtime.messages import RowSampling, unpack_ids
from tp_runtime.sampling_params import SamplingParams


@pytest.mark.parametrize(
    ("seq", "message"),
    [
        (make_seq("r", []), "prompt is empty"),
        (make_seq("r", [1, -1]), "Token id -1 is not in the vocabulary"),
        (make_seq("r", [1, VOCAB]), f"Token id {VOCAB} is not in the vocabulary"),
        (make_seq("r", [1] * 64), "64 tokens, which leaves no room to generate"),
        (make_seq("r", [1] * 65, 0), "65 tokens"),
        (make_seq("r", [1] * 41), "more than the 40 that the KV cache holds"),
        (make_seq("r", stop_token_ids=[3, VOCAB]), "stop_token_ids holds token id 50"),
        (make_seq("r", stop_token_ids=[-1]), "stop_token_ids holds token id -1"),
        (make_seq("r", logit_bias={VOCAB: 1.0}), "logit_bias holds token id 50"),
        (make_seq("r", top_p=0.0), "top_p"),
        (make_seq("r", generated=[1, 2, 3, 4, 5]), "resumed with 5 generated tokens"),
        (make_seq("r", generated=[VOCAB]), "not in the vocabulary"),
    ],
)
def test_what_can_never_run_is_refused_and_nobody_is_disturbed(seq, message):
    drive = Drive(make_limits(num_blocks=10))
    drive.add(make_seq("other", 5, 6))
    drive.fill_window()
    before = drive.scheduler.stats()
    with pytest.raises(InvalidRequestError, match=message):
        drive.scheduler.add(seq)
    assert drive.scheduler.stats() == before
    drive.run()
    check_outputs(drive)


@pytest.mark.parametrize("ids", [[2**31], [-(2**40)], [1.5], ["a"], [None]])
def test_ids_that_are_no_32_bit_integers_are_refused(ids):
    with pytest.raises(InvalidRequestError, match="Token ids must be integers"):
        Sequence(SeqKey("r"), ids, SamplingParams())


def test_a_request_id_in_use_is_refused():
    scheduler = Scheduler(make_limits())
    scheduler.add(make_seq("r"))
    with pytest.raises(InvalidRequestError, match="in use"):
        scheduler.add(make_seq("r"))
    with pytest.raises(InvalidRequestError, match="in use"):
        scheduler.add_all([make_seq("s"), make_seq("s")])
    assert scheduler.stats().waiting == 1


def test_the_queue_is_bounded_and_free_rows_do_not_count():
    scheduler = Scheduler(make_limits(max_num_seqs=2, max_num_queued_requests=3))
    for i in range(5):
        scheduler.add(make_seq(i))
    with pytest.raises(OverloadedError, match="5 requests wait already"):
        scheduler.add(make_seq("late"))
    assert scheduler.plan() is not None  # two of them run now
    with pytest.raises(OverloadedError, match="at most 3"):
        scheduler.add(make_seq("late"))
    scheduler.cancel(SeqKey(4))
    scheduler.add(make_seq("late"))


def test_samples_of_a_request_are_queued_all_or_none():
    scheduler = Scheduler(make_limits(max_num_seqs=1, max_num_queued_requests=2))
    with pytest.raises(OverloadedError):
        scheduler.add_all([make_seq("r", sample=i) for i in range(4)])
    assert scheduler.stats().waiting == 0
    scheduler.add_all([make_seq("r", sample=i) for i in range(3)])
    assert scheduler.stats().waiting == 3


def test_max_tokens_zero_ends_at_once_without_a_token():
    drive = Drive(make_limits())
    drive.add(make_seq("r", 5, 0))
    assert drive.ends == {SeqKey("r"): "length"}
    assert drive.outputs == {SeqKey("r"): []}
    assert drive.scheduler.is_idle
    assert drive.plan() is None


def test_max_tokens_zero_is_not_refused_by_a_full_queue():
    scheduler = Scheduler(make_limits(max_num_seqs=1, max_num_queued_requests=1))
    scheduler.add(make_seq(1))
    scheduler.add(make_seq(2))
    assert scheduler.add(make_seq("r", 5, 0))[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "num_blocks", "generated"),
    [
        (60, 100, 64, 4),  # max_model_len 64
        (60, None, 64, 4),
        (63, None, 64, 1),
        (10, 100, 5, 11),  # 20 places; the last token needs none
        (20, None, 5, 1),
    ],
)
def test_max_tokens_is_clipped_to_what_fits(prompt, max_tokens, num_blocks, generated):
    drive = Drive(make_limits(num_blocks=num_blocks))
    drive.add(make_seq("r", prompt, max_tokens))
    drive.run()
    check_outputs(drive)
    assert drive.ends[SeqKey("r")] == "length"
    assert len(drive.outputs[SeqKey("r")]) == generated


def test_a_request_as_long_as_the_pool_does_not_block_the_queue():
    drive = Drive(make_limits(num_blocks=5))
    drive.add(make_seq("small", 3, 5), make_seq("large", 20, 1), make_seq("after", 3, 5))
    drive.run()
    check_outputs(drive)
    assert len(drive.ends) == 3


# ---------------------------------------------------------------- parameters


def _resolve(seq: Sequence, **limits: Any) -> RowSampling:
    prepare(seq, make_limits(**limits))
    assert seq.sampling is not None
    return seq.sampling


def test_greedy_switches_truncation_off_and_keeps_penalties():
    row = _resolve(
        make_seq(
            "r",
            temperature=1e-7,
            top_k=5,
            top_p=0.5,
            min_p=0.1,
            presence_penalty=0.5,
            logit_bias={3: -1.0, 9: 2.0},
            logprobs=2,
        )
    )
    assert row == RowSampling(
        temperature=0.0,
        seed=0,
        presence_penalty=0.5,
        bias_ids=row.bias_ids,
        bias_values=[-1.0, 2.0],
        logprobs=2,
    )
    assert unpack_ids(row.bias_ids) == [3, 9]


@pytest.mark.parametrize(("top_k", "resolved"), [(-1, 0), (0, 0), (7, 7), (VOCAB, 0), (10**6, 0)])
def test_top_k_that_cuts_nothing_is_off(top_k, resolved):
    assert _resolve(make_seq("r", temperature=0.7, top_k=top_k)).top_k == resolved


def test_min_tokens_blocks_every_end_id_below_a_position():
    row = _resolve(
        make_seq("r", [5] * 10, 8, min_tokens=3, stop_token_ids=[9]),
        eos_token_ids=frozenset((2, 4)),
    )
    assert row.min_position == 13
    assert unpack_ids(row.blocked_ids) == [2, 4, 9]


def test_without_end_ids_nothing_is_blocked():
    row = _resolve(
        make_seq("r", max_tokens=8, min_tokens=3, ignore_eos=True), eos_token_ids=frozenset((2,))
    )
    assert (row.min_position, row.blocked_ids) == (0, b"")


def test_samples_draw_with_following_seeds_that_wrap():
    rows = [_resolve(make_seq("r", seed=2**63 - 1, sample=i, temperature=1.0)) for i in range(3)]
    assert [row.seed for row in rows] == [2**63 - 1, -(2**63), -(2**63) + 1]
    assert sample_seed(5, 2) == 7


def test_samples_of_a_seeded_request_differ_from_each_other():
    drive = Drive(make_limits())
    drive.add(*[make_seq("r", 6, 8, sample=i, temperature=1.0, seed=3) for i in range(3)])
    drive.run()
    check_outputs(drive)
    assert len({tuple(ids) for ids in drive.outputs.values()}) == 3


def test_preparing_twice_under_the_same_limits_changes_nothing():
    limits, seq = make_limits(), make_seq("r", 9)
    prepare(seq, limits)
    sampling, hashes = seq.sampling, list(seq.hashes)
    prepare(seq, limits)
    assert seq.sampling is sampling
    assert seq.hashes == hashes
    assert resolve_sampling(seq, limits) == sampling
