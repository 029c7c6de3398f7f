"""What HTTP adds to the time to the first token, at low load.

    python -m tests.http.bench_http

A fake engine in a process of its own answers at once, so that what is left is the way: our asyncio
client's own socket, or HTTP on top of it. One request at a time, the ways in turn, so that whatever
else the machine does meets them alike. Medians of 400, and the CPU time that the HTTP process
spends on a request.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx

from tests.coordinator.fake_engine import fake_server
from tests.http.api_server import wait_healthy
from tests.text.small_tokenizers import byte_level
from tp_runtime import AsyncClient
from tp_runtime.engine_config import EngineConfig
from tp_runtime.http.settings import HttpSettings
from tp_runtime.launch.http_process import HttpProcess
from tp_runtime.run_folder import ProcessId, RunFolder, ServerInfo

ROUNDS = 400
TOKENS = 2
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


async def through_client(client: AsyncClient) -> float:
    started = time.perf_counter()
    stream = client.generate("Hello", max_tokens=TOKENS, stream=True)
    await anext(stream)
    seconds = time.perf_counter() - started
    async for _ in stream:
        pass
    return seconds


class Connection:
    """A bare HTTP client on one connection: what is measured is the server, not a library."""

    def __init__(self, url: str) -> None:
        host, _, port = url.removeprefix("http://").partition(":")
        self._socket = socket.create_connection((host, int(port)), timeout=30)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def stream(self, path: str, body: bytes) -> float:
        """Seconds until the first event has come; returns when all have."""
        head = f"POST {path} HTTP/1.1\r\nHost: here\r\nContent-Length: {len(body)}\r\n\r\n"
        request, answer = head.encode() + body, b""
        started = time.perf_counter()
        self._socket.sendall(request)
        while b"data: " not in answer:
            answer += self._more()
        seconds = time.perf_counter() - started
        assert answer.startswith(b"HTTP/1.1 200"), answer
        while not answer.endswith(b"\r\n0\r\n\r\n"):
            answer += self._more()
        return seconds

    def _more(self) -> bytes:
        part = self._socket.recv(1 << 16)
        assert part, "the server has closed the connection"
        return part


def through_http(connection: Connection, path: str) -> float:
    prompt: dict[str, object] = {"prompt": "Hello"}
    if "chat" in path:
        prompt = {"messages": [{"role": "user", "content": "Hello"}]}
    body = json.dumps({**prompt, "max_tokens": TOKENS, "stream": True})
    return connection.stream(path, body.encode())


def cpu_seconds(pid: int) -> float:
    """User and system time of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * _TICK_S


async def measure(address: str, url: str, rounds: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {"client": [], "completions": [], "chat": []}
    connection = Connection(url)
    async with AsyncClient(address) as client:
        for _ in range(rounds):
            times["client"].append(await through_client(client))
            times["completions"].append(through_http(connection, "/v1/completions"))
            times["chat"].append(through_http(connection, "/v1/chat/completions"))
    return times


def run_engine() -> None:
    """The child: a front end with a fake engine, until its standard input is closed."""
    with fake_server() as server:
        print(server.address, flush=True)
        sys.stdin.read()


@contextlib.contextmanager
def engine_process() -> Iterator[str]:
    """The address of a fake engine in a process of its own."""
    command = [sys.executable, "-m", "tests.http.bench_http", "--engine"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdin is not None and child.stdout is not None
        yield child.stdout.readline().strip()
        child.stdin.close()


@contextlib.contextmanager
def http_process(folder: Path, address: str) -> Iterator[HttpProcess]:
    """The HTTP server as it is run, in front of the engine at `address`."""
    byte_level().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text("{}")
    run = RunFolder(folder / "run").create()
    run.write_config(EngineConfig(model=str(folder), served_model_name="fake"))
    info = ServerInfo(
        address=address,
        model="fake",
        tensor_parallel_size=1,
        device="cpu",
        process=ProcessId.current(),
    )
    run.write_server(info)
    process = HttpProcess(HttpSettings(port=0))
    try:
        process.start(run)
        with httpx.Client(base_url=process.url, timeout=30) as client:
            wait_healthy(client)
        yield process
    finally:
        process.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--engine", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.engine:
        run_engine()
        return
    rounds = given.rounds
    with (
        tempfile.TemporaryDirectory() as folder,
        engine_process() as address,
        http_process(Path(folder), address) as process,
    ):
        asyncio.run(measure(address, process.url, 20))  # warm
        before, pid = cpu_seconds(process.pid), process.pid
        times = asyncio.run(measure(address, process.url, rounds))
        cpu_ms = 1000 * (cpu_seconds(pid) - before) / (2 * rounds)
    medians = {name: 1000 * statistics.median(all_) for name, all_ in times.items()}
    print(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    print(f"first token, p50: client {medians['client']:.2f} ms")
    for name in ("completions", "chat"):
        added = medians[name] - medians["client"]
        print(f"  {name} over HTTP {medians[name]:.2f} ms, added {added:.2f} ms")
    print(f"CPU time of the HTTP process: {cpu_ms:.2f} ms a request")


if __name__ == "__main__":
    main()
