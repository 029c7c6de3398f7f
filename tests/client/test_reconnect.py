"""The coordinator dies in mid-stream: clients go on where they stood, or get a typed error."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.coordinator.fake_engine import (
    FakeServer,
    fake_server,
    story,
    story_text,
    wait_until,
)
from tp_runtime import AsyncClient, Client, StreamChunk
from tp_runtime.coordinator.text_threads import Outgoing
from tp_runtime.errors import (
    InvalidRequestError,
    ProtocolError,
    ServerUnavailableError,
    TPRuntimeError,
    WorkerFailedError,
)
from tp_runtime.messages import unpack_ids
from tp_runtime.run_folder import ProcessId, RunFolder, ServerInfo

STEP_S = 0.002


def restart(server: FakeServer) -> FakeServer:
    """Another coordinator at the same address, with nothing known of the first one."""
    address = server.address
    server.close()
    return FakeServer(address, STEP_S)


STOP = story_text(3, 90)[-4:]
PARAMETERS: dict[str, dict[str, Any]] = {
    "plain": {"seed": 3},
    "seed drawn": {},
    "several samples": {"seed": 3, "n": 3},
    "penalties": {"seed": 3, "repetition_penalty": 1.2, "presence_penalty": 0.5, "top_p": 0.9},
    "min_tokens": {"seed": 3, "min_tokens": 60, "stop": [STOP, story_text(3, 50)[-3:]]},
    "stop string": {"seed": 3, "stop": [STOP], "include_stop_str_in_output": True},
    "text held back": {"seed": 3, "stop": [story_text(3, 200)[:-3] + "#"]},
    "logprobs": {"seed": 3, "logprobs": 1, "prompt_logprobs": 1},
}


@pytest.mark.parametrize("name", PARAMETERS)
@pytest.mark.parametrize("stream", [True, False])
def test_a_request_goes_on_where_it_stood_after_a_restart(
    name: str, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tp_runtime.client_arguments.BLOCKING_FLUSH_S", 0.05)
    server = FakeServer(step_s=STEP_S)
    try:
        with Client(server.address) as client:
            fields = {**PARAMETERS[name], "max_tokens": 110}
            if stream:
                running = client.generate("x", stream=True, **fields)
                chunks = [next(running) for _ in range(30)]
                server = restart(server)
                chunks += list(running)
                output = running.output
                for sample in output.outputs:
                    mine = [chunk for chunk in chunks if chunk.index == sample.index]
                    assert "".join(chunk.text for chunk in mine) == sample.text
                    assert [i for chunk in mine for i in chunk.token_ids] == sample.token_ids
            else:
                pending = client.submit("x", **fields)
                wait_until(lambda: pending.num_tokens > 25)
                server = restart(server)
                output = pending.result(20)
            resumed = server.engine.submitted[0].sequences
            assert all(seq.num_generated >= 20 for seq in resumed)
            server.engine.step_s = 0.0
            undisturbed = client.generate("x", **{**fields, "seed": output.seed})
    finally:
        server.close()
    assert [(o.text, o.token_ids, o.finish_reason, o.logprobs) for o in output.outputs] == [
        (o.text, o.token_ids, o.finish_reason, o.logprobs) for o in undisturbed.outputs
    ]
    assert output.prompt_logprobs == undisturbed.prompt_logprobs
    assert output.prompt_token_ids == undisturbed.prompt_token_ids


def test_what_is_sent_again_says_what_the_client_has() -> None:
    server = FakeServer(step_s=STEP_S)
    try:
        with Client(server.address) as client:
            stream = client.chat(
                [{"role": "user", "content": "x"}], max_tokens=100, n=2, seed=5, stream=True
            )
            for _ in range(30):
                next(stream)
            server = restart(server)
            list(stream)
            (again,) = server.engine.submitted
            assert [seq.seed for seq in again.sequences] == [5, 5]
            first = again.sequences[0]
            assert first.tokens[: first.prompt_len].tolist() == stream.output.prompt_token_ids
    finally:
        server.close()


def test_samples_that_had_ended_are_not_asked_for_again() -> None:
    server = FakeServer(step_s=STEP_S)
    stop = story_text(8, 7)[-2:]  # in the first sample only; the second begins after it
    try:
        with Client(server.address) as client:
            stream = client.generate("x", n=2, seed=8, max_tokens=150, stop=[stop], stream=True)
            chunks: list[StreamChunk] = []
            while not chunks or chunks[-1].finish_reason is None:
                chunks.append(next(stream))
            assert chunks[-1].index == 0
            server = restart(server)
            list(stream)
            assert [s.key.sample for s in server.engine.submitted[0].sequences] == [1]
            assert stream.output.outputs[0].token_ids == story(8, 7)
            assert stream.output.outputs[1].token_ids == story(9, 150)
    finally:
        server.close()


def test_requests_made_while_the_server_is_away_wait_for_it() -> None:
    server = FakeServer(step_s=STEP_S)
    address = server.address
    with Client(address) as client:
        server.close()
        time.sleep(0.1)
        pending = client.submit("x", max_tokens=5, seed=1)
        time.sleep(0.3)
        server = FakeServer(address)
        try:
            assert pending.result(10).token_ids == story(1, 5)
            assert client.info().model == "fake"
        finally:
            server.close()


def test_a_server_that_does_not_come_back_is_given_up_and_may_be_found_later() -> None:
    server = FakeServer(step_s=STEP_S)
    address = server.address
    with Client(address, reconnect_timeout=0.5, connect_timeout=0.5) as client:
        stream = client.generate("x", stream=True)
        next(stream)
        server.close()
        start = time.monotonic()
        with pytest.raises(ServerUnavailableError, match="Nobody answers"):
            list(stream)
        assert time.monotonic() - start < 3
        with pytest.raises(ServerUnavailableError):
            client.generate("x")
        server = FakeServer(address)
        try:
            assert client.generate("x", max_tokens=2, seed=0).token_ids == story(0, 2)
        finally:
            server.close()


def test_without_reconnect_the_error_comes_within_a_second() -> None:
    server = FakeServer(step_s=STEP_S)
    with Client(server.address, reconnect=False) as client:
        stream = client.generate("x", stream=True)
        next(stream)
        server.close()
        start = time.monotonic()
        with pytest.raises(ServerUnavailableError, match="is gone"):
            list(stream)
        with pytest.raises(ServerUnavailableError, match="is gone"):
            client.generate("x")
        assert time.monotonic() - start < 1


@pytest.mark.parametrize("end", ["put away", "cause left behind", "owner gone"])
def test_a_local_server_that_cannot_come_back_is_given_up_at_once(
    end: str, no_servers: Path
) -> None:
    owner = subprocess.Popen(["sleep", "100"])
    folder = RunFolder.for_owner(ProcessId.of(owner.pid)).create()
    server = FakeServer(step_s=STEP_S)
    folder.write_server(
        ServerInfo(
            address=server.address,
            model="m",
            tensor_parallel_size=1,
            device="cpu",
            process=ProcessId.current(),
        )
    )
    with Client(reconnect_timeout=30) as client:
        stream = client.generate("x", stream=True)
        next(stream)
        expected: type[TPRuntimeError] = ServerUnavailableError
        if end == "put away":
            (folder.path / "server.json").unlink()
        else:
            owner.kill()
            owner.wait()
        if end == "cause left behind":
            folder.write_failure("worker_failed", "Rank 1 was killed.")
            expected = WorkerFailedError
        server.close()
        start = time.monotonic()
        with pytest.raises(expected, match=r"Nobody answers|Rank 1 was killed"):
            list(stream)
        assert time.monotonic() - start < 2
    owner.kill()
    owner.wait()


@pytest.fixture
def recovering(no_servers: Path) -> Iterator[str]:
    """The address of a server of this machine whose coordinator was killed a moment ago."""
    owner = subprocess.Popen(["sleep", "100"])
    dead = subprocess.Popen(["sleep", "100"])
    folder = RunFolder.for_owner(ProcessId.of(owner.pid)).create()
    address = f"ipc://{folder.client_socket}"
    folder.write_server(
        ServerInfo(
            address=address,
            model="m",
            tensor_parallel_size=1,
            device="cpu",
            process=ProcessId.of(dead.pid),
        )
    )
    dead.kill()
    dead.wait()
    yield address
    owner.kill()
    owner.wait()


@contextmanager
def server_soon(address: str) -> Iterator[None]:
    """Another coordinator listens there after a while."""
    servers: list[FakeServer] = []
    timer = threading.Timer(0.8, lambda: servers.append(FakeServer(address)))
    timer.start()
    try:
        yield
    finally:
        timer.join()
        servers[0].close()


@pytest.mark.parametrize("by", ["address", "itself"])
def test_a_client_made_while_the_coordinator_is_started_again_waits_for_it(
    recovering: str, by: str
) -> None:
    """It used to give up after the time for a first connection, or to find no server at all."""
    address = recovering if by == "address" else None
    with server_soon(recovering), Client(address, connect_timeout=0.2) as client:
        assert client.generate("x", max_tokens=5, seed=1).token_ids == story(1, 5)


def test_an_async_client_waits_too(recovering: str) -> None:
    async def main() -> list[int]:
        async with AsyncClient(recovering, connect_timeout=0.2) as client:
            return (await client.generate("x", max_tokens=5, seed=1)).token_ids

    with server_soon(recovering):
        assert asyncio.run(asyncio.wait_for(main(), 30)) == story(1, 5)


def test_a_coordinator_that_does_not_come_back_in_time_is_told_as_such(recovering: str) -> None:
    start = time.monotonic()
    with pytest.raises(ServerUnavailableError, match=r"being started again .* within 0\.8 s"):
        Client(recovering, connect_timeout=0.2, reconnect_timeout=0.8)
    assert 0.7 < time.monotonic() - start < 5
    start = time.monotonic()
    with pytest.raises(ServerUnavailableError, match="Nobody answers"):
        Client(recovering, connect_timeout=0.2, reconnect=False)
    assert time.monotonic() - start < 1


def test_async_streams_go_on_too() -> None:
    async def main() -> None:
        server = FakeServer(step_s=STEP_S)
        try:
            async with AsyncClient(server.address) as client:
                stream = client.generate("x", max_tokens=150, seed=1, stream=True)
                text = ""
                for _ in range(20):
                    text += (await anext(stream)).text
                server = await asyncio.to_thread(restart, server)
                async for chunk in stream:
                    text += chunk.text
                assert text == story_text(1, 150)
        finally:
            server.close()

    asyncio.run(asyncio.wait_for(main(), 30))


def test_one_message_that_cannot_be_read_costs_the_connection_and_not_the_client(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with fake_server(step_s=STEP_S) as server, Client(server.address) as client:

        def garble() -> None:
            (identity,) = server.frontend._clients
            server.frontend._outgoing.put([Outgoing(identity, b"\xc1")])

        stream = client.generate("x", max_tokens=150, seed=1, stream=True)
        text = "".join(next(stream).text for _ in range(20))
        garble()
        assert text + "".join(chunk.text for chunk in stream) == story_text(1, 150)
        assert "cannot be read" in caplog.text
        stream = client.generate("x", max_tokens=150, seed=1, stream=True)
        next(stream)
        wait_until(lambda: len(server.frontend._clients) == 1)
        garble()
        with pytest.raises(ProtocolError, match="cannot be read"):
            list(stream)


def test_many_requests_survive_several_restarts() -> None:
    server = FakeServer(step_s=STEP_S)
    try:
        with Client(server.address) as client:
            pending = [client.submit("x", max_tokens=120, seed=i) for i in range(50)]
            for _ in range(3):
                time.sleep(0.2)
                server = restart(server)
            assert [p.result(30).token_ids for p in pending] == [story(i, 120) for i in range(50)]
    finally:
        server.close()


def test_a_refused_resumption_is_an_error_and_no_endless_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another model may be served at the address now."""
    server = FakeServer(step_s=STEP_S)
    try:
        with Client(server.address) as client:
            stream = client.generate([1, 2], max_tokens=200, stop=["#"], stream=True)
            next(stream)
            address = server.address
            server.close()
            server = FakeServer(address, tokenizer=None)
            with pytest.raises(InvalidRequestError, match="no tokenizer"):
                list(stream)
    finally:
        server.close()


