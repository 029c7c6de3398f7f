"""The parts of a start add up to the whole."""

from __future__ import annotations

from tp_runtime.workers.start_clock import StartClock


def test_parts_add_up_in_the_order_of_their_first_beginning() -> None:
    now = iter([0.0, 1.0, 3.0, 3.5, 4.0])
    clock = StartClock("device", lambda: next(now))
    clock.enter("weights")
    clock.enter("device")
    clock.enter("graphs")
    assert list(clock.stop().items()) == [("device", 1.5), ("weights", 2.0), ("graphs", 0.5)]
