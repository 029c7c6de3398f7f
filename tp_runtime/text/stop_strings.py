"""Finds stop strings in text that arrives in pieces, and holds back what may become one.

Text in, text out; tokens only matter through the order of the calls. One call per token makes the
result independent of how many tokens a step brought.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class StopMatch(NamedTuple):
    """`text` is what may still be shown: up to the stop string, or with it if that was asked."""

    stop: str
    text: str


class _Automaton:
    """Knuth-Morris-Pratt: `state` is the length of the longest prefix of the pattern that the text
    ends in, so each character costs the same whatever the pattern."""

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self.state = 0
        self._fail = [0]
        for char in pattern[1:]:
            state = self._fail[-1]
            while state and pattern[state] != char:
                state = self._fail[state - 1]
            self._fail.append(state + (pattern[state] == char))

    def step(self, char: str) -> bool:
        """True when the pattern ends here; the state goes on as after a mismatch."""
        state, pattern = self.state, self.pattern
        while state and pattern[state] != char:
            state = self._fail[state - 1]
        state += pattern[state] == char
        if state == len(pattern):
            self.state = self._fail[-1]
            return True
        self.state = state
        return False


class StopStrings:
    """The stop strings of one sample.

    `push` returns the text that no stop string can reach any more, or a StopMatch: of the stop
    strings that ended in the pushed text the one that begins leftmost, the shorter one on a tie.
    After a match the object is spent."""

    def __init__(self, stops: Sequence[str], include_in_output: bool = False) -> None:
        self._automata = [_Automaton(stop) for stop in dict.fromkeys(stops)]
        self._first = {stop[0] for stop in stops}
        self._include = include_in_output
        self._held = ""

    def push(self, text: str, may_match: bool = True) -> str | StopMatch:
        """`may_match=False`: a stop string that ends in this text is not one (`min_tokens`)."""
        if not self._held and self._first.isdisjoint(text):
            return text
        best: tuple[int, int, str] | None = None
        start_of_new = len(self._held)
        for automaton in self._automata:
            end = self._first_end(automaton, text)
            if end is not None and may_match:
                length = len(automaton.pattern)
                found = (start_of_new + end - length, length, automaton.pattern)
                best = found if best is None else min(best, found)
        buffer = self._held + text
        if best is not None:
            start, length, stop = best
            return StopMatch(stop, buffer[: start + length if self._include else start])
        keep = max(automaton.state for automaton in self._automata)
        cut = len(buffer) - keep
        self._held = buffer[cut:]
        return buffer[:cut]

    def finish(self) -> str:
        """The text held back, when the sample ended for another reason."""
        held, self._held = self._held, ""
        return held

    def _first_end(self, automaton: _Automaton, text: str) -> int | None:
        """Index in `text` after the first end of the pattern; runs over all of `text`."""
        first: int | None = None
        for i, char in enumerate(text):
            if automaton.step(char) and first is None:
                first = i + 1
        return first