class ServerProcess:
    """A fake server in a process of its own, to be killed."""

    def __init__(self, listen: str) -> None:
        code = (
            "import sys, time\n"
            "from tests.coordinator.fake_engine import FakeServer\n"
            f"server = FakeServer({listen!r}, {STEP_S})\n"
            "print(server.address, flush=True)\n"
            "time.sleep(1000)\n"
        )
        self.process = subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=os.getcwd()
        )
        assert self.process.stdout is not None
        self.address = self.process.stdout.readline().strip()

    def kill(self, signum: int = signal.SIGKILL) -> None:
        self.process.send_signal(signum)
        if signum == signal.SIGKILL:
            self.process.wait()


@pytest.mark.parametrize("transport", ["tcp", "ipc"])
def test_kill_minus_nine_of_the_server_process(transport: str, tmp_path: Path) -> None:
    listen = "tcp://127.0.0.1:0" if transport == "tcp" else f"ipc://{tmp_path}/s.sock"
    first = ServerProcess(listen)
    second = None
    try:
        with Client(first.address) as client:
            stream = client.generate("x", max_tokens=150, seed=2, stream=True)
            text = "".join(next(stream).text for _ in range(30))
            first.kill()
            second = ServerProcess(first.address)
            text += "".join(chunk.text for chunk in stream)
            assert text == story_text(2, 150)
    finally:
        for server in (first, second):
            if server is not None:
                server.kill()


