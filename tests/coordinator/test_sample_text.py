"""One sample's text: end ids, stop strings, min_tokens, portions, resumption."""

from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.coordinator.fake_engine import END_ID, TOKENIZER, letters
from tp_runtime.coordinator.sample_text import SampleText
from tp_runtime.coordinator.sequence import SeqKey, Sequence, SequenceUpdate
from tp_runtime.messages import Logprob, SampleDelta, TokenLogprobs, unpack_ids
from tp_runtime.sampling_params import SamplingParams

SEQ = Sequence(SeqKey("r"), [1], SamplingParams())


def sample(flush_s: float = 0.0, skip_special_tokens: bool = True, **params: object) -> SampleText:
    detokenizer = TOKENIZER.detokenizer(skip_special_tokens)
    return SampleText("r", 0, SamplingParams(**params), detokenizer, flush_s)  # type: ignore[arg-type]


def feed(text: SampleText, ids: list[int], finish: str | None = None) -> list[SampleDelta]:
    """One token per step and one delta after each, the last token with the finish reason."""
    deltas = []
    for i, token in enumerate(ids):
        reason = finish if i == len(ids) - 1 else None
        ended = text.add(SequenceUpdate(SEQ, token, finish_reason=reason))
        deltas.append(text.delta(float(i)))
        if ended:
            break
    return deltas


def joined(deltas: list[SampleDelta]) -> tuple[str, list[int]]:
    return "".join(d.text for d in deltas), [i for d in deltas for i in unpack_ids(d.token_ids)]


def encode(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


def test_the_end_id_is_a_token_but_not_text() -> None:
    ids = [*encode("done"), END_ID]
    for skip in (True, False):
        deltas = feed(sample(skip_special_tokens=skip), ids, "stop")
        assert joined(deltas) == ("done", ids)
        assert deltas[-1].finish_reason == "stop"


def test_the_end_id_is_shown_when_asked_for() -> None:
    text = sample(skip_special_tokens=False, include_stop_str_in_output=True)
    assert joined(feed(text, [*encode("done"), END_ID], "stop"))[0] == "done</s>"


def test_an_end_id_that_was_ignored_is_skipped_like_any_special_token() -> None:
    ids = [*encode("a"), END_ID, *encode("b")]
    assert joined(feed(sample(), ids, "length"))[0] == "ab"
    assert joined(feed(sample(skip_special_tokens=False), ids, "length"))[0] == "a</s>b"


def test_a_stop_string_over_several_tokens_ends_the_sample_at_its_last_token() -> None:
    text = sample(stop=["xyz"])
    ids = encode("ab xyz more")
    deltas = feed(text, ids)
    shown, taken = joined(deltas)
    assert shown == "ab "
    assert TOKENIZER.decode(taken).startswith("ab xyz")
    assert text.num_tokens == len(taken) < len(ids)
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == ("stop", "xyz")


def test_text_held_back_comes_at_the_end() -> None:
    deltas = feed(sample(stop=["xyz"]), encode("ab xy"), "length")
    assert deltas[-1].finish_reason == "length"
    assert joined(deltas)[0] == "ab xy"
    assert joined(deltas[:-1])[0] == "ab "


def test_a_stop_string_in_the_last_bytes_counts() -> None:
    """Bytes that wait for the end of a character are text in the end, and may be a stop string."""
    ids = encode("ab你")[:-1]
    deltas = feed(sample(stop=["\ufffd"]), ids, "length")
    assert (joined(deltas)[0], deltas[-1].finish_reason) == ("ab", "stop")


def test_no_stop_string_ends_within_the_first_min_tokens() -> None:
    ids = letters("abababab")
    for least in range(8):
        text = sample(stop=["b"], min_tokens=least)
        feed(text, ids, "length")
        assert text.num_tokens == next(n for n in range(1, 9) if n > least and n % 2 == 0)


def test_stop_strings_do_not_depend_on_how_many_tokens_a_step_brings() -> None:
    ids = encode("one STOP two STOP")
    single, several = sample(stop=["STOP"]), sample(stop=["STOP"])
    text = joined(feed(single, ids))[0]
    for token in ids:
        if several.add(SequenceUpdate(SEQ, token)):
            break
    delta = several.delta(0.0)
    assert (delta.text, several.num_tokens) == (text, single.num_tokens)


def test_one_delta_at_the_end_when_nothing_is_streamed() -> None:
    text = sample(flush_s=math.inf)
    ids = encode("Hello wörld")
    for i, token in enumerate(ids):
        last = i == len(ids) - 1
        text.add(SequenceUpdate(SEQ, token, finish_reason="length" if last else None))
        assert text.due(1e9 * i) == last
    delta = text.delta(0.0)
    assert (delta.text, unpack_ids(delta.token_ids)) == ("Hello wörld", ids)


def test_deltas_are_flush_s_apart() -> None:
    text = sample(flush_s=0.5)
    assert text.due(10.0)
    text.delta(10.0)
    assert not text.due(10.4)
    assert text.due(10.5)


def test_logprobs_and_timings_go_with_the_next_delta_once() -> None:
    text = sample(logprobs=1)
    entry = TokenLogprobs(Logprob(5, -1.0, 1), [])
    text.add(SequenceUpdate(SEQ, 5, logprobs=entry, prompt_logprobs=[None, entry]))
    text.set_timings(3, 0.1, 0.2)
    first, second = text.delta(0.0), text.delta(1.0)
    assert (first.logprobs, first.prompt_logprobs) == ([entry], [None, entry])
    assert (first.num_cached_tokens, first.queue_s, first.first_token_s) == (3, 0.1, 0.2)
    assert (second.logprobs, second.prompt_logprobs, second.first_token_s) == (None, None, 0.0)


def test_without_detokenizer_there_are_ids_only() -> None:
    text = SampleText("r", 0, SamplingParams(), None)
    assert joined(feed(text, [1, 2, 3], "length")) == ("", [1, 2, 3])


tokens = st.integers(0, TOKENIZER.vocab_size + 2)


@given(
    ids=st.lists(tokens, min_size=1, max_size=40),
    stops=st.lists(st.text("ab \ufffd", min_size=1, max_size=3), max_size=3),
    cut=st.integers(0, 40),
    min_tokens=st.integers(0, 5),
    include=st.booleans(),
    finish=st.sampled_from(["length", "stop"]),
)
@settings(max_examples=400, deadline=None)
def test_a_resumed_sample_goes_on_exactly_where_its_client_left_off(
    ids: list[int], stops: list[str], cut: int, min_tokens: int, include: bool, finish: str
) -> None:
    def make() -> SampleText:
        return sample(stop=stops, min_tokens=min_tokens, include_stop_str_in_output=include)

    undisturbed = make()
    whole = feed(undisturbed, ids, finish)
    before = whole[: min(cut, len(whole) - 1)]
    text_before, ids_before = joined(before)
    resumed = make()
    resumed.resume(ids_before, len(text_before))
    assert resumed.finish_reason is None
    after = feed(resumed, ids[len(ids_before) :], finish)
    assert joined(before + after) == joined(whole)
    last, expected = after[-1], whole[-1]
    assert (last.finish_reason, last.stop_reason) == (expected.finish_reason, expected.stop_reason)
    assert resumed.num_tokens == undisturbed.num_tokens


def test_ids_that_already_hold_a_stop_string_end_the_sample_on_resumption() -> None:
    text = sample(stop=["b"])
    text.resume(letters("ab"), 0)
    delta = text.delta(0.0)
    assert (text.finish_reason, delta.text, delta.token_ids) == ("stop", "a", b"")
