"""Grammar threads: requests with a grammar on their way to the engine, masks on their way back."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import msgspec
import pytest

from tests.coordinator.fake_engine import TOKENIZER, wait_until
from tp_runtime.coordinator.client_request import ClientRequest
from tp_runtime.coordinator.inbox import Inbox, MaskReady, SubmittedRequest
from tp_runtime.coordinator.sequence import Sequence
from tp_runtime.coordinator.text_threads import Outgoing, TextThreads
from tp_runtime.errors import RequestFailedError
from tp_runtime.messages import Failed, Generate, Outputs, Resume, ServerMessage, pack_ids
from tp_runtime.sampling_params import SamplingParams, StructuredOutputsParams
from tp_runtime.text.grammar import GrammarCompiler, TokenMask

decode = msgspec.msgpack.Decoder(ServerMessage).decode
DIGITS = SamplingParams(structured_outputs=StructuredOutputsParams(regex="[0-9]{1,3}"))
SEVEN = TOKENIZER.encode("7", add_special_tokens=False)[0]
LETTER = TOKENIZER.encode("x", add_special_tokens=False)[0]


class Harness:
    """Text threads whose inbox nobody drains but the test."""

    def __init__(self, compiler: GrammarCompiler | None) -> None:
        self.inbox = Inbox()
        self.sent: list[Outgoing] = []
        self.texts = TextThreads(TOKENIZER, self.inbox, self.sent.extend, compiler)

    def submit(self, params: SamplingParams, name: str = "r", **fields: object) -> None:
        message = Generate(name, params, prompt="x", **fields)  # type: ignore[arg-type]
        self.texts.submit(ClientRequest(b"c", message, drawn_seed=5))

    def sequences(self) -> list[Sequence]:
        item = self.next()
        assert isinstance(item, SubmittedRequest)
        return item.sequences

    def next(self) -> object:
        wait_until(lambda: len(self.inbox) > 0)
        (item,) = self.inbox.drain()
        return item

    def after(self, seq: Sequence, token_id: int) -> object:
        """The mask that comes when `seq` got this token."""
        seq.tokens.append(token_id)
        self.texts.grammars.advance([seq])
        item = self.next()
        assert isinstance(item, MaskReady)
        assert item.seq is seq
        return item.mask

    def refusal(self) -> Failed:
        wait_until(lambda: self.sent)
        message = decode(self.sent.pop().payload)
        assert isinstance(message, Failed)
        return message


@pytest.fixture
def harness() -> Iterator[Harness]:
    harness = Harness(GrammarCompiler(TOKENIZER, [1], 420))
    yield harness
    harness.texts.close()


def test_a_request_reaches_the_engine_with_its_first_mask(harness: Harness) -> None:
    harness.submit(msgspec.structs.replace(DIGITS, n=3))
    seqs = harness.sequences()
    assert len(seqs) == 3
    assert len({id(seq.grammar) for seq in seqs}) == 3
    for seq in seqs:
        assert isinstance(seq.mask, TokenMask)
        assert pack_ids([SEVEN]) in seq.mask.ids


def test_every_token_brings_the_next_mask_until_nothing_may_follow(harness: Harness) -> None:
    harness.submit(DIGITS)
    (seq,) = harness.sequences()
    assert isinstance(harness.after(seq, SEVEN), TokenMask)
    assert isinstance(harness.after(seq, SEVEN), TokenMask)
    assert harness.after(seq, SEVEN) is None


def test_a_token_against_the_grammar_is_an_error_of_that_request(harness: Harness) -> None:
    harness.submit(DIGITS)
    (seq,) = harness.sequences()
    assert isinstance(harness.after(seq, LETTER), RequestFailedError)


def test_a_panic_of_the_library_ends_one_request_and_no_thread(harness: Harness) -> None:
    class Panic(BaseException):
        pass

    class Broken:
        def consume(self, ids: list[int]) -> None:
            raise Panic("planted")

    harness.submit(DIGITS)
    (seq,) = harness.sequences()
    grammar, seq.grammar = seq.grammar, Broken()  # type: ignore[assignment]
    for _ in range(4):  # more than there are threads
        error = harness.after(seq, SEVEN)
        assert isinstance(error, RequestFailedError)
        assert "planted" in str(error)
    seq.grammar = grammar
    assert isinstance(harness.after(seq, SEVEN), TokenMask)


def test_what_cannot_be_compiled_is_refused_before_the_engine_hears_of_it(harness: Harness) -> None:
    wish = StructuredOutputsParams(json={"type": "nothing"})
    harness.submit(SamplingParams(structured_outputs=wish))
    failed = harness.refusal()
    assert (failed.code, "Invalid type" in failed.message) == ("invalid_request", True)
    assert not any(isinstance(item, SubmittedRequest) for item in harness.inbox.drain())


def test_a_grammar_without_any_text_is_refused(harness: Harness) -> None:
    harness.submit(SamplingParams(structured_outputs=StructuredOutputsParams(regex="")))
    assert "no text" in harness.refusal().message


def test_a_server_without_grammars_says_so() -> None:
    harness = Harness(None)
    harness.submit(DIGITS)
    assert "no tokenizer" in harness.refusal().message
    harness.texts.close()


def test_a_schema_that_takes_long_holds_up_neither_other_requests_nor_masks(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness.submit(DIGITS, "first")
    (seq,) = harness.sequences()
    go_on, begun = threading.Event(), threading.Event()
    compile_ = GrammarCompiler.compile

    def slow(*args: object, **kwargs: object) -> object:
        begun.set()
        assert go_on.wait(10)
        return compile_(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(GrammarCompiler, "compile", slow)
    harness.submit(DIGITS, "slow")
    assert begun.wait(10)
    harness.submit(SamplingParams(), "plain")
    assert harness.sequences()[0].key.request.request_id == "plain"  # type: ignore[attr-defined]
    assert isinstance(harness.after(seq, SEVEN), TokenMask)
    go_on.set()
    assert harness.sequences()[0].key.request.request_id == "slow"  # type: ignore[attr-defined]


def test_a_resumed_sample_gets_the_mask_after_its_tokens(harness: Harness) -> None:
    harness.submit(DIGITS, "whole")
    (whole,) = harness.sequences()
    wanted = harness.after(whole, SEVEN)
    harness.submit(DIGITS, "again", resume=[Resume(0, pack_ids([SEVEN]), 1)])
    (again,) = harness.sequences()
    assert again.mask == wanted


def test_a_resumed_sample_that_is_complete_ends_at_once(harness: Harness) -> None:
    harness.submit(DIGITS, resume=[Resume(0, pack_ids([SEVEN] * 3), 3)])
    wait_until(lambda: harness.sent)
    message = decode(harness.sent[0].payload)
    assert isinstance(message, Outputs)
    assert message.deltas[0].finish_reason == "stop"
    assert len(harness.inbox) == 0
