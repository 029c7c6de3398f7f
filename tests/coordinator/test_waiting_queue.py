"""Who came first stands first, whichever way he came back."""

from __future__ import annotations

from tests.coordinator.driving import make_seq
from tp_runtime.coordinator.sequence import Sequence
from tp_runtime.coordinator.waiting_queue import WaitingQueue


def _seqs(count: int) -> list[Sequence]:
    seqs = [make_seq(i) for i in range(count)]
    for order, seq in enumerate(seqs):
        seq.order = order
    return seqs


def test_a_sequence_put_back_stands_before_the_younger_and_behind_the_older():
    queue, seqs = WaitingQueue(), _seqs(5)
    for seq in (seqs[1], seqs[4]):
        queue.append(seq)
    for seq in (seqs[3], seqs[0], seqs[2]):
        queue.put_back(seq)
    assert list(queue) == seqs


def test_the_youngest_put_back_first_keeps_the_order():
    queue, seqs = WaitingQueue(), _seqs(3)
    for seq in reversed(seqs):
        queue.put_back(seq)
    assert list(queue) == seqs


def test_removing_and_replacing():
    queue, seqs = WaitingQueue(), _seqs(3)
    queue.replace([seqs[2], seqs[0], seqs[1]])
    queue.remove(seqs[1])
    assert list(queue) == [seqs[0], seqs[2]]
    assert len(queue) == 2
