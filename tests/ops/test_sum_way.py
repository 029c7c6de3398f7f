"""Which way a sum takes: by the bytes that a rank sends, and never one way after a later one."""

from __future__ import annotations

import pytest

from tp_runtime.ops.sum_way import (
    MAX_ROWS,
    SumWay,
    choose_way,
    most_rows,
    one_shot_only,
    two_shot_only,
)

ROW = 8192
"""Bytes of 4,096 elements of bfloat16."""


def test_two_ranks_take_one_step_in_words_up_to_the_measured_32_rows() -> None:
    assert choose_way(1, ROW, 2) is choose_way(32, ROW, 2) is SumWay.WORDS
    assert choose_way(33, ROW, 2) is choose_way(512, ROW, 2) is SumWay.FLAGS
    assert choose_way(513, ROW, 2) is None


@pytest.mark.parametrize(("ranks", "words", "flags"), [(3, 16, 144), (4, 10, 64), (8, 4, 18)])
def test_more_ranks_take_two_steps_from_fewer_rows_on(ranks: int, words: int, flags: int) -> None:
    most = {way: most_rows(choose_way, way, ROW, ranks) for way in SumWay}
    assert most == {SumWay.WORDS: words, SumWay.FLAGS: flags, SumWay.TWO_SHOT: 512}


@pytest.mark.parametrize("row_bytes", [2, 128, 2048, ROW, 10240, 65536, 1 << 22, 1 << 23])
@pytest.mark.parametrize("ranks", [2, 3, 4, 7, 8])
def test_more_rows_never_take_an_earlier_way(ranks: int, row_bytes: int) -> None:
    """Inboxes have as many rows as the most that go a way."""
    order = [*SumWay, None]
    for choose in (choose_way, one_shot_only, two_shot_only):
        ways = [order.index(choose(rows, row_bytes, ranks)) for rows in range(1, MAX_ROWS + 2)]
        assert ways == sorted(ways)
        assert order[ways[-1]] is None


def test_one_step_or_two_can_be_asked_for() -> None:
    assert [one_shot_only(rows, ROW, 8) for rows in (1, 70, 100)] == [
        SumWay.WORDS,
        SumWay.FLAGS,
        None,
    ]
    assert two_shot_only(1, ROW, 2) is two_shot_only(512, ROW, 2) is SumWay.TWO_SHOT
    assert two_shot_only(513, ROW, 2) is None
    assert two_shot_only(257, 2 * ROW, 8) is None, "more than 4 MiB"
