"""The thread that owns the client socket: requests in, messages out, clients that come and go.

It decodes and checks, keeps the table of clients, and bounds what is queued for each of them.
Everything else happens elsewhere: text on the text threads, scheduling in the engine. A message of
a client, however broken, is answered or dropped and counted; it cannot end this thread.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import random
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping

import msgspec
import zmq

from tp_runtime.coordinator.client_frames import MalformedMessage, read_client_message
from tp_runtime.coordinator.client_request import ClientRequest, check_message
from tp_runtime.coordinator.client_socket import ClientSocket, PeerGone
from tp_runtime.coordinator.connected_client import ConnectedClient
from tp_runtime.coordinator.inbox import Inbox
from tp_runtime.coordinator.text_threads import Outgoing, TextThreads
from tp_runtime.errors import (
    InvalidRequestError,
    OverloadedError,
    RequestCancelledError,
    ServerUnavailableError,
    TPRuntimeError,
)
from tp_runtime.mailbox import Mailbox
from tp_runtime.messages import (
    Alive,
    Cancel,
    ClientMessage,
    Detokenize,
    Failed,
    Generate,
    GetInfo,
    Info,
    Ping,
    ServerMessage,
    Tokenize,
    encode,
)
from tp_runtime.text.grammar import GrammarCompiler
from tp_runtime.text.tokenizer import Tokenizer
from tp_runtime.thread_name import name_this_thread

logger = logging.getLogger(__name__)

ALIVE_S = 1.0
"""Every client hears of the server so often; a client that is gone is noticed no later."""
_PROBE_DELAYS_S = (0.02, 0.3)
"""After a disconnect: when all clients are tried, to find out who it was. Twice, because the socket
learns of it a moment after the event."""
_STALLED_POLL_S = 0.005
_MESSAGES_PER_TURN = 64
"""Read at most so many before sending again, so that a flood in does not stop the streams out."""


@dataclasses.dataclass(frozen=True)
class FrontendLimits:
    """Bounds on what clients can make the coordinator hold."""

    max_requests: int = 16384
    """Requests under way of all clients together."""
    max_backlog_bytes: int = 32 << 20
    """Unsent output of one client; past it the client is cut off."""
    max_stall_s: float = 30.0
    """A client that reads nothing for so long while output waits for it is cut off."""


class Frontend:
    """Binds `listen` at once (`tcp://host:port`, port 0 for any, or `ipc://path`); `start` begins
    to serve. `address` is where clients connect.

    `info` gives the server's Info (called on this thread; `request_id` and `instance` are filled in
    here). `draw_seed` gives seeds for requests without one; `compiler` serves structured_outputs.

    Raises ConfigError when the address cannot be bound."""

    def __init__(
        self,
        listen: str,
        tokenizer: Tokenizer | None,
        inbox: Inbox,
        info: Callable[[], Info],
        limits: FrontendLimits | None = None,
        draw_seed: Callable[[], int] | None = None,
        compiler: GrammarCompiler | None = None,
    ) -> None:
        self.instance = secrets.token_hex(8)
        self.counters: Counter[str] = Counter()
        """requests, cancelled, clients_gone, slow_readers, duplicates, handshakes_failed, and the
        kinds of MalformedMessage."""
        self._limits = limits or FrontendLimits()
        self._info = info
        self._draw_seed = draw_seed or (lambda: random.SystemRandom().getrandbits(63))
        self._socket = ClientSocket(listen)
        self.address = self._socket.address
        self._outgoing: Mailbox[list[Outgoing] | Callable[[], None]] = Mailbox()
        self.texts = TextThreads(tokenizer, inbox, self._outgoing.put, compiler)
        self._clients: dict[bytes, ConnectedClient] = {}
        self._stalled: dict[bytes, ConnectedClient] = {}
        self._probes: list[float] = []
        self._refusal: TPRuntimeError | None = None
        self._open = True
        self._thread = threading.Thread(target=self._run, name="frontend", daemon=True)

    # ------------------------------------------------------------ from any thread

    def start(self) -> None:
        self._thread.start()

    @property
    def num_requests(self) -> int:
        """Requests under way, those being tokenized included."""
        return sum(len(client.requests) for client in list(self._clients.values()))

    def refuse(self, error: TPRuntimeError) -> None:
        """New requests get this error from now on; those under way go on."""
        self._refusal = error

    def fail_all(self, error: TPRuntimeError) -> None:
        """Every request under way ends with this error, and new ones are refused with it."""
        self.refuse(error)
        self._outgoing.put(lambda: self._fail_all(error))

    def close(self, timeout_s: float = 1.0) -> None:
        """Sends what is ready, for at most `timeout_s`, and closes the socket."""
        self.refuse(self._refusal or ServerUnavailableError("The server is shutting down."))
        deadline = time.monotonic() + timeout_s
        self.texts.close(timeout_s)
        self._outgoing.put(lambda: self._stop(deadline))
        if self._thread.ident is not None:
            self._thread.join(timeout_s + 1.0)
        else:
            self._socket.close(0.0)

    # ------------------------------------------------------------ the thread

    def _run(self) -> None:
        name_this_thread("frontend")
        poller = zmq.Poller()
        for readable in (self._socket.socket, self._socket.monitor, self._outgoing.fileno()):
            poller.register(readable, zmq.POLLIN)
        next_alive = time.monotonic() + ALIVE_S
        while self._open:
            now = time.monotonic()
            wait_s = min(_STALLED_POLL_S if self._stalled else ALIVE_S, next_alive - now)
            wait_s = min([wait_s, *(due - now for due in self._probes)])
            ready = dict(poller.poll(max(0, int(wait_s * 1000) + 1)))
            self._guarded(self._turn, ready)
            now = time.monotonic()
            if now >= next_alive:
                next_alive = now + ALIVE_S
                self._guarded(self._say_alive)
        self._socket.close(0.2)

    def _guarded(self, action: Callable[..., None], *args: object) -> None:
        try:
            action(*args)
        except Exception:
            logger.exception("The front end failed in %s and goes on.", action.__name__)

    def _turn(self, ready: Mapping[object, int]) -> None:
        """`ready`: what can be read. To try what cannot costs as much as a message of 256 rows."""
        now = time.monotonic()
        if self._socket.monitor in ready and self._socket.take_events(self.counters):
            self._probes += [now + delay for delay in _PROBE_DELAYS_S]
        for work in self._outgoing.drain():
            if callable(work):
                work()
            else:
                self._send_all(work)
        for _ in range(_MESSAGES_PER_TURN if self._socket.socket in ready else 0):
            parts = self._socket.receive()
            if parts is None:
                break
            self._receive(parts[0], parts[1:])
        for client in list(self._stalled.values()):
            self._send_backlog(client)
        if self._probes and self._probes[0] <= now:
            self._probes = sorted(due for due in self._probes if due > now)
            self._say_alive()

    def _stop(self, deadline: float) -> None:
        while self._stalled and time.monotonic() < deadline:
            for client in list(self._stalled.values()):
                self._send_backlog(client)
            time.sleep(_STALLED_POLL_S)
        self._open = False

    # ------------------------------------------------------------ messages in

    def _receive(self, identity: bytes, frames: list[bytes]) -> None:
        try:
            message = read_client_message(frames)
        except MalformedMessage as malformed:
            self.counters[malformed.kind] += 1
            self._answer_error(identity, malformed.request_id, malformed.error)
            return
        client = self._clients.get(identity)
        if client is None:
            client = self._clients[identity] = ConnectedClient(identity)
        try:
            self._handle(client, message)
        except TPRuntimeError as error:
            self._answer_error(identity, getattr(message, "request_id", ""), error)

    def _handle(self, client: ConnectedClient, message: ClientMessage) -> None:
        if isinstance(message, Generate):
            self._generate(client, message)
        elif isinstance(message, Cancel):
            self._cancel(client, message.request_id)
        elif isinstance(message, Ping):
            self._answer(client.identity, Alive(self.instance, self._info().state))
        elif isinstance(message, GetInfo):
            info = self._info()
            stats = {**info.stats, **{f"frontend_{k}": v for k, v in self.counters.items()}}
            info = msgspec.structs.replace(
                info, request_id=message.request_id, instance=self.instance, stats=stats
            )
            self._answer(client.identity, info)
        else:
            self._ask(client, message)

    def _generate(self, client: ConnectedClient, message: Generate) -> None:
        if message.request_id in client.requests:
            self.counters["duplicates"] += 1  # a replayed frame must not disturb the first one
            return
        if not message.request_id:
            raise InvalidRequestError("request_id is empty; give each request a name of its own.")
        if self._refusal is not None:
            raise self._refusal
        if self.num_requests >= self._limits.max_requests:
            raise OverloadedError(
                f"{self._limits.max_requests} requests are under way already; try again later."
            )
        check_message(message)
        self.counters["requests"] += 1
        request = ClientRequest(client.identity, message, self._draw_seed())
        client.requests[message.request_id] = request
        self.texts.submit(request)

    def _cancel(self, client: ConnectedClient, request_id: str) -> None:
        request = client.requests.pop(request_id, None)
        if request is None:
            return  # it ended meanwhile
        self.counters["cancelled"] += 1
        self.texts.cancel(request)
        raise RequestCancelledError("The request was cancelled.")

    def _ask(self, client: ConnectedClient, message: Tokenize | Detokenize) -> None:
        if self._refusal is not None:
            raise self._refusal
        self.texts.ask(client.identity, message)

    # ------------------------------------------------------------ messages out

    def _answer_error(self, identity: bytes, request_id: str, error: TPRuntimeError) -> None:
        self._answer(identity, Failed(request_id, error.code, str(error)))

    def _answer(self, identity: bytes, message: ServerMessage) -> None:
        self._send_all([Outgoing(identity, encode(message))])

    def _send_all(self, messages: Iterable[Outgoing]) -> None:
        for message in messages:
            client = self._clients.get(message.client)
            if client is None:  # gone, or never said anything that could be read
                with contextlib.suppress(PeerGone):
                    self._socket.send(message.client, message.payload)
                continue
            if message.is_output and not client.requests:  # packed before it was cut off
                continue
            for request_id in message.ended:
                client.requests.pop(request_id, None)
            client.push(message, time.monotonic())
            if len(client.backlog) == 1 or client.identity not in self._stalled:
                self._send_backlog(client)
            self._bound_backlog(client)

    def _send_backlog(self, client: ConnectedClient) -> None:
        now = time.monotonic()
        try:
            while client.backlog:
                if not self._socket.send(client.identity, client.backlog[0].payload):
                    self._stalled[client.identity] = client
                    self._bound_backlog(client)
                    return
                client.pop(now)
        except PeerGone:
            self._gone(client)
        self._stalled.pop(client.identity, None)

    def _bound_backlog(self, client: ConnectedClient) -> None:
        """Cuts off a client that reads too slowly: its requests end, and their output gives way to
        one error each, which it finds if it ever reads on."""
        if not client.backlog:
            return
        stall_s = time.monotonic() - client.stalled_since
        limits = self._limits
        if client.backlog_bytes <= limits.max_backlog_bytes and stall_s <= limits.max_stall_s:
            return
        if not client.requests:
            if stall_s > limits.max_stall_s:
                self._gone(client)
            return
        self.counters["slow_readers"] += 1
        error = RequestCancelledError(
            f"The client read its output too slowly ({client.backlog_bytes >> 10} KiB waited, "
            f"nothing taken for {stall_s:.0f} s), so the server cut the request off."
        )
        logger.warning("A client was cut off with %d requests: %s", len(client.requests), error)
        last_words = []
        for request_id, request in client.requests.items():
            self.texts.cancel(request)
            payload = encode(Failed(request_id, error.code, str(error)))
            last_words.append(Outgoing(client.identity, payload))
        client.requests.clear()
        client.replace_backlog(last_words)
        client.stalled_since = time.monotonic()

    # ------------------------------------------------------------ clients that go

    def _say_alive(self) -> None:
        """Sending is also the only way to learn who is gone."""
        payload = encode(Alive(self.instance, self._info().state))
        idle = [client for client in self._clients.values() if not client.backlog]
        self._send_all([Outgoing(client.identity, payload) for client in idle])
        for client in list(self._stalled.values()):
            self._send_backlog(client)

    def _gone(self, client: ConnectedClient) -> None:
        self._clients.pop(client.identity, None)
        self._stalled.pop(client.identity, None)
        self.counters["clients_gone"] += 1
        for request in client.requests.values():
            self.texts.cancel(request)
        client.requests.clear()
        client.replace_backlog([])

    def _fail_all(self, error: TPRuntimeError) -> None:
        for client in list(self._clients.values()):
            for request_id, request in list(client.requests.items()):
                self.texts.cancel(request)
                client.requests.pop(request_id, None)
                self._answer_error(client.identity, request_id, error)
