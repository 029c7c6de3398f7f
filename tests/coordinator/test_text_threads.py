"""Text threads without sockets: what the engine says becomes messages for the right clients."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Iterator

import msgspec
import pytest

from tests.coordinator.fake_engine import STORY, TOKENIZER, letters, wait_until
from tp_runtime.coordinator.client_request import ClientRequest
from tp_runtime.coordinator.inbox import CancelRequest, Inbox, StopSample, SubmittedRequest
from tp_runtime.coordinator.limits import SchedulerLimits
from tp_runtime.coordinator.sequence import Sequence, SequenceUpdate, SteadyTokens
from tp_runtime.coordinator.text_threads import Outgoing, TextThreads
from tp_runtime.errors import RequestFailedError
from tp_runtime.messages import (
    Accepted,
    Failed,
    Generate,
    Outputs,
    Resume,
    ServerMessage,
    Tokenize,
    Tokenized,
    pack_ids,
    unpack_ids,
)
from tp_runtime.sampling_params import SamplingParams
from tp_runtime.text.detokenizer import Detokenizer

decode = msgspec.msgpack.Decoder(ServerMessage).decode


def steady(rows: list[Sequence], columns: list[list[int]]) -> SteadyTokens:
    return SteadyTokens(_same_rows(*rows), [pack_ids(ids) for ids in columns], len(columns[0]))


@functools.cache
def _same_rows(*rows: Sequence) -> tuple[Sequence, ...]:
    """As the scheduler does, one tuple as long as the rows are the same."""
    return rows


class Harness:
    """Text threads with an inbox nobody drains and a list for what is sent."""

    def __init__(self) -> None:
        self.inbox = Inbox()
        self.sent: list[Outgoing] = []
        self.texts = TextThreads(TOKENIZER, self.inbox, self.sent.extend)

    def submit(self, client: bytes, message: Generate) -> ClientRequest:
        request = ClientRequest(client, message, drawn_seed=5)
        self.texts.submit(request)
        return request

    def submitted(self, client: bytes, request_id: str, **fields: object) -> SubmittedRequest:
        params = fields.pop("params", None) or SamplingParams()
        if "messages" not in fields:
            fields.setdefault("prompt", "x")
        self.submit(client, Generate(request_id, params, **fields))  # type: ignore[arg-type]
        wait_until(lambda: len(self.inbox) > 0)
        (item,) = self.inbox.drain()
        assert isinstance(item, SubmittedRequest)
        return item

    def messages(self, client: bytes) -> list[ServerMessage]:
        return [decode(message.payload) for message in self.sent if message.client == client]

    def settle(self) -> None:
        """Everything put so far was worked on: a marker comes out at the other end."""
        self.texts.ask(b"marker", Tokenize("marker", prompt="x"))
        count = len(self.messages(b"marker"))
        wait_until(lambda: len(self.messages(b"marker")) > count)


@pytest.fixture
def harness() -> Iterator[Harness]:
    harness = Harness()
    yield harness
    harness.texts.close()


def test_one_message_per_client_and_step_holds_all_its_deltas(harness: Harness) -> None:
    mine = [harness.submitted(b"a", f"r{i}").sequences[0] for i in range(3)]
    other = harness.submitted(b"b", "r0").sequences[0]
    harness.texts.updates([SequenceUpdate(seq, STORY[0]) for seq in [*mine, other]])
    wait_until(lambda: len(harness.sent) == 2)
    (for_a,), (for_b,) = harness.messages(b"a"), harness.messages(b"b")
    assert isinstance(for_a, Outputs)
    assert isinstance(for_b, Outputs)
    assert [delta.request_id for delta in for_a.deltas] == ["r0", "r1", "r2"]
    assert [delta.request_id for delta in for_b.deltas] == ["r0"]


def test_accepted_tells_the_seed_and_the_ids_of_a_text_prompt(harness: Harness) -> None:
    text = harness.submitted(b"a", "text", prompt="Hello")
    ids = harness.submitted(b"a", "ids", prompt=None, prompt_token_ids=[1, 2, 3])
    harness.texts.accepted(text)
    harness.texts.accepted(ids)
    wait_until(lambda: len(harness.messages(b"a")) == 2)
    first, second = harness.messages(b"a")
    assert isinstance(first, Accepted)
    assert isinstance(second, Accepted)
    prompt = TOKENIZER.encode("Hello")
    assert (first.seed, first.num_prompt_tokens) == (5, len(prompt))
    assert unpack_ids(first.prompt_token_ids) == prompt
    assert (second.num_prompt_tokens, second.prompt_token_ids) == (3, b"")


def test_samples_are_sequences_of_one_request_with_its_seed(harness: Harness) -> None:
    request = harness.submitted(b"a", "r", params=SamplingParams(n=3, seed=9), timeout_s=30.0)
    assert [seq.key.sample for seq in request.sequences] == [0, 1, 2]
    assert {seq.key.request for seq in request.sequences} == {request.key}
    assert {seq.seed for seq in request.sequences} == {9}
    assert request.deadline is not None
    assert 0 < request.deadline - time.monotonic() <= 30


def test_a_stop_string_is_told_to_the_engine_and_later_tokens_are_dropped(
    harness: Harness,
) -> None:
    ids = letters("ab!cd")
    request = harness.submitted(b"a", "r", params=SamplingParams(stop=["!"]))
    (seq,) = request.sequences
    harness.texts.updates([SequenceUpdate(seq, token) for token in ids])
    wait_until(lambda: len(harness.inbox) > 0)
    assert harness.inbox.drain() == [StopSample(seq.key, 3)]
    harness.texts.updates([SequenceUpdate(seq, ids[0], finish_reason="length")])
    harness.settle()
    (outputs,) = harness.messages(b"a")
    assert isinstance(outputs, Outputs)
    (delta,) = outputs.deltas
    assert (delta.text, delta.finish_reason, delta.stop_reason) == ("ab", "stop", "!")
    assert unpack_ids(delta.token_ids) == ids[:3]
    assert harness.sent[0].ended == ("r",)


def test_a_stop_string_in_the_engines_last_token_needs_no_word_to_it(harness: Harness) -> None:
    request = harness.submitted(b"a", "r", params=SamplingParams(stop=["b"], max_tokens=2))
    (seq,) = request.sequences
    a, b = letters("ab")
    updates = [SequenceUpdate(seq, a), SequenceUpdate(seq, b, finish_reason="length")]
    harness.texts.updates(updates)
    harness.settle()
    assert harness.inbox.drain() == []
    (outputs,) = harness.messages(b"a")
    assert isinstance(outputs, Outputs)
    assert outputs.deltas[-1].stop_reason == "b"


def test_a_request_ends_with_its_last_sample(harness: Harness) -> None:
    request = harness.submitted(b"a", "r", params=SamplingParams(n=2))
    first, second = request.sequences
    harness.texts.updates([SequenceUpdate(first, STORY[0], finish_reason="length")])
    wait_until(lambda: len(harness.sent) == 1)
    harness.texts.updates([SequenceUpdate(second, STORY[0], finish_reason="length")])
    wait_until(lambda: len(harness.sent) == 2)
    assert [message.ended for message in harness.sent] == [(), ("r",)]


def test_a_failed_sample_fails_its_request_and_no_other(harness: Harness) -> None:
    request = harness.submitted(b"a", "bad", params=SamplingParams(n=2))
    other = harness.submitted(b"a", "good")
    error = RequestFailedError("The logits are not finite.")
    harness.texts.updates(
        [
            SequenceUpdate(request.sequences[1], STORY[0]),
            SequenceUpdate(request.sequences[0], finish_reason="error", error=error),
            SequenceUpdate(other.sequences[0], STORY[0]),
        ]
    )
    harness.settle()
    failed, outputs = harness.messages(b"a")
    assert failed == Failed("bad", "failed", "The logits are not finite.")
    assert isinstance(outputs, Outputs)
    assert [delta.request_id for delta in outputs.deltas] == ["good"]
    assert harness.inbox.drain() == [CancelRequest(request.key)]


def test_a_request_cancelled_while_it_is_tokenized_is_never_submitted(harness: Harness) -> None:
    prompts = "word " * 20_000
    requests = [
        harness.submit(b"a", Generate(f"r{i}", SamplingParams(), prompt=prompts)) for i in range(8)
    ]
    for request in requests:
        harness.texts.cancel(request)
    harness.settle()
    submitted: set[object] = set()
    for item in harness.inbox.drain():
        if isinstance(item, SubmittedRequest):
            submitted.add(item.key)
        elif isinstance(item, CancelRequest):
            submitted.discard(item.key)
    assert submitted == set()


def test_updates_of_a_cancelled_request_do_not_reach_one_that_took_its_name(
    harness: Harness,
) -> None:
    first = harness.submit(b"a", Generate("r", SamplingParams(), prompt="x"))
    wait_until(lambda: len(harness.inbox) > 0)
    (old,) = harness.inbox.drain()
    assert isinstance(old, SubmittedRequest)
    harness.texts.cancel(first)
    harness.inbox.drain()
    new = harness.submitted(b"a", "r")
    assert new.key == old.key
    harness.texts.updates([SequenceUpdate(old.sequences[0], STORY[0])])
    harness.settle()
    assert harness.messages(b"a") == []


def test_a_resumed_sample_is_submitted_with_its_tokens(harness: Harness) -> None:
    ids = letters("abc")
    resume = [Resume(1, pack_ids(ids), 3)]
    request = harness.submitted(b"a", "r", params=SamplingParams(n=2), resume=resume)
    (seq,) = request.sequences
    assert (seq.key.sample, seq.generated_ids) == (1, ids)
    harness.texts.updates([SequenceUpdate(seq, TOKENIZER.encode("d")[0])])
    wait_until(lambda: len(harness.sent) == 1)
    (outputs,) = harness.messages(b"a")
    assert isinstance(outputs, Outputs)
    assert (outputs.deltas[0].index, outputs.deltas[0].text) == (1, "d")


def test_a_request_that_was_complete_when_it_was_resumed_ends_without_the_engine(
    harness: Harness,
) -> None:
    resume = [Resume(0, pack_ids(letters("ab")), 1)]
    params = SamplingParams(stop=["b"])
    harness.submit(b"a", Generate("r", params, prompt="x", resume=resume))
    wait_until(lambda: len(harness.sent) == 1)
    (outputs,) = harness.messages(b"a")
    assert isinstance(outputs, Outputs)
    assert (outputs.deltas[0].finish_reason, outputs.deltas[0].text) == ("stop", "")
    assert harness.sent[0].ended == ("r",)
    assert harness.inbox.drain() == []


def test_limits_of_the_engine_are_checked_before_it_is_bothered(harness: Harness) -> None:
    limits = SchedulerLimits(max_model_len=8, vocab_size=50, num_blocks=4, block_size=4)
    harness.texts.check_against(limits)
    bad = Generate("r", SamplingParams(), prompt_token_ids=[60])
    harness.submit(b"a", bad)
    wait_until(lambda: len(harness.sent) == 1)
    (failed,) = harness.messages(b"a")
    assert isinstance(failed, Failed)
    assert "Token id 60 is not in the vocabulary" in failed.message
    assert harness.sent[0].ended == ("r",)


@pytest.mark.parametrize("stop", [[], ["!"]])
def test_a_fault_in_one_text_fails_that_request_alone(
    stop: list[str],
    harness: Harness,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """With stop strings text is made token by token, without them when it is sent."""
    bad = harness.submitted(b"a", "bad", params=SamplingParams(stop=stop))
    good = harness.submitted(b"a", "good")

    class Broken(Detokenizer):
        def push(self, token_ids: object) -> str:
            raise ZeroDivisionError("planted")

        def finish(self) -> str:
            return ""

    request = harness.texts._requests[bad.key]
    (text,) = request.samples.values()
    monkeypatch.setattr(text, "_detokenizer", Broken())
    sequences = [bad.sequences[0], good.sequences[0]]
    harness.texts.updates([SequenceUpdate(seq, STORY[0]) for seq in sequences])
    harness.settle()
    messages = harness.messages(b"a")
    assert any(isinstance(m, Failed) and m.request_id == "bad" for m in messages)
    assert any(isinstance(m, Outputs) and m.deltas[0].request_id == "good" for m in messages)


def test_tokenize_answers_come_back(harness: Harness) -> None:
    harness.texts.ask(b"a", Tokenize("t", messages=[{"role": "user", "content": "hi"}]))
    harness.texts.ask(b"a", Tokenize("u"))
    wait_until(lambda: len(harness.messages(b"a")) == 2)
    answers = {m.request_id: m for m in harness.messages(b"a") if not isinstance(m, Outputs)}  # type: ignore[union-attr]
    assert isinstance(answers["t"], Tokenized)
    assert answers["t"].text == "<|im_start|>hi<|im_end|>:"
    assert isinstance(answers["u"], Failed)


def test_steps_that_piled_up_reach_the_client_as_one_delta_per_sample(harness: Harness) -> None:
    seqs = [harness.submitted(b"a", name, detokenize=False).sequences[0] for name in ("r", "s")]
    harness.texts.updates([SequenceUpdate(seq, 3) for seq in seqs])
    harness.settle()  # the first token is told by itself, with its timings
    before = len(harness.messages(b"a"))
    last = [SequenceUpdate(seqs[0], 8, "stop"), SequenceUpdate(seqs[1], 8)]
    pieces = [steady(seqs, [[4, 5], [4, 5]]), steady(seqs, [[6, 7], [6, 7]]), last]
    harness.texts._take(pieces, alone=True)  # as the output thread does, which is idle here
    harness.texts._flush()
    (message,) = harness.messages(b"a")[before:]
    assert isinstance(message, Outputs)
    tokens: dict[str, list[int]] = {"r": [], "s": []}
    for delta in message.deltas:
        tokens[delta.request_id] += unpack_ids(delta.token_ids)
    assert tokens == {"r": [4, 5, 6, 7, 8], "s": [4, 5, 6, 7, 8]}
    assert [d.finish_reason for d in message.deltas if d.request_id == "r"][-1] == "stop"
    assert len([d for d in message.deltas if d.request_id == "s"]) == 2  # plain, and the rest


def test_steps_handed_over_one_by_one_while_the_thread_was_busy_are_one_delta_too(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fault: each took as long as a step of its own, so that a thread which was behind fell
    back further and further, and clients heard nothing for seconds."""
    seq = harness.submitted(b"a", "r", detokenize=False).sequences[0]
    harness.texts.updates([SequenceUpdate(seq, 3)])
    harness.settle()
    before, send = len(harness.messages(b"a")), harness.texts._send
    busy, go_on = threading.Event(), threading.Event()

    def slow(messages: list[Outgoing]) -> None:
        busy.set()
        assert go_on.wait(5)
        send(messages)

    monkeypatch.setattr(harness.texts, "_send", slow)
    for token_id in (4, 5, 6, 7):
        harness.texts.steps([steady([seq], [[token_id]])])
        assert busy.wait(5)  # with the first; the others pile up
    go_on.set()
    harness.settle()
    outputs = [m for m in harness.messages(b"a")[before:] if isinstance(m, Outputs)]
    ids = [unpack_ids(delta.token_ids) for message in outputs for delta in message.deltas]
    assert ids == [[4], [5, 6, 7]]


