"""Questions asked of all bytes at once have the answers that a loop over the ids would give."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tp_runtime.coordinator.packed_ids import all_below, columns
from tp_runtime.coordinator.sequence import SeqKey, Sequence
from tp_runtime.coordinator.watched_ids import WatchedIds
from tp_runtime.messages import pack_ids, unpack_ids
from tp_runtime.sampling_params import SamplingParams

INT32 = st.integers(-(2**31), 2**31 - 1)


@given(st.lists(INT32 | st.integers(-2, 300), max_size=12), st.integers(1, 2**31))
def test_all_below_is_true_exactly_when_each_id_is_in_range(ids, bound):
    assert all_below(pack_ids(ids), bound) == all(0 <= i < bound for i in ids)


@pytest.mark.parametrize("bound", [1, 50, 2**16, 151_936, 2**31 - 1])
@pytest.mark.parametrize("at", [0, 1, 255])
def test_the_first_id_past_the_bound_is_noticed_in_any_place(bound, at):
    ids = [bound - 1] * 256
    assert all_below(pack_ids(ids), bound)
    for wrong in (bound, -1, -(2**31), 2**31 - 1):
        ids[at] = wrong
        assert not all_below(pack_ids(ids), bound)


@given(st.integers(1, 9), st.integers(1, 9), st.randoms(use_true_random=False))
def test_columns_are_the_ids_of_each_row(steps, rows, random):
    table = [[random.randrange(-(2**31), 2**31) for _ in range(rows)] for _ in range(steps)]
    found = columns([pack_ids(ids) for ids in table])
    assert [unpack_ids(column) for column in found] == [
        [ids[row] for ids in table] for row in range(rows)
    ]


@given(st.lists(st.integers(0, 2**31 - 1) | st.integers(0, 600), max_size=12), st.data())
def test_no_watched_id_is_overlooked(ids, data):
    """Found where there is none is allowed: 1, 256 holds the bytes of 0."""
    watched = WatchedIds()
    assert not watched.maybe_in(pack_ids(ids))
    seq = Sequence(SeqKey("a"), [1], SamplingParams())
    seq.end_ids = frozenset(data.draw(st.lists(st.sampled_from([0, 7, 256, *ids]), max_size=3)))
    watched.add(seq)
    if not seq.end_ids.isdisjoint(ids):
        assert watched.maybe_in(pack_ids(ids))
    watched.remove(seq)
    assert not watched.maybe_in(pack_ids(ids))


def test_an_end_id_that_nobody_sampled_is_not_found_among_usual_ids():
    watched = WatchedIds()
    seq = Sequence(SeqKey("a"), [1], SamplingParams())
    seq.end_ids = frozenset((151_645, 151_643))
    watched.add(seq)
    assert not watched.maybe_in(pack_ids(range(151_643)))
