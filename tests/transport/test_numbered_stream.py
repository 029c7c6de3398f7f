"""Numbers that show a lost, repeated or foreign message."""

from __future__ import annotations

import pytest

from tp_runtime.errors import ProtocolError
from tp_runtime.transport.numbered_stream import NumberedStream, new_run_id


@pytest.fixture
def ends():
    run = new_run_id()
    return NumberedStream(run), NumberedStream(run)


def test_messages_in_order_are_taken_in_both_directions(ends):
    a, b = ends
    for _ in range(3):
        b.check(a.stamp())
        a.check(b.stamp())


def test_a_lost_message_is_noticed_at_the_next_one(ends):
    a, b = ends
    b.check(a.stamp())
    a.stamp()
    with pytest.raises(ProtocolError, match="Message 3 arrived where 2 was due"):
        b.check(a.stamp())


def test_a_message_that_comes_twice_is_noticed(ends):
    a, b = ends
    header = a.stamp()
    b.check(header)
    with pytest.raises(ProtocolError, match="came twice"):
        b.check(header)


def test_a_message_of_another_run_is_not_taken(ends):
    with pytest.raises(ProtocolError, match="another run"):
        ends[0].check(NumberedStream(new_run_id()).stamp())


def test_a_header_of_another_length_is_no_header(ends):
    with pytest.raises(ProtocolError, match="header"):
        ends[0].check(b"short")
