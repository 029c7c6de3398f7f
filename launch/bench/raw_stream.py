"""One ZeroMQ client that streams many requests and counts their tokens, as cheaply as Python can.

The benchmarks of the coordinator share two cores with it; `Client` does more for each token.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

import zmq

from tp_runtime.client_link import ClientLink
from tp_runtime.errors import WorkerFailedError, error_from_code
from tp_runtime.messages import Failed, Generate, GetInfo, Info, Outputs, encode

_SNAPSHOT_S = 0.15
"""The coordinator renews what it says about itself every 0.1 s."""


class RawStream:
    """`counts`: tokens received by request id; `ended`: ids that finished since they were last
    taken from it."""

    def __init__(self, address: str) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._link = ClientLink(self._context, address)
        self._infos: list[Info] = []
        self.counts: dict[str, int] = {}
        self.ended: list[str] = []

    def submit(self, requests: Iterable[Generate]) -> None:
        for request in requests:
            self.counts[request.request_id] = 0
            self._link.send(encode(request))

    def pump(self, timeout_s: float = 1.0) -> None:
        """Takes what is there; waits for it at most so long. Raises what a request failed with."""
        self._link.socket.poll(int(timeout_s * 1000))
        while (message := self._link.receive()) is not None:
            if isinstance(message, Outputs):
                for delta in message.deltas:
                    self.counts[delta.request_id] += len(delta.token_ids) // 4
                    if delta.finish_reason is not None:
                        self.ended.append(delta.request_id)
            elif isinstance(message, Failed):
                raise error_from_code(message.code, message.message)
            elif isinstance(message, Info):
                self._infos.append(message)

    def until_all_have(self, tokens: int, timeout_s: float) -> None:
        """Raises WorkerFailedError when that takes too long."""
        deadline = time.monotonic() + timeout_s
        while min(self.counts.values()) < tokens:
            self.pump()
            if time.monotonic() > deadline:
                raise WorkerFailedError(f"No {tokens} tokens of every row after {timeout_s:g} s.")

    def stats(self, wait_s: float = _SNAPSHOT_S) -> dict[str, float]:
        """The server's counters at this call or a little later; tokens are taken meanwhile."""
        asked = time.monotonic()
        while time.monotonic() < asked + wait_s:
            self.pump(wait_s)
        self._infos.clear()
        self._link.send(encode(GetInfo("stats")))
        while not self._infos:
            self.pump()
        return self._infos[-1].stats

    def close(self) -> None:
        self._link.close()
        self._context.term()
