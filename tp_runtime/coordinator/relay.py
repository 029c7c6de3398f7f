"""The relay of a host that is not the coordinator's: it imitates the coordinator for the keepers
and workers there, and passes on what either side says.

To them it is the same unix socket, the same rings and the same heartbeat page. To the coordinator
it speaks over one ZeroMQ connection with numbered messages. It decides nothing, except that it ends
everything on its host when the coordinator is lost or its own launcher is gone.
"""

from __future__ import annotations

import contextlib
import logging
import struct
import time

import msgspec
import zmq

from tp_runtime.coordinator.event_loop import EventLoop
from tp_runtime.coordinator.host import Host, RankMessage
from tp_runtime.coordinator.host_spans import SpanSender
from tp_runtime.coordinator.local_host import LocalHost
from tp_runtime.coordinator.relay_door import (
    CLOSE_S,
    PULSE_S,
    SILENCE_S,
    STALL_S,
    shared_settings,
)
from tp_runtime.engine_config import EngineConfig
from tp_runtime.errors import ProtocolError, WorkerFailedError
from tp_runtime.messages import (
    PROTOCOL_VERSION,
    AllocateKV,
    DropKeepers,
    ForkWorker,
    FromRank,
    HostBeats,
    HostEnding,
    HostSignal,
    KeeperGone,
    KeeperHere,
    KeeperMessage,
    KillWorker,
    PublishPlan,
    Quit,
    RelayCommand,
    RelayHello,
    RelayMessage,
    WorkerProgress,
    WorkerReady,
    encode,
)
from tp_runtime.run_folder import DoorKey, RunFolder
from tp_runtime.transport.fd_socket import FdListener
from tp_runtime.transport.loop_socket import LoopSocket
from tp_runtime.transport.numbered_stream import NumberedStream
from tp_runtime.transport.signal_pipe import SignalPipe

logger = logging.getLogger(__name__)

COORDINATOR_LOST = 3
"""Exit status; the same number as in launch.exit_status."""
TICK_S = 0.1
PATIENCE_S = SILENCE_S + 1.0
"""The coordinator gives a silent relay up first, and can say so."""
RING_S = 2.0
"""A ring without room for so long belongs to a worker that hangs."""
_LOST = zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED

_decode = msgspec.msgpack.Decoder(RelayCommand).decode


