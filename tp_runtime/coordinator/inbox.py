"""What the front end hands to the engine thread: requests, cancels, stops.

Requests arrive here tokenized and with their seed drawn; the engine has only to check them against
its limits. Knows nothing of sockets, text or scheduling.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from tp_runtime.coordinator.sequence import SeqKey, Sequence
from tp_runtime.errors import TPRuntimeError
from tp_runtime.mailbox import Mailbox
from tp_runtime.text.grammar import TokenMask


class RequestKey(NamedTuple):
    """A request among those of all clients: the identity of the connection that sent it (two
    clients may use the same `request_id`) and the client's own name for it."""

    client: bytes
    request_id: str


@dataclasses.dataclass(frozen=True, slots=True)
class SubmittedRequest:
    """A request with its samples, one Sequence each, to be admitted all or none.

    The engine answers with `TextThreads.accepted` or `TextThreads.failed`. Each sequence has the
    seed that was given or drawn. `deadline`: `time.monotonic()` after which the engine fails the
    request with RequestTimeoutError; None: it may take as long as it takes."""

    key: RequestKey
    sequences: list[Sequence]
    deadline: float | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class CancelRequest:
    """Nobody wants this request any more (cancelled, client gone or cut off). Nothing is to be
    answered; it may be unknown, because it ended meanwhile."""

    key: RequestKey


@dataclasses.dataclass(frozen=True, slots=True)
class StopSample:
    """A stop string ended this sample with its first `num_tokens` generated tokens; whatever else
    was or will be sampled is dropped. Nothing is to be answered; it may have ended meanwhile."""

    key: SeqKey
    num_tokens: int


@dataclasses.dataclass(frozen=True, slots=True)
class MaskReady:
    """What may follow the newest token of a sample with a grammar. None: nothing, its text is
    complete; an error: the grammar cannot go on, which ends the request. The sample may have ended
    meanwhile."""

    seq: Sequence
    mask: TokenMask | TPRuntimeError | None


InboxItem = SubmittedRequest | CancelRequest | StopSample | MaskReady


class Inbox(Mailbox[InboxItem]):
    """The engine waits on `fileno()` and drains; any thread puts."""

    def submit(self, request: SubmittedRequest) -> None:
        self.put(request)

    def cancel(self, key: RequestKey) -> None:
        self.put(CancelRequest(key))

    def stop(self, key: SeqKey, num_tokens: int) -> None:
        self.put(StopSample(key, num_tokens))

    def mask(self, seq: Sequence, mask: TokenMask | TPRuntimeError | None) -> None:
        self.put(MaskReady(seq, mask))
