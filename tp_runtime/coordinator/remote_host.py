"""Another host, as the coordinator reaches it: through the relay there, over ZeroMQ.

Commands leave at once and never fail here: a host that cannot be reached is noticed by `RelayDoor`,
which also hands over what the relay says.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from tp_runtime.coordinator.host import HostEvents
from tp_runtime.messages import (
    AllocateKV,
    DropKeepers,
    ForkWorker,
    FromRank,
    HostBeats,
    KeeperGone,
    KeeperHere,
    KillWorker,
    PublishPlan,
    Quit,
    RelayCommand,
    RelayMessage,
)
from tp_runtime.transport.heartbeat import Beat, Phase

_NO_BEAT = Beat(0, Phase.START, float("inf"))


class RemoteHost:
    """Implements `Host`. `heard` and `pulsed`: when the relay last spoke, and was last spoken to
    (time.monotonic)."""

    def __init__(
        self, name: str, ranks: range, send: Callable[[RelayCommand], None], events: HostEvents
    ) -> None:
        self.name = name
        self.ranks = ranks
        self.heard = self.pulsed = time.monotonic()
        self._send = send
        self._events = events
        self._beats = dict.fromkeys(ranks, _NO_BEAT)
        self._beats_at = self.heard

    def take(self, message: RelayMessage) -> bool:
        """What the relay says of its ranks. False: this host must not say that."""
        if isinstance(message, HostBeats):
            beats = [Beat(step, Phase(phase), age) for step, phase, age in message.beats]
            self._beats = dict(zip(self.ranks, beats, strict=True))
            self._beats_at = time.monotonic()
        elif isinstance(message, KeeperGone) and message.rank in self.ranks:
            self._events.on_keeper_lost(message.rank)
        elif isinstance(message, KeeperHere) and message.rank in self.ranks:
            self._events.on_keeper(self, message.rank)
        elif isinstance(message, FromRank) and message.rank in self.ranks:
            self._events.on_rank(message.rank, message.message)
        else:
            return False
        return True

    # ------------------------------------------------------------ Host

    def fork(self, generation: int) -> None:
        self._beats = dict.fromkeys(self.ranks, _NO_BEAT)
        self._send(ForkWorker(generation))

    def kill(self, generation: int) -> None:
        self._send(KillWorker(generation))

    def allocate(self, num_blocks: int) -> None:
        self._send(AllocateKV(num_blocks))

    def publish(self, plan: bytes, timeout_s: float) -> None:
        self._send(PublishPlan(plan))

    def beat(self, rank: int) -> Beat:
        beat = self._beats[rank]
        return beat._replace(age_s=beat.age_s + time.monotonic() - self._beats_at)

    def release(self) -> None:
        """The relay does so by itself, before the next fork."""

    def drop_keepers(self, status: int) -> None:
        self._send(DropKeepers(status))

    def quit(self, status: int, message: str) -> None:
        self._send(Quit(status, message))