def test_a_fault_of_the_output_thread_ends_the_streams_it_would_tear(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    seqs = [harness.submitted(b"a", name, detokenize=False).sequences[0] for name in ("r", "s")]
    other = harness.submitted(b"a", "other", detokenize=False).sequences[0]

    def fail(given: object) -> None:
        raise RuntimeError("planted")

    with monkeypatch.context() as patch:
        patch.setattr(harness.texts, "_take_steady", fail)
        harness.texts.steps([steady(seqs, [[4], [4]])])
        harness.settle()
    harness.texts.updates([SequenceUpdate(other, 4)])
    harness.settle()
    messages = harness.messages(b"a")
    failed = {m.request_id: m.message for m in messages if isinstance(m, Failed)}
    assert set(failed) == {"r", "s"} and "planted" in failed["r"]
    assert any(isinstance(m, Outputs) for m in messages)


def test_a_request_cancelled_among_piled_up_steps_takes_nothing_from_the_others(
    harness: Harness,
) -> None:
    requests = [harness.submitted(b"a", name, detokenize=False) for name in ("r", "s")]
    seqs = [request.sequences[0] for request in requests]
    harness.texts.updates([SequenceUpdate(seq, 3) for seq in seqs])
    harness.settle()
    harness.texts.cancel(harness.texts._requests[requests[0].key])
    harness.texts.steps([steady(seqs, [[4], [4]]), steady(seqs, [[5], [5]])])
    harness.settle()
    deltas = [d for m in harness.messages(b"a") if isinstance(m, Outputs) for d in m.deltas]
    assert [i for d in deltas if d.request_id == "s" for i in unpack_ids(d.token_ids)] == [3, 4, 5]
