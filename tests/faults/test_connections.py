"""Sockets are closed under each process, and each is sent what cannot be read.

One server with an HTTP process takes all cases in turn, a stream of a client and one over HTTP
under way in each. Both must go on to the undisturbed answer."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import zmq

from tests.faults.fault_server import (
    FLAGS,
    FaultServer,
    Load,
    Recovery,
    fault_server,
    tokens_lost,
    wait_for,
)
from tests.faults.http_stream import healthy, http_process, http_stream
from tests.faults.sockets import close_sockets
from tests.launch.processes import ROOT, TORCHRUN
from tests.tiny_models import make_tiny
from tp_runtime import Client
from tp_runtime.errors import TPRuntimeError
from tp_runtime.messages import FRAME_HEADER

pytestmark = pytest.mark.faults
TOKENS = 100
COMMAND = (*TORCHRUN, "--max-restarts=100", "-m", "tp_runtime.launch.serve")
"""torchrun itself, because `tp-runtime serve` replaces lost keepers three times only."""
SETTINGS = (*FLAGS, "--step-deadline", "20", "--http", "--port", "0")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return str(make_tiny("qwen3", tmp_path_factory.mktemp("model") / "tiny"))


@pytest.fixture(scope="module")
def server(tiny, tmp_path_factory):
    with fault_server(tmp_path_factory.mktemp("server"), *COMMAND, tiny, *SETTINGS) as server:
        yield server


@dataclass
class Undisturbed:
    streams: list
    http: str


@pytest.fixture(scope="module")
def undisturbed(server):
    with Client(server.address) as client:
        return Undisturbed(Load(client, TOKENS).finish(), "".join(http_stream(server, TOKENS)))


def run(
    server: FaultServer,
    undisturbed: Undisturbed,
    happened: Callable[[], Callable[[], float | None]],
    *,
    http: bool = True,
) -> tuple[Recovery, int]:
    """The fault happens while streams run; the number of tokens lost (a text over HTTP included).

    `http` False: the HTTP process goes with the victim, its first keeper, and so do its streams."""
    server.wait_ready()
    with Client(server.address) as client:
        load = Load(client, TOKENS)
        over_http = http_stream(server, TOKENS)
        text = next(over_http)
        load.wait_tokens(20)
        recovery = server.watch_recovery(happened(), 60)
        lost = tokens_lost(load.finish(), undisturbed.streams)
        if http:
            assert text + "".join(over_http) == undisturbed.http
    server.wait_ready()
    return recovery, lost


CLOSED = {
    "worker 0": lambda s: s.workers()[0],
    "worker 1": lambda s: s.workers()[1],
    "coordinator": lambda s: s.coordinator,
    "keeper 1": lambda s: s.keepers()[1],
    "keeper 0": lambda s: s.keepers()[0],
}


@pytest.mark.parametrize("victim", CLOSED)
def test_closed_sockets_cost_no_token(server, undisturbed, victim, fault_table):
    def happened() -> Callable[[], float]:
        when = time.monotonic()
        assert close_sockets(CLOSED[victim](server).pid) > 0
        return lambda: when

    recovery, lost = run(server, undisturbed, happened, http="keeper" not in victim)
    assert lost == 0
    fault_table.add(victim, "decode", "sockets closed", recovery, lost)


GARBAGE = {
    "worker 0": (0, "frame", "a damaged plan"),
    "worker 1": (1, "frame", "a damaged plan"),
    "coordinator, answers": ("coordinator", "frame", "a damaged answer"),
    "coordinator, status": (1, "run", "garbage"),
    "coordinator, keeper 1": ("keeper1", "turn", "garbage"),
    "keepers": ("coordinator", "tick", "garbage to keepers"),
}


@pytest.mark.parametrize("victim", GARBAGE)
def test_what_cannot_be_read_costs_no_token(server, undisturbed, victim, fault_table):
    """A byte of shared memory flips, or a packet of a socket is no message."""
    fault = GARBAGE[victim]
    recovery, lost = run(
        server, undisturbed, lambda: server.plan(*fault), http="keeper" not in victim
    )
    assert lost == 0
    fault_table.add(victim, "decode", "corrupt frame", recovery, lost)


def quietly(server: FaultServer, undisturbed: Undisturbed, fault: Callable[[Client], None]) -> int:
    """Nothing recovers, because nothing needs to: the server itself goes on through this."""
    server.wait_ready()
    with Client(server.address) as client:
        restarts = client.info().stats["worker_restarts"]
        load, over_http = Load(client, TOKENS), http_stream(server, TOKENS)
        text = next(over_http)
        load.wait_tokens(20)
        fault(client)
        lost = tokens_lost(load.finish(), undisturbed.streams)
        assert text + "".join(over_http) == undisturbed.http
        assert client.info().stats["worker_restarts"] == restarts
    return lost


def test_clients_that_get_what_cannot_be_read_connect_again(server, undisturbed, fault_table):
    """The HTTP process is one of them."""

    def fault(client: Client) -> None:
        wait_for(server.plan("coordinator", "tick", "garbage to clients"), 10)

    started = time.monotonic()
    lost = quietly(server, undisturbed, fault)
    assert lost == 0
    seconds = time.monotonic() - started
    fault_table.add("client, HTTP process", "decode", "corrupt frame", Recovery(0, seconds), lost)


def test_garbage_from_a_client_is_answered_and_harms_nobody(server, undisturbed, fault_table):
    def fault(client: Client) -> None:
        with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
            stranger.connect(server.address)
            for frames in ([b"x"], [FRAME_HEADER, b"\xc1"], [FRAME_HEADER], [b"", b"", b""]):
                stranger.send_multipart(frames)
            assert stranger.poll(5000)
            stranger.close(0)

    lost = quietly(server, undisturbed, fault)
    assert lost == 0
    fault_table.add("coordinator, clients", "decode", "corrupt frame", Recovery(0, 0), lost)


@pytest.mark.parametrize("victim", ["client", "HTTP process"])
def test_a_closed_connection_of_a_client_is_made_again(server, undisturbed, victim, fault_table):
    def fault(client: Client) -> None:
        pid = os.getpid() if victim == "client" else http_process(server).pid
        # Only what leads to the coordinator: the streams over HTTP are not to be resumed.
        assert close_sockets(pid, to=server.coordinator.pid) > 0

    lost = quietly(server, undisturbed, fault)
    assert lost == 0
    fault_table.add(victim, "decode", "sockets closed", Recovery(0, 0), lost)


_CLIENT = """
import sys
from tp_runtime import Client
with Client(sys.argv[1]) as client:
    for chunk in client.generate([5, 6], max_tokens=200, ignore_eos=True, stream=True):
        print(len(chunk.token_ids), flush=True)
