"""Where the relays of other hosts connect: a ZeroMQ ROUTER on a port of this host.

The port is bound first and published afterwards, with a random token: who does not know it is not
listened to. A relay counts as lost when its connection ends, when it says so, when it breaks the
protocol, or after some silence; the group of workers is told in each case.
"""

from __future__ import annotations

import contextlib
import functools
import hmac
import logging
import os
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import zmq

from tp_runtime.coordinator.host import HostEvents
from tp_runtime.coordinator.host_spans import ArrivedSpans
from tp_runtime.coordinator.remote_host import RemoteHost
from tp_runtime.engine_config import EngineConfig
from tp_runtime.errors import ConfigError, ProtocolError
from tp_runtime.messages import (
    PROTOCOL_VERSION,
    HostEnding,
    HostSignal,
    HostSpans,
    Pulse,
    Quit,
    RelayCommand,
    RelayHello,
    RelayMessage,
    encode,
)
from tp_runtime.run_folder import DoorKey
from tp_runtime.transport.loop_socket import LoopSocket, Watcher
from tp_runtime.transport.numbered_stream import NumberedStream, new_run_id

logger = logging.getLogger(__name__)

PULSE_S = 0.5
"""How often both sides show that they live."""
SILENCE_S = 3.0
"""Six missed pulses: the host, its network or its relay is gone."""
STALL_S = 1.0
"""A loop that has not turned for so long was itself stopped, and must not blame its peer."""
CLOSE_S = 1.0
_MAX_MESSAGE = 1 << 20
"""A relay's longest message is a worker's traceback."""
_LOCAL_SETTINGS = frozenset({"model", "served_model_name", "listen", "trace"})
"""Settings that may differ between hosts; the model itself is compared by its digest."""

_decode = msgspec.msgpack.Decoder(RelayMessage).decode


def shared_settings(config: EngineConfig) -> dict[str, object]:
    """The settings that must be the same on every host."""
    return {k: v for k, v in msgspec.to_builtins(config).items() if k not in _LOCAL_SETTINGS}


@dataclass
class _Relay:
    """A connection; `host` once its hello was taken, `broken`: why it is to be given up."""

    stream: NumberedStream
    host: RemoteHost | None = None
    broken: str = ""


