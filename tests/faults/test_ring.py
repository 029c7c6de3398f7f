"""A million messages through a ring: what would go wrong once in so many."""

from __future__ import annotations

import pytest

from tests.transport.test_ring import exchange


@pytest.mark.faults
def test_a_million_messages_reach_two_processes_undamaged():
    exchange(1_000_000, longest=17)