def test_a_stopped_server_is_given_up_after_its_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tp_runtime.client_connection.SILENCE_S", 1.5)
    monkeypatch.setattr("tp_runtime.client_connection.HANDSHAKE_S", 0.3)
    server = ServerProcess("tcp://127.0.0.1:0")
    try:
        with Client(server.address, reconnect_timeout=1.0) as client:
            stream = client.generate("x", stream=True)
            next(stream)
            server.kill(signal.SIGSTOP)
            start = time.monotonic()
            with pytest.raises(ServerUnavailableError):
                list(stream)
            assert 1.0 < time.monotonic() - start < 6
    finally:
        server.kill()


def test_a_killed_client_frees_what_it_had_asked_for() -> None:
    code = (
        "import sys\nfrom tp_runtime import Client\n"
        "client = Client(sys.argv[1])\n"
        "streams = [client.generate('x', stream=True) for _ in range(3)]\n"
        "for stream in streams:\n    next(stream)\n"
        "client.submit('y')\nprint('running', flush=True)\nimport time; time.sleep(100)\n"
    )
    with fake_server(step_s=0.01) as server:
        child = subprocess.Popen(
            [sys.executable, "-c", code, server.address], stdout=subprocess.PIPE, text=True
        )
        with child:
            assert child.stdout is not None
            assert child.stdout.readline() == "running\n"
            wait_until(lambda: len(server.engine.running) == 4)
            child.kill()
            start = time.monotonic()
            wait_until(lambda: not server.engine.running)
            assert time.monotonic() - start < 1.0
        assert server.frontend.num_requests == 0
        assert server.frontend.counters["clients_gone"] == 1


def test_unpacked_resume_ids_are_those_received() -> None:
    """The wire form of a resumed request, as another implementation of a client would see it."""
    from tp_runtime.client_calls import GenerateCall
    from tp_runtime.messages import Accepted, Generate, SampleDelta, pack_ids
    from tp_runtime.sampling_params import SamplingParams

    call = GenerateCall(Generate("r", SamplingParams(n=2), messages=[{"role": "user"}]))
    original = call.message()
    call.take(Accepted("r", 77, 2, pack_ids([5, 6])))
    call.take_delta(SampleDelta("r", 1, pack_ids([9, 8]), "ab"))
    call.take_delta(SampleDelta("r", 0, pack_ids([7]), "c", "stop"))
    again = call.message()
    assert isinstance(original, Generate)
    assert isinstance(again, Generate)
    assert (original.messages, original.resume) == ([{"role": "user"}], [])
    assert (again.prompt_token_ids, again.messages, again.own_text) == ([5, 6], None, True)
    assert again.params.seed == 77
    assert [(r.index, unpack_ids(r.token_ids), r.text_sent) for r in again.resume] == [
        (1, [9, 8], 2)
    ]
