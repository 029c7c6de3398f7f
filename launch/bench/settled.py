"""Waits until a server that has just started is as fast as it will be."""

from __future__ import annotations

import time

from tp_runtime.client import Client

LONGEST_S = 60.0
"""Beside other requests a server records one graph in a second, and there are some sixty."""


def wait_until_settled(address: str) -> None:
    """Until the server at `address` has recorded the graphs which it left for later."""
    deadline = time.monotonic() + LONGEST_S
    with Client(address) as client:
        while client.info().stats.get("graphs_left", 1.0) and time.monotonic() < deadline:
            time.sleep(0.1)
