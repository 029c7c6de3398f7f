"""Rows stay dense, and moves say exactly how."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.coordinator.driving import make_limits, make_seq
from tp_runtime.coordinator.admission import prepare
from tp_runtime.coordinator.batch import Batch
from tp_runtime.coordinator.sequence import Sequence, SequenceState
from tp_runtime.messages import unpack_ids


def _seq(name: object) -> Sequence:
    seq = make_seq(name)
    prepare(seq, make_limits())
    seq.state = SequenceState.PREFILL
    return seq


@given(st.lists(st.tuples(st.sets(st.integers(0, 7)), st.integers(0, 4)), max_size=12))
def test_applying_moves_and_entries_gives_the_rows_of_the_batch(changes):
    batch, count = Batch(), 0
    mirror: dict[int, Sequence] = {}
    for leaving, entering in changes:
        for number in sorted(leaving):
            if number < len(mirror):
                batch.leave(mirror[number])
        fresh = [_seq(count + i) for i in range(entering)]
        count += entering
        moves = batch.settle(fresh)
        moved = [(target, mirror[source]) for source, target in moves]
        mirror.update(moved)
        for seq in fresh:
            mirror[seq.row] = seq
        mirror = {row: mirror[row] for row in range(len(batch))}
        assert [mirror[row] for row in range(len(batch))] == batch.sequences()
        assert all(seq.row == row for row, seq in mirror.items())


def test_a_new_sequence_takes_the_place_of_one_that_left_without_a_move():
    batch, seqs = Batch(), [_seq(i) for i in range(3)]
    assert batch.settle(seqs) == []
    batch.leave(seqs[1])
    new = _seq("new")
    assert batch.settle([new]) == []
    assert new.row == 1


def test_the_last_row_moves_into_a_hole():
    batch, seqs = Batch(), [_seq(i) for i in range(4)]
    batch.settle(seqs)
    batch.leave(seqs[0])
    batch.leave(seqs[3])
    assert batch.settle([]) == [(2, 0)]
    assert batch.sequences() == [seqs[2], seqs[1]]


def test_decode_rows_are_named_only_while_others_prefill():
    batch, seqs = Batch((1, 2, 4)), [_seq(i) for i in range(3)]
    batch.settle(seqs)
    batch.start_decode(seqs[0])
    batch.start_decode(seqs[2])
    batch.settle([])
    assert unpack_ids(batch.decode_rows or b"") == [0, 2]
    assert batch.decode == (seqs[0], seqs[2])
    assert batch.padded == 0
    batch.start_decode(seqs[1])
    batch.settle([])
    assert batch.decode_rows is None
    assert batch.padded == 4


def test_the_smallest_graph_that_holds_all_rows_is_chosen():
    sizes = []
    for rows in (1, 2, 3, 4, 5):
        batch = Batch((4, 1, 2))
        seqs = [_seq(i) for i in range(rows)]
        batch.settle(seqs)
        for seq in seqs:
            batch.start_decode(seq)
        batch.settle([])
        sizes.append(batch.padded)
    assert sizes == [1, 2, 4, 4, 0]
