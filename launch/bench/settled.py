"""Waits until a server that has just started is as fast as it will be."""

from __future__ import annotations

import time

from tp_runtime.client import Client
from tp_runtime.errors import RequestFailedError

LONGEST_S = 90.0
"""Beside other requests a server records one graph in a second, and there are some sixty."""


def wait_until_settled(address: str, longest_s: float = LONGEST_S) -> None:
    """Until the server at `address` has recorded the graphs which it left for later.

    Raises RequestFailedError when it has not after so long."""
    deadline = time.monotonic() + longest_s
    with Client(address) as client:
        while left := client.info().stats.get("graphs_left", 1.0):
            if time.monotonic() > deadline:
                raise RequestFailedError(
                    f"The server still has {left:.0f} CUDA graphs to record after {longest_s:.0f} s"
                    "; measure it when it has less to do."
                )
            time.sleep(0.1)
