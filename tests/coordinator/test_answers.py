"""An answer belongs to the oldest step under way, or the workers are not to be trusted."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tests.coordinator.driving import VOCAB, Drive, check_outputs, make_limits, make_seq
from tests.coordinator.fake_worker import logprob_of
from tp_runtime.coordinator.sequence import SeqKey
from tp_runtime.errors import RequestFailedError, WorkerFailedError
from tp_runtime.messages import Answer, RowLogprobs, TokenLogprobs, pack_ids


def _running(**limits: Any) -> Drive:
    drive = Drive(make_limits(**limits))
    drive.add(make_seq("a", 3, 9), make_seq("b", 3, 9))
    drive.plan()
    return drive


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"generation": 1}, r"answered step 1\.1 where that of step 0\.1 was due"),
        ({"step": 2}, r"answered step 0\.2 where that of step 0\.1 was due"),
        ({"token_ids": pack_ids([1])}, "has 1 token ids; 2 rows"),
        ({"token_ids": pack_ids([1, 2, 3])}, "has 3 token ids; 2 rows"),
        ({"token_ids": b""}, "has 0 token ids"),
        ({"token_ids": pack_ids([1, VOCAB])}, f"token id {VOCAB}; the vocabulary has {VOCAB}"),
        ({"token_ids": pack_ids([1, -2])}, "token id -2"),
        ({"token_ids": pack_ids([-(2**31), 1])}, "token id -2147483648"),
        (
            {"logprobs": [RowLogprobs(7, None, [], [TokenLogprobs(logprob_of(1, 2), [])])]},
            "logprobs of entry 7",
        ),
    ],
)
def test_an_answer_that_does_not_fit_its_step_is_a_worker_failure(changes, message):
    drive = _running()
    with pytest.raises(WorkerFailedError, match=message):
        drive.scheduler.commit(msgspec.structs.replace(drive.under_way[0], **changes))
    drive.crash()  # what the engine does then
    drive.run()
    check_outputs(drive)


def test_an_answer_nobody_waits_for_is_a_worker_failure():
    drive = Drive(make_limits())
    with pytest.raises(WorkerFailedError, match="where no answer was due"):
        drive.scheduler.commit(Answer(0, 1, b""))


@pytest.mark.parametrize("ids", [[-1, 3], [VOCAB, 3], [3]])
def test_steady_answers_are_taken_together_up_to_the_first_that_is_not(ids):
    drive = Drive(make_limits(run_ahead=8, max_model_len=200, num_blocks=200))
    drive.add(make_seq("a", 3, 60), make_seq("b", 3, 60))
    drive.fill_window()
    drive.commit()
    assert drive.fill_window() == 8
    drive.commit(3)
    assert drive.num_steady == 3
    answers = list(drive.under_way)
    answers[3] = msgspec.structs.replace(answers[3], token_ids=pack_ids(ids))
    known = drive.scheduler.find(SeqKey("b")).num_generated
    pieces = drive.scheduler.commit_all(answers)
    assert next(pieces).num_steps == 3
    if ids == [-1, 3]:  # the row fails, its later tokens are dropped, and the other goes on
        rest = [update for piece in pieces for update in piece]
        assert [u.seq.key.request for u in rest] == ["a", "b", "b"]
        assert isinstance(rest[0].error, RequestFailedError)
    else:
        with pytest.raises(WorkerFailedError):
            next(pieces)
        assert drive.scheduler.find(SeqKey("b")).num_generated == known + 3


@pytest.mark.parametrize("together", [1, 2, 5])
def test_answers_taken_together_bring_what_they_bring_one_by_one(together):
    drive = Drive(make_limits(run_ahead=8, max_model_len=200, num_blocks=200))
    drive.add(make_seq("a", 3, 40), make_seq("b", 9, 25), make_seq("c", 2, 7))
    while drive.fill_window():
        drive.commit(min(together, len(drive.under_way)))
        drive.scheduler.check_invariants()
    assert drive.num_steady > 20
    check_outputs(drive)
    assert set(drive.ends.values()) == {"length"}


@pytest.mark.parametrize("run_ahead", [1, 2])
def test_a_row_whose_logits_are_not_finite_fails_alone(run_ahead):
    drive = Drive(make_limits(run_ahead=run_ahead), not_finite=[49])
    drive.add(make_seq("good", 5, 12), make_seq("bad", [1, 2, 49], 12), make_seq("fine", 6, 12))
    drive.run()
    check_outputs(drive)
    assert drive.ends == {
        SeqKey("good"): "length",
        SeqKey("bad"): "error",
        SeqKey("fine"): "length",
    }
    (failed,) = [update for update in drive.updates if update.error is not None]
    assert isinstance(failed.error, RequestFailedError)
    assert "position 3 are not finite" in str(failed.error)
    assert failed.token_id == -1
    assert drive.outputs[SeqKey("bad")] == []


def test_a_sequence_that_fails_later_keeps_the_tokens_it_got():
    drive = Drive(make_limits())
    drive.add(make_seq("a", 4, 20))
    drive.run()
    tokens = drive.outputs[SeqKey("a")]
    drive = Drive(make_limits(), not_finite=[tokens[3]])
    drive.add(make_seq("a", 4, 20))
    drive.run()
    assert drive.ends == {SeqKey("a"): "error"}
    assert drive.outputs[SeqKey("a")] == tokens[: tokens.index(tokens[3]) + 1]


def _first_tokens(**params: Any) -> list[int]:
    drive = Drive(make_limits())
    drive.add(make_seq("a", 5, 12, **params))
    drive.run()
    return drive.outputs[SeqKey("a")]


def test_several_end_ids_stop_at_the_first_that_comes():
    tokens = _first_tokens()
    drive = Drive(make_limits(eos_token_ids=frozenset((tokens[6], tokens[4]))))
    drive.add(make_seq("a", 5, 12))
    drive.run()
    end = min(tokens.index(tokens[4]), tokens.index(tokens[6]))
    assert drive.outputs[SeqKey("a")] == tokens[: end + 1]  # the end id is among the tokens
    assert drive.updates[-1].finish_reason == "stop"
    assert drive.updates[-1].stop_reason is None


def test_a_stop_token_id_is_named_and_works_beside_ignore_eos():
    tokens = _first_tokens()
    drive = Drive(make_limits(eos_token_ids=frozenset((tokens[1],))))
    drive.add(make_seq("a", 5, 12, ignore_eos=True, stop_token_ids=[tokens[4]]))
    drive.run()
    assert drive.outputs[SeqKey("a")] == tokens[: tokens.index(tokens[4]) + 1]
    assert (drive.updates[-1].finish_reason, drive.updates[-1].stop_reason) == ("stop", tokens[4])


def test_an_end_id_as_the_last_token_is_a_stop_and_not_the_length():
    tokens = _first_tokens()
    last = tokens.index(tokens[4])
    drive = Drive(make_limits(eos_token_ids=frozenset((tokens[4],))))
    drive.add(make_seq("a", 5, last + 1))
    drive.run()
    assert drive.ends == {SeqKey("a"): "stop"}


def test_an_end_id_before_min_tokens_does_not_stop():
    drive = Drive(make_limits(eos_token_ids=frozenset((7,)), run_ahead=1))
    drive.add(make_seq("a", 3, 5, min_tokens=2))
    ends = []
    for _ in range(3):  # a worker that draws the blocked id all the same
        plan = drive.scheduler.plan()
        assert plan is not None
        (update,) = drive.scheduler.commit(Answer(0, plan.step, pack_ids([7])))
        ends.append(update.finish_reason)
    assert ends == [None, None, "stop"]


@pytest.mark.parametrize("max_tokens", [1, 2])
def test_few_tokens(max_tokens):
    drive = Drive(make_limits())
    drive.add(make_seq("a", 5, max_tokens), make_seq("b", 20, max_tokens))
    drive.run()
    check_outputs(drive)
    assert len(drive.outputs[SeqKey("a")]) == max_tokens


def test_logprobs_go_with_their_token_in_mixed_batches():
    drive = Drive(make_limits())
    drive.add(
        make_seq("a", 5, 9, logprobs=1), make_seq("b", 5, 9), make_seq("c", 30, 4, logprobs=0)
    )
    drive.run()
    check_outputs(drive)
    count = {"a": 0, "b": 0, "c": 0}
    for update in drive.updates:
        seq, name = update.seq, str(update.seq.key.request)
        if name == "b":
            assert update.logprobs is None
        else:
            position = seq.prompt_len + count[name]
            assert update.logprobs is not None
            assert update.logprobs.chosen == logprob_of(position, update.token_id)
        count[name] += 1
    assert count == {"a": 9, "b": 9, "c": 4}


@pytest.mark.parametrize("prompt", [1, 2, 15, 16, 17, 40])
def test_prompt_logprobs_of_all_chunks_come_with_the_first_token(prompt):
    drive = Drive(make_limits())
    seq = make_seq("a", prompt, 3, prompt_logprobs=0)
    drive.add(make_seq("other", 4, 9), seq)
    drive.run()
    check_outputs(drive)
    found = [update for update in drive.updates if update.prompt_logprobs is not None]
    assert [update.token_id for update in found] == drive.outputs[seq.key][:1]
    entries = found[0].prompt_logprobs
    assert entries is not None
    assert entries[0] is None
    wanted = [logprob_of(p, seq.tokens[p]) for p in range(1, prompt)]
    assert [entry.chosen for entry in entries[1:] if entry is not None] == wanted


@pytest.mark.parametrize("prompt", [1, 16, 40])
def test_prompt_logprobs_without_any_token_to_generate(prompt):
    drive = Drive(make_limits())
    drive.add(make_seq("a", prompt, 0, prompt_logprobs=0))
    drive.run()
    (update,) = drive.updates
    assert (update.token_id, update.finish_reason) == (-1, "length")
    assert update.prompt_logprobs is not None
    assert len(update.prompt_logprobs) == prompt
    assert not any(chunk.sample for plan in drive.plans for chunk in plan.chunks)


def test_missing_prompt_logprobs_are_a_worker_failure():
    """And no other token of that answer is taken: nobody would ever be told of it."""
    drive = Drive(make_limits())
    drive.add(make_seq("first", 5, 3), make_seq("a", 5, 3, prompt_logprobs=0))
    drive.plan()
    with pytest.raises(WorkerFailedError, match="0 prompt logprobs for a prompt of 5 tokens"):
        drive.scheduler.commit(msgspec.structs.replace(drive.under_way[0], logprobs=[]))
    drive.crash()
    drive.run()
    check_outputs(drive)