class Relay:
    """`run` returns the exit status. Implements `HostEvents` for the keepers of its host."""

    def __init__(
        self,
        config: EngineConfig,
        ranks: range,
        coordinator_host: str,
        key: DoorKey,
        listener: FdListener[KeeperMessage],
        folder: RunFolder,
        launcher_pidfd: int,
        signals: SignalPipe,
    ) -> None:
        self._coordinator = coordinator_host
        self._folder = folder
        self._signals = signals
        self._loop = EventLoop()
        self._status: int | None = None
        self._ready: set[int] = set()
        self._heard = self._pulsed = self._ticked = time.monotonic()
        self._stream = NumberedStream(bytes.fromhex(key.run_id))
        self._socket = LoopSocket(zmq.DEALER, PATIENCE_S)
        zmq_socket = self._socket.socket
        self._monitor = zmq_socket.get_monitor_socket(_LOST)
        address = f"[{coordinator_host}]" if ":" in coordinator_host else coordinator_host
        zmq_socket.setsockopt(zmq.IPV6, int(":" in coordinator_host))
        zmq_socket.connect(f"tcp://{address}:{key.port}")
        size, traced = config.tensor_parallel_size, bool(config.trace)
        self._host = LocalHost(listener, self._loop, self, ranks, size, traced)
        self._spans = SpanSender(self._host, self._send) if traced else None
        self._send(
            RelayHello(
                PROTOCOL_VERSION,
                key.token,
                self._host.name,
                ranks.start,
                len(ranks),
                shared_settings(config),
            )
        )
        self._socket.watch(self._loop, self._receive_all)
        self._loop.watch(int(self._monitor.getsockopt(zmq.FD)), self._look_at_connection)
        self._loop.watch(launcher_pidfd, self._launcher_gone)
        self._loop.watch(signals.fileno(), self._on_signals)
        self._folder.write_status("starting", f"waiting for the coordinator at {coordinator_host}")

    def run(self) -> int:
        """Until the coordinator says so, or is lost, or the launcher is gone."""
        while self._status is None:
            self.turn(TICK_S)
        self.close()
        return self._status

    def turn(self, timeout_s: float) -> None:
        """One turn of the loop; waits for at most `timeout_s`."""
        self._loop.turn(timeout_s)
        if time.monotonic() - self._ticked >= TICK_S:
            self._tick()

    def close(self) -> None:
        """The last words get a moment to leave."""
        self._host.release()
        self._socket.socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close(CLOSE_S)

    # ------------------------------------------------------------ from the coordinator

    def _receive_all(self) -> None:
        while self._status is None and (frames := self._socket.receive()) is not None:
            try:
                if len(frames) != 2:
                    raise ProtocolError(f"A message of {len(frames)} frames where 2 were due.")
                self._stream.check(frames[0])
                command = _decode(frames[1])
            except (ProtocolError, msgspec.DecodeError) as error:
                self._end(f"The coordinator cannot be understood: {error}", "protocol")
                return
            self._heard = time.monotonic()
            self._obey(command)

    def _obey(self, command: RelayCommand) -> None:
        host = self._host
        if isinstance(command, PublishPlan):
            try:
                host.publish(command.plan, RING_S)
            except WorkerFailedError as error:
                self._end(str(error), error.code)
        elif isinstance(command, ForkWorker):
            self._ready.clear()
            self._folder.write_status("starting", "the workers start")
            if self._spans is not None:
                self._spans.send_rest(last=False)
            host.fork(command.generation)
            if self._spans is not None:
                self._spans.follow(command.generation)
        elif isinstance(command, KillWorker):
            self._folder.write_status("recovering", "workers are being replaced")
            host.kill(command.generation)
        elif isinstance(command, AllocateKV):
            host.allocate(command.num_blocks)
        elif isinstance(command, DropKeepers):
            host.drop_keepers(command.status)
            host.release()
        elif isinstance(command, Quit):
            self._quit(command.status, command.message, WorkerFailedError.code)

    # ------------------------------------------------------------ HostEvents: to the coordinator

    def on_keeper(self, host: Host, rank: int) -> None:
        """Checked here; the coordinator learns of it as if it had come to its own door."""
        self._send(KeeperHere(rank))

    def on_rank(self, rank: int, message: RankMessage) -> None:
        """As it came."""
        self._send(FromRank(rank, message))
        if isinstance(message, WorkerProgress):
            self._folder.write_status("starting", message.text)
        elif isinstance(message, WorkerReady):
            self._ready.add(rank)
            if len(self._ready) == len(self._host.ranks):
                self._folder.write_status("ready")

    def on_keeper_lost(self, rank: int) -> None:
        """As the coordinator notices it of its own keepers."""
        self._send(KeeperGone(rank))

    def on_host_lost(self, host: Host, why: str) -> None:
        """A relay has no hosts but its own."""

    def _send(self, message: RelayMessage) -> None:
        with contextlib.suppress(zmq.ZMQError):  # the loss of the connection is seen elsewhere
            self._socket.send((self._stream.stamp(), encode(message)))
        self._pulsed = time.monotonic()

    # ------------------------------------------------------------ ends

    def _tick(self) -> None:
        now = time.monotonic()
        stalled, self._ticked = now - self._ticked > STALL_S, now
        self._receive_all()
        self._look_at_connection()
        self._host.pulse()
        if stalled:
            self._heard = now
        if now - self._heard > PATIENCE_S:
            self._lost(f"says nothing for {PATIENCE_S:g} s")
        elif now - self._pulsed >= PULSE_S:
            beats = [self._host.beat(rank) for rank in self._host.ranks]
            self._send(HostBeats([(b.step, int(b.phase), b.age_s) for b in beats]))
            if self._spans is not None:
                self._spans.send_new()

    def _look_at_connection(self) -> None:
        while self._monitor.poll(0):
            (event,) = struct.unpack_from("=H", self._monitor.recv_multipart()[0])
            if event & _LOST:
                self._receive_all()  # a Quit may have come before the end
                if self._status is None:
                    self._lost("is gone; its connection ended")
                return

    def _lost(self, how: str) -> None:
        """Ends without a word to the keepers here: the first of them starts another relay, for the
        coordinator that may come next."""
        logger.error("The coordinator at %s %s.", self._coordinator, how)
        self._status = COORDINATOR_LOST

    def _launcher_gone(self) -> None:
        self._end("its launcher (torchrun) is gone", "")

    def _on_signals(self) -> None:
        for signum in self._signals.take():
            self._send(HostSignal(int(signum)))

    def _end(self, reason: str, code: str) -> None:
        """Ends without the coordinator's word, and tells it why if it is there."""
        self._send(HostEnding(reason))
        self._quit(1, reason if code else "", code)

    def _quit(self, status: int, message: str, code: str) -> None:
        if self._status is None:
            if status and message:
                self._folder.write_failure(code, message)
            self._host.quit(status, message)
            if self._spans is not None:
                self._spans.send_rest(last=True)
            self._status = status
