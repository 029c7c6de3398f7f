"""A block's hash stands for every id from the start of the sequence."""

from __future__ import annotations

from array import array

from hypothesis import given
from hypothesis import strategies as st

from tp_runtime.coordinator.prefix_hash import extend_hashes


def _hashes(ids: list[int], block_size: int) -> list[bytes]:
    found: list[bytes] = []
    extend_hashes(found, array("i", ids), block_size)
    return found


def test_only_full_blocks_have_a_hash():
    assert [len(_hashes([1] * n, 4)) for n in (0, 3, 4, 5, 8)] == [0, 0, 1, 1, 2]


def test_equal_blocks_behind_different_prefixes_differ():
    same, other = _hashes([1, 2, 5, 6], 2), _hashes([1, 3, 5, 6], 2)
    assert same[0] != other[0]
    assert same[1] != other[1]
    assert len(set(_hashes([7] * 12, 3))) == 4


ids = st.lists(st.integers(0, 3), max_size=24)


@given(ids, ids, st.integers(1, 5))
def test_hashes_are_equal_exactly_where_all_ids_so_far_are(a, b, block_size):
    for i, (x, y) in enumerate(zip(_hashes(a, block_size), _hashes(b, block_size), strict=False)):
        end = (i + 1) * block_size
        assert (x == y) == (a[:end] == b[:end])


@given(ids, st.integers(0, 30), st.integers(1, 5))
def test_no_more_blocks_are_hashed_than_asked_for(all_ids, stop, block_size):
    found: list[bytes] = []
    extend_hashes(found, array("i", all_ids), block_size, stop)
    assert found == _hashes(all_ids, block_size)[:stop]


@given(ids, st.integers(0, 24), st.integers(1, 5))
def test_extending_later_gives_the_same_as_at_once(all_ids, cut, block_size):
    found = _hashes(all_ids[:cut], block_size)
    extend_hashes(found, array("i", all_ids), block_size)
    assert found == _hashes(all_ids, block_size)
