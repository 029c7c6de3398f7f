"""The connection of a client to its server: one thread, one DEALER socket, any number of calls.

A connection that breaks is thrown away whole and replaced by a new one, under a new identity; the
server cancels what the old one had asked for, and every call is sent again from where it stands.
So there is one way to recover, whether the coordinator was killed, the network failed, or a
stopped process woke up. Knows nothing of what calls mean.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING

import zmq

from tp_runtime.client_address import find_home, is_over
from tp_runtime.client_calls import Call, cancelled_error, timeout_error
from tp_runtime.client_link import ClientLink, check_address
from tp_runtime.errors import (
    InvalidRequestError,
    ProtocolError,
    ServerUnavailableError,
    TPRuntimeError,
    error_from_code,
)
from tp_runtime.mailbox import Mailbox
from tp_runtime.messages import (
    MAX_MESSAGE_BYTES,
    Alive,
    Cancel,
    Failed,
    Outputs,
    Ping,
    ServerMessage,
    encode,
)

if TYPE_CHECKING:
    from tp_runtime.run_folder import RunFolder

logger = logging.getLogger(__name__)

HANDSHAKE_S = 3.0
"""A server that accepts a connection and does not answer for so long is tried anew."""
SILENCE_S = 10.0
"""A server says something once a second; one that is silent for so long is taken for lost."""
MISUNDERSTOOD_S = 60.0
"""A server that says what cannot be read twice within this time is none of ours."""
_RETRY_S = 0.05
_TICK_S = 0.25


class Connection:
    """Connects when there is something to do, and stays connected.

    `connect_timeout_s`: how long a first connection may take; `reconnect_timeout_s`: how long a
    server that went away may take to come back (0: not at all, calls fail at once), also one of
    this machine that went away before the first connection. After that all
    calls fail with ServerUnavailableError, and the next call begins anew.

    Raises InvalidRequestError for an address that is none."""

    def __init__(self, address: str, connect_timeout_s: float, reconnect_timeout_s: float) -> None:
        self.address = address
        self._connect_timeout_s = connect_timeout_s
        self._reconnect_timeout_s = reconnect_timeout_s
        check_address(address)
        self._work: Mailbox[Callable[[], None]] = Mailbox()
        self._next_tick = 0.0
        self._calls: dict[str, Call] = {}
        self._pings: list[Future[str]] = []
        self._link: ClientLink | None = None
        self._poller: zmq.Poller | None = None
        self._polled: ClientLink | None = None
        """The link whose sockets are in the poller."""
        self._next_attempt = 0.0
        self._give_up_at: float | None = None
        self._home: RunFolder | None = None
        """Run folder of the server, once connected, if it runs on this machine."""
        self._misunderstood_at = float("-inf")
        self._lost_for_good: TPRuntimeError | None = None
        self._open = True
        self._ended = False
        self._ending = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="tp_runtime client", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------ from any thread

    def send(self, call: Call) -> None:
        """Returns at once; the call is answered, or fails, later."""
        self._post(lambda: self._begin(call))

    def cancel(self, request_id: str) -> None:
        """The call fails with RequestCancelledError at once; the server is told."""
        self._post(lambda: self._cancel(request_id))

    def ping(self) -> Future[str]:
        """The server's instance, once there is a connection to it."""
        future: Future[str] = Future()
        self._post(lambda: self._add_ping(future))
        return future

    def close(self, wait: bool = True) -> None:
        """Cancels all calls and ends the thread."""
        self._post(self._close)
        if wait and threading.current_thread() is not self._thread:
            self._thread.join(2.0)

    def _post(self, work: Callable[[], None]) -> None:
        """To the thread; once that has ended, work is done here, which can only be to fail."""
        with self._ending:
            if not self._ended:
                self._work.put(work)
                return
        work()

    # ------------------------------------------------------------ the thread

    def _run(self) -> None:
        context = zmq.Context()
        while self._open:
            self._poll()
            try:
                for work in self._work.drain():
                    work()
                if self._link is not None:
                    self._read(self._link)
                self._keep_link(context, time.monotonic())
            except Exception as error:  # a fault here must not leave callers waiting for ever
                logger.exception("The client connection failed.")
                self._fail_all(ServerUnavailableError(f"The client failed internally: {error}"))
                self._drop_link()
        self._drop_link()
        context.term()
        with self._ending:
            self._ended = True
        for work in self._work.drain():  # what came while it closed
            work()

    def _poll(self) -> None:
        if self._poller is None or self._polled is not self._link:
            self._poller, self._polled = zmq.Poller(), self._link
            self._poller.register(self._work.fileno(), zmq.POLLIN)
            if self._link is not None:
                self._poller.register(self._link.socket, zmq.POLLIN)
                self._poller.register(self._link.monitor, zmq.POLLIN)
        waits_for_attempt = self._link is None and self._give_up_at is not None
        wait_s = _RETRY_S if waits_for_attempt else _TICK_S
        self._poller.poll(int(wait_s * 1000))

    def _keep_link(self, context: zmq.Context[zmq.Socket[bytes]], now: float) -> None:
        if now >= self._next_tick:
            self._next_tick = now + _TICK_S
            self._tick(now)
        if self._give_up_at is None:
            return
        if now >= self._give_up_at:
            if not self._wait_for_recovery(now):
                self._give_up()
        elif self._link is None and self._home is not None and is_over(self._home):
            self._give_up()  # nobody is left who could bring it back
        elif self._link is None and now >= self._next_attempt:
            self._link = ClientLink(context, self.address)
            self._link.send(encode(Ping()))

    def _tick(self, now: float) -> None:
        for call in [call for call in self._calls.values() if call.expired(now)]:
            self._tell_cancel(call.request_id)
            self._calls.pop(call.request_id).fail(timeout_error())
        link = self._link
        if link is not None and link.established:
            if self._calls and now - link.heard > SILENCE_S:
                self._lost(f"it has been silent for {SILENCE_S:g} s")
        elif link is not None and now - link.opened > HANDSHAKE_S:
            self._retry(now)

    # ------------------------------------------------------------ calls

    def _begin(self, call: Call) -> None:
        if not self._open:
            call.fail(_closed_error())
        elif self._lost_for_good is not None:
            call.fail(self._lost_for_good)
        else:
            self._calls[call.request_id] = call
            if self._link is not None and self._link.established:
                self._send_call(call)
            else:
                self._want_link()

    def _send_call(self, call: Call) -> None:
        try:
            payload = encode(call.message())
            if len(payload) > MAX_MESSAGE_BYTES:
                raise InvalidRequestError(
                    f"The request has {len(payload)} bytes; a server takes up to "
                    f"{MAX_MESSAGE_BYTES}. Shorten the prompt."
                )
        except (TPRuntimeError, OverflowError, TypeError, ValueError) as error:
            known = isinstance(error, TPRuntimeError)
            failure = error if known else InvalidRequestError(f"It cannot be sent: {error}.")
            self._calls.pop(call.request_id).fail(failure)  # type: ignore[arg-type]
            return
        if self._link is not None:
            self._link.send(payload)

    def _cancel(self, request_id: str) -> None:
        call = self._calls.pop(request_id, None)
        if call is not None:
            self._tell_cancel(request_id)
            call.fail(cancelled_error())

    def _tell_cancel(self, request_id: str) -> None:
        if self._link is not None and self._link.established:
            self._link.send(encode(Cancel(request_id)))

    def _add_ping(self, future: Future[str]) -> None:
        if not self._open:
            future.set_exception(_closed_error())
        elif self._lost_for_good is not None:
            future.set_exception(self._lost_for_good)
        elif self._link is not None and self._link.established:
            future.set_result(self._link.instance)
        else:
            self._pings.append(future)
            self._want_link()

    def _fail_all(self, error: TPRuntimeError) -> None:
        calls, self._calls = self._calls, {}
        pings, self._pings = self._pings, []
        for call in calls.values():
            call.fail(error)
        for future in pings:
            future.set_exception(error)

    def _close(self) -> None:
        if self._open:
            self._open = False
            for request_id in self._calls:
                self._tell_cancel(request_id)
            self._fail_all(_closed_error())

    # ------------------------------------------------------------ answers

    def _read(self, link: ClientLink) -> None:
        lost = link.lost()  # asked first: what arrived before the loss is read below
        try:
            while self._link is link and (message := link.receive()) is not None:
                self._take(link, message)
        except ProtocolError as error:
            self._misunderstood(link, error)
            return
        if lost and self._link is link:
            if link.established:
                self._lost("the connection was closed")
            else:
                self._retry(time.monotonic())

    def _misunderstood(self, link: ClientLink, error: ProtocolError) -> None:
        """What came is no message. From a server that was understood before, once, it is an
        accident, and the connection is replaced."""
        now = time.monotonic()
        last, self._misunderstood_at = self._misunderstood_at, now
        if link.established and now - last > MISUNDERSTOOD_S and self._reconnect_timeout_s > 0:
            logger.warning("The connection to %s is replaced: %s", self.address, error)
            self._lost("a message of it could not be read")
            return
        self._lost_for_good = error
        self._fail_all(error)
        self._drop_link()

    def _take(self, link: ClientLink, message: ServerMessage) -> None:
        if isinstance(message, Outputs):
            for delta in message.deltas:
                call = self._calls.get(delta.request_id)
                if call is not None and call.take_delta(delta):
                    del self._calls[delta.request_id]
        elif isinstance(message, Alive):
            if not link.established:
                self._established(link, message.instance)
        elif isinstance(message, Failed) and not message.request_id:
            error = error_from_code(message.code, message.message)
            self._fail_all(error)  # it concerns the client as such, for instance its version
        else:
            call = self._calls.get(message.request_id)
            if call is not None and call.take(message):
                del self._calls[message.request_id]

    def _established(self, link: ClientLink, instance: str) -> None:
        link.established, link.instance = True, instance
        self._give_up_at = None
        self._home = find_home(self.address)
        for call in list(self._calls.values()):
            self._send_call(call)
        pings, self._pings = self._pings, []
        for future in pings:
            future.set_result(instance)

    # ------------------------------------------------------------ the link

    def _want_link(self) -> None:
        if self._give_up_at is None:
            self._give_up_at = time.monotonic() + self._connect_timeout_s
            self._next_attempt = 0.0

    def _wait_for_recovery(self, now: float) -> bool:
        """A first connection is given as long as a second one where the server of this machine has
        just lost its coordinator."""
        waited, most = self._connect_timeout_s, self._reconnect_timeout_s
        if self._home is not None or waited >= most:
            return False
        home = find_home(self.address)
        if home is None or not home.recovering():
            return False
        self._home, self._give_up_at = home, now + most - waited
        return True

    def _lost(self, why: str) -> None:
        """An established connection is gone."""
        self._drop_link()
        now = time.monotonic()
        if self._reconnect_timeout_s <= 0:
            self._lost_for_good = ServerUnavailableError(
                f"The server at {self.address} is gone ({why}); start it again and make a new "
                "Client."
            )
            self._fail_all(self._lost_for_good)
            return
        self._give_up_at = now + self._reconnect_timeout_s
        self._next_attempt = now

    def _retry(self, now: float) -> None:
        self._drop_link()
        self._next_attempt = now + _RETRY_S

    def _give_up(self) -> None:
        home, self._home = self._home, None
        failure = None if home is None else home.read_failure()
        recovering = home is not None and home.recovering()
        self._give_up_at = None
        self._drop_link()
        if failure is not None:
            self._fail_all(failure.error())  # the server left word why it ended
            return
        if recovering:
            self._fail_all(
                ServerUnavailableError(
                    f"The server at {self.address} is being started again and did not answer "
                    f"within {self._reconnect_timeout_s:g} s; try again, or give a longer "
                    "reconnect_timeout."
                )
            )
            return
        self._fail_all(
            ServerUnavailableError(
                f"Nobody answers at {self.address}; start a server with `tp-runtime serve MODEL` "
                "or give the address of one."
            )
        )

    def _drop_link(self) -> None:
        if self._link is not None:
            self._link.close()
            self._link = None


def _closed_error() -> ServerUnavailableError:
    return ServerUnavailableError("This client is closed; make a new one.")
