"""Streaming detokenisation: joined pieces equal the full decode, and no character is torn."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.text.small_tokenizers import KINDS, TEXTS
from tp_runtime.text.detokenizer import REPLACEMENT
from tp_runtime.text.tokenizer import Tokenizer

TOKENIZERS = {name: Tokenizer(make(), {}, None) for name, make in KINDS.items()}
kinds = pytest.mark.parametrize("kind", TOKENIZERS)


def stream(tokenizer: Tokenizer, ids: list[int], sizes: list[int], skip: bool = True) -> list[str]:
    """Pushes `ids` in pieces of the given sizes, over and over; returns all pieces of text."""
    detokenizer = tokenizer.detokenizer(skip)
    pieces, at, turn = [], 0, 0
    while at < len(ids):
        size = sizes[turn % len(sizes)]
        pieces.append(detokenizer.push(ids[at : at + size]))
        at, turn = at + size, turn + 1
    return [*pieces, detokenizer.finish()]


@kinds
@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_joined_pieces_equal_the_full_decode_for_random_ids(kind: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[kind]
    token = st.integers(0, tokenizer.vocab_size + 3) | st.integers(0, min(300, 2**32))
    ids = data.draw(st.lists(token, max_size=60))
    sizes = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    skip = data.draw(st.booleans())
    assert "".join(stream(tokenizer, ids, sizes, skip)) == tokenizer.decode(ids, skip)


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback", "byte_fallback_no_strip"])
@given(text=st.text(max_size=40) | st.permutations(TEXTS).map(" ".join))
@settings(max_examples=150, deadline=None)
def test_real_text_comes_back_and_no_piece_shows_a_torn_character(kind: str, text: str) -> None:
    tokenizer = TOKENIZERS[kind]
    ids = tokenizer.encode(text, add_special_tokens=False)
    pieces = stream(tokenizer, ids, [1])
    assert "".join(pieces) == tokenizer.decode(ids)
    if REPLACEMENT not in text:
        assert not any(REPLACEMENT in piece for piece in pieces)


def test_an_emoji_split_over_tokens_comes_whole_when_its_last_byte_is_there() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    ids = tokenizer.encode("a👍b", add_special_tokens=False)
    detokenizer = tokenizer.detokenizer()
    pieces = [detokenizer.push([i]) for i in ids]
    assert pieces == ["a", "", "", "", "👍", "b"]


def test_text_that_ends_inside_a_character_ends_as_the_full_decode_does() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    ids = tokenizer.encode("a👍", add_special_tokens=False)[:-1]
    pieces = stream(tokenizer, ids, [1])
    assert REPLACEMENT not in "".join(pieces[:-1])
    assert "".join(pieces) == tokenizer.decode(ids) == "a" + REPLACEMENT


def test_a_generated_replacement_character_is_text_like_any_other() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    text = f"x{REPLACEMENT}y{REPLACEMENT}"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert "".join(stream(tokenizer, ids, [1])) == text


def test_byte_tokens_wait_for_the_end_of_their_run_because_one_bad_byte_spoils_it() -> None:
    tokenizer = TOKENIZERS["byte_fallback"]
    byte = {b: 3 + b for b in range(256)}
    good = [byte[b] for b in "你".encode()]
    detokenizer = tokenizer.detokenizer()
    assert detokenizer.push(good) == ""
    assert detokenizer.push([byte[0xFF]]) + detokenizer.finish() == REPLACEMENT * 4
    assert tokenizer.decode([*good, byte[0xFF]]) == REPLACEMENT * 4


def test_the_first_space_is_kept_when_the_text_goes_on_with_a_prompt() -> None:
    tokenizer = TOKENIZERS["byte_fallback"]
    prompt = tokenizer.encode("The capital")
    ids = tokenizer.encode("The capital is")[len(prompt) :]
    alone, going_on = tokenizer.detokenizer(), tokenizer.detokenizer(context=prompt)
    assert alone.push(ids) + alone.finish() == "is"
    assert going_on.push(ids) + going_on.finish() == " is"


@pytest.mark.parametrize("kind", ["unigram", "word_piece"])
def test_window_detokenizer_goes_on_with_a_prompt(kind: str) -> None:
    tokenizer = TOKENIZERS[kind]
    ids = tokenizer.encode(TEXTS[0], add_special_tokens=False)
    for cut in (1, 5, 12):
        detokenizer = tokenizer.detokenizer(context=ids[:cut])
        text = "".join(detokenizer.push([i]) for i in ids[cut:]) + detokenizer.finish()
        assert tokenizer.decode(ids[:cut]) + text == tokenizer.decode(ids)


@kinds
@pytest.mark.parametrize("token_id", [10**6, 2**31 - 1, 2**40, -1])
def test_ids_past_the_vocabulary_are_no_text_and_no_error(kind: str, token_id: int) -> None:
    tokenizer = TOKENIZERS[kind]
    ids = tokenizer.encode("a b", add_special_tokens=False)
    mixed = [token_id, *ids, token_id]
    assert "".join(stream(tokenizer, mixed, [1])) == tokenizer.decode(ids)
    assert tokenizer.decode(mixed) == tokenizer.decode(ids)


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback", "unigram"])
def test_work_per_token_does_not_grow_with_the_text(kind: str) -> None:
    """Quadratic detokenisation shows only in long answers: 30,000 tokens must take well under the
    time that decoding everything again for each token would (minutes)."""
    tokenizer = TOKENIZERS[kind]
    ids = (tokenizer.encode(" ".join(TEXTS), add_special_tokens=False) * 300)[:30_000]
    start = time.perf_counter()
    text = "".join(stream(tokenizer, ids, [1]))
    assert time.perf_counter() - start < 5.0
    assert text == tokenizer.decode(ids)