"""


@pytest.mark.parametrize("action", ["kill", "stop"])
def test_a_client_that_dies_or_hangs_harms_nobody(server, undisturbed, action, fault_table):
    command = [sys.executable, "-c", _CLIENT, server.address]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as victim:
        assert victim.stdout is not None
        victim.stdout.readline()
        recovery = Recovery(0, 0)

        def fault(client: Client) -> None:
            os.kill(victim.pid, {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[action])
            if action == "kill":
                started = time.monotonic()
                wait_for(lambda: client.info().stats["running"] <= 6, 10)
                recovery.detected_s = recovery.recovered_s = time.monotonic() - started

        lost = quietly(server, undisturbed, fault)
        victim.kill()
    assert lost == 0
    fault_table.add("client", "decode", action, recovery, lost)


@pytest.mark.parametrize("action", ["kill", "stop"])
def test_an_http_process_that_dies_or_hangs_is_replaced(server, undisturbed, action, fault_table):
    """Its own streams are cut off; those of other clients go on, and so does its port."""
    server.wait_ready()
    with Client(server.address) as client:
        load = Load(client, TOKENS)
        load.wait_tokens(20)
        victim = http_process(server)
        server.send(victim, action)
        started = time.monotonic()
        wait_for(lambda: not victim.alive(), 20)
        detected = time.monotonic() - started
        wait_for(lambda: healthy(server), 20)
        assert "".join(http_stream(server, TOKENS)) == undisturbed.http
        recovery = Recovery(detected, time.monotonic() - started)
        lost = tokens_lost(load.finish(), undisturbed.streams)
    assert lost == 0
    fault_table.add("HTTP process", "decode", action, recovery, lost)


def test_a_launcher_whose_sockets_are_closed_goes_on_or_takes_everything_along(
    tiny, tmp_path, fault_table
):
    """torchrun's own store is among them, in which new workers would meet."""
    with fault_server(tmp_path, *COMMAND, tiny, *FLAGS) as server:
        with Client(server.address) as client:
            undisturbed = Load(client).finish()
            load = Load(client)
            load.wait_tokens(20)
            started = time.monotonic()
            assert close_sockets(server.program.process.pid) > 0
            lost = 0
            try:
                lost = tokens_lost(load.finish(), undisturbed)
                outcome = "sockets closed: goes on"
            except TPRuntimeError:
                outcome = "sockets closed: all end"
                server.program.assert_all_gone(10.0)
            recovery = Recovery(0, time.monotonic() - started)
        assert lost == 0
        fault_table.add("torchrun", "decode", outcome, recovery, lost)
