"""Stop strings over token borders, held-back prefixes, leftmost match."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tp_runtime.text.stop_strings import StopMatch, StopStrings


def run(stops: list[str], pieces: list[str], include: bool = False) -> tuple[list[str], str | None]:
    """The texts released for each piece, the held-back rest last, and the stop that matched."""
    matcher = StopStrings(stops, include)
    out: list[str] = []
    for piece in pieces:
        result = matcher.push(piece)
        if isinstance(result, StopMatch):
            return [*out, result.text], result.stop
        out.append(result)
    return [*out, matcher.finish()], None


def test_a_stop_string_over_three_pieces_is_found_and_not_shown() -> None:
    assert run(["STOP"], ["one S", "TO", "P two"]) == (["one ", "", ""], "STOP")


def test_a_prefix_is_held_back_and_released_when_it_does_not_go_on() -> None:
    assert run(["STOP"], ["a ST", "AR"]) == (["a ", "STAR", ""], None)


def test_a_prefix_at_the_end_of_the_text_is_released_there() -> None:
    assert run(["</answer>"], ["yes</ans"]) == (["yes", "</ans"], None)


def test_only_the_longest_possible_prefix_is_held() -> None:
    assert run(["aab"], ["aaa", "a", "b"]) == (["a", "a", ""], "aab")


def test_the_leftmost_of_several_matches_in_one_piece_wins_whatever_their_order() -> None:
    for stops in (["cd", "b"], ["b", "cd"]):
        assert run(stops, ["abcde"]) == (["a"], "b")
    assert run(["cd", "bcde"], ["abcdef"]) == (["a"], "bcde")


def test_of_two_matches_at_one_place_the_shorter_ends_first() -> None:
    assert run(["ab", "a"], ["xab"], include=True) == (["xa"], "a")


def test_the_match_completed_by_an_earlier_token_wins() -> None:
    assert run(["abcd", "bc"], ["abc", "d"]) == (["a"], "bc")


def test_include_in_output_shows_the_stop_string_and_nothing_after_it() -> None:
    assert run(["P"], ["STO", "P more"], include=True) == (["STO", "P"], "P")


def test_no_match_may_end_in_text_of_the_first_min_tokens_but_may_begin_there() -> None:
    matcher = StopStrings(["ab"])
    assert matcher.push("xab", may_match=False) == "xab"
    assert matcher.push("ya", may_match=False) == "y"
    assert matcher.push("b!") == StopMatch("ab", "")


def test_a_stop_string_of_several_scripts() -> None:
    assert run(["。終"], ["東京。", "終わり"]) == (["東京", ""], "。終")


alphabet = st.text("ab", min_size=1, max_size=4)


@given(
    stops=st.lists(alphabet, min_size=1, max_size=4),
    pieces=st.lists(st.text("ab", max_size=3), max_size=12),
    include=st.booleans(),
    blocked=st.integers(0, 6),
)
@settings(max_examples=600, deadline=None)
def test_equals_a_search_of_the_whole_text_after_each_piece(
    stops: list[str], pieces: list[str], include: bool, blocked: int
) -> None:
    """The reference looks at all text so far after each piece; the matcher sees pieces only."""
    matcher, shown, text, matched = StopStrings(stops, include), "", "", None
    for i, piece in enumerate(pieces):
        before, text = len(text), text + piece
        ends = [
            (start, len(stop), stop)
            for stop in stops
            for start in range(len(text))
            if text.startswith(stop, start) and start + len(stop) > before and i >= blocked
        ]
        result = matcher.push(piece, may_match=i >= blocked)
        if not ends:
            assert isinstance(result, str)
            shown += result
            held = text[len(shown) :]
            assert text.startswith(shown)
            assert not held or any(len(held) < len(s) and s.startswith(held) for s in stops)
            continue
        start, length, stop = min(ends)
        assert isinstance(result, StopMatch)
        shown += result.text
        matched = stop
        assert result.stop == stop
        assert shown == text[: start + length if include else start]
        break
    if matched is None:
        assert shown + matcher.finish() == text


@pytest.mark.parametrize("stop", ["a" * 20_000 + "b", "ab" * 10_000])
def test_a_long_stop_string_costs_no_more_per_character(stop: str) -> None:
    matcher = StopStrings([stop])
    start = time.perf_counter()
    for _ in range(1000):
        matcher.push("a" * 20)
    assert time.perf_counter() - start < 2.0