class RelayDoor:
    """`key` is what a relay needs to connect, besides this host's address. `hosts` are those that
    are connected. Raises ConfigError when `interface` is no address of this host."""

    def __init__(self, interface: str, config: EngineConfig) -> None:
        self._config = config
        self._run_id = new_run_id()
        self._token = secrets.token_hex(16)
        self._socket = LoopSocket(zmq.ROUTER, SILENCE_S)
        self._socket.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.socket.setsockopt(zmq.MAXMSGSIZE, _MAX_MESSAGE)
        self._socket.socket.setsockopt(zmq.IPV6, int(":" in interface))
        self._relays: dict[bytes, _Relay] = {}
        self.spans = ArrivedSpans()
        self._events: HostEvents | None = None
        self._strangers = 0
        self._ticked = time.monotonic()
        host = f"[{interface}]" if ":" in interface else interface
        try:
            port = self._socket.socket.bind_to_random_port(f"tcp://{host}")
        except zmq.ZMQError as error:
            self._socket.close()
            raise ConfigError(
                f"No port can be opened at {interface} for the other hosts ({error}); MASTER_ADDR "
                "must lead to this host, give torchrun --local-addr."
            ) from error
        self.key = DoorKey(port, self._token, self._run_id.hex())

    @property
    def hosts(self) -> list[RemoteHost]:
        return [relay.host for relay in self._relays.values() if relay.host is not None]

    def open(self, watcher: Watcher, events: HostEvents) -> None:
        self._events = events
        self._socket.watch(watcher, self._receive_all)

    # ------------------------------------------------------------ in

    def _receive_all(self) -> None:
        while (frames := self._socket.receive()) is not None:
            self._receive(frames)
        for identity, relay in list(self._relays.items()):
            if relay.broken:
                self._lose(identity, relay.broken)

    def _receive(self, frames: list[bytes]) -> None:
        identity = frames[0]
        relay = self._relays.get(identity)
        if relay is None:
            relay = _Relay(NumberedStream(self._run_id))
        if relay.broken:
            return
        try:
            if len(frames) != 3:
                raise ProtocolError(f"A message of {len(frames) - 1} frames where 2 were due.")
            relay.stream.check(frames[1])
            self._take(identity, relay, _decode(frames[2]))
        except (ProtocolError, msgspec.DecodeError, ValueError) as error:
            if relay.host is None and not self._strangers:
                logger.warning("A stranger at the door for relays was turned away: %s", error)
            self._strangers += relay.host is None
            relay.broken = str(error)

    def _take(self, identity: bytes, relay: _Relay, message: RelayMessage) -> None:
        host = relay.host
        if host is None:
            self._welcome(identity, relay, message)
            return
        host.heard = time.monotonic()
        if isinstance(message, HostEnding):
            relay.broken = message.reason
        elif isinstance(message, HostSpans):
            self.spans.take(message)
        elif isinstance(message, HostSignal):
            os.kill(os.getpid(), message.signum)  # the engine takes it for one of its own
        elif not host.take(message):
            raise ProtocolError(f"Its relay sent a {type(message).__name__} out of place.")

    def _welcome(self, identity: bytes, relay: _Relay, message: RelayMessage) -> None:
        if not isinstance(message, RelayHello) or self._events is None:
            raise ProtocolError("Its first message was no hello.")
        if not hmac.compare_digest(message.token.encode(), self._token.encode()):
            raise ProtocolError("It does not know the token.")
        problem = self._problem_of(message)
        self._relays[identity] = relay
        send = self._sender(identity, relay)
        if problem:
            logger.error(problem)
            send(Quit(1, problem))
            del self._relays[identity]
            return
        ranks = range(message.first_rank, message.first_rank + message.num_ranks)
        relay.host = RemoteHost(message.host, ranks, send, self._events)
        send(Pulse())

    def _problem_of(self, hello: RelayHello) -> str:
        if hello.version != PROTOCOL_VERSION:
            return (
                f"{hello.host} speaks protocol {hello.version}, the coordinator "
                f"{PROTOCOL_VERSION}; install the same tp_runtime everywhere."
            )
        ours = shared_settings(self._config)
        differ = sorted(k for k in ours if hello.settings.get(k) != ours[k])
        if differ:
            given = ", ".join(f"{k} {hello.settings.get(k)!r} (here {ours[k]!r})" for k in differ)
            return f"{hello.host} was started with other settings: {given}; give both the same."
        first, last = hello.first_rank, hello.first_rank + hello.num_ranks - 1
        taken = any(first < host.ranks.stop and host.ranks.start <= last for host in self.hosts)
        if taken or not 1 <= first <= last < self._config.tensor_parallel_size:
            return f"{hello.host} speaks for ranks {first} to {last}, which are not free."
        return ""

    def wait_for_last_spans(self, timeout_s: float) -> None:
        """Once every host was told to end."""
        deadline = time.monotonic() + timeout_s
        ranks = {rank for host in self.hosts for rank in host.ranks}
        while not self.spans.complete(ranks) and (left := deadline - time.monotonic()) > 0:
            self._socket.socket.poll(int(left * 1000) + 1)
            self._receive_all()

    # ------------------------------------------------------------ out

    def _sender(self, identity: bytes, relay: _Relay) -> Callable[[RelayCommand], None]:
        return functools.partial(self._send, identity, relay)

    def _send(self, identity: bytes, relay: _Relay, message: RelayCommand) -> None:
        if relay.broken:
            return
        try:
            self._socket.send((identity, relay.stream.stamp(), encode(message)))
        except zmq.ZMQError:
            relay.broken = "its connection ended"
            self._socket.ring()  # told from the loop, not from the middle of a caller's work
        if relay.host is not None:
            relay.host.pulsed = time.monotonic()

    # ------------------------------------------------------------ lost

    def tick(self) -> None:
        """A few times a second: pulses out, silence noticed."""
        self._receive_all()
        now = time.monotonic()
        stalled, self._ticked = now - self._ticked > STALL_S, now
        for identity, relay in list(self._relays.items()):
            host = relay.host
            if host is None:
                continue
            if stalled:
                host.heard = now
            if now - host.heard > SILENCE_S:
                self._lose(identity, f"nothing was heard from it for {SILENCE_S:g} s")
            elif now - host.pulsed >= PULSE_S:
                self._send(identity, relay, Pulse())

    def _lose(self, identity: bytes, why: str) -> None:
        relay = self._relays.pop(identity)
        with contextlib.suppress(zmq.ZMQError):  # it may be there all the same
            last = encode(Quit(1, f"The coordinator gave this host up: {why}."))
            self._socket.send((identity, relay.stream.stamp(), last))
        if relay.host is not None and self._events is not None:
            self._events.on_host_lost(relay.host, why)

    def close(self) -> None:
        """The last words get a moment to leave."""
        self._socket.close(CLOSE_S)
