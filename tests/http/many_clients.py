"""Many streaming clients for some minutes: no error, and nothing of the server grows.

    python -m tests.http.many_clients --clients 64 --minutes 2

Two CPU workers with tiny random weights. Each client streams one chat after the other over HTTP;
some ask for JSON, some leave in the middle. Resident memory and open descriptors of every process
are read when a quarter of the time is over (by then buffers and caches have their size) and at the
end. Prints a table; the exit status is 1 when anything was wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tests.launch.processes import (
    SMALL,
    TP_RUNTIME,
    Program,
    command_of_pid,
    parent_of,
    program,
)
from tests.tiny_models import make_tiny
from tp_runtime.run_folder import ProcessId

MOST_GROWTH_MIB = 16.0
"""Resident memory of a process between the two readings; allocators keep what they once had."""
MOST_FDS = 2
FORMAT = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "integer"}}}


@dataclass
class Reading:
    rss_mib: float
    fds: int


def readings(server: Program) -> dict[str, Reading]:
    """By the process's part in the server, and its number."""
    server.watch()
    found: dict[str, Reading] = {}
    for process in sorted(server.seen, key=lambda each: each.pid):
        if not process.alive():
            continue
        folder = Path(f"/proc/{process.pid}")
        pages = int((folder / "statm").read_text().split()[1])
        rss = pages * os.sysconf("SC_PAGE_SIZE") / 2**20
        found[f"{part_of(process)} {process.pid}"] = Reading(rss, len(os.listdir(folder / "fd")))
    return found


def part_of(process: ProcessId) -> str:
    """coordinator, http, cli (the launcher), serve (a keeper) or worker (forked by a keeper)."""
    command = command_of_pid(process.pid)
    if command == command_of_pid(parent_of(process)):
        return "worker"
    return command.partition("-m tp_runtime.")[2].split()[0].removeprefix("launch.")


class Clients:
    """`count` clients on one event loop, until `deadline`."""

    def __init__(self, url: str, count: int, deadline: float) -> None:
        self._url, self._count, self._deadline = url, count, deadline
        self.done: Counter[str] = Counter()
        self.errors: list[str] = []
        self.tokens = 0

    async def run(self) -> None:
        limits = httpx.Limits(max_connections=self._count)
        async with httpx.AsyncClient(base_url=self._url, limits=limits, timeout=60) as http:
            await asyncio.gather(*(self._client(http, number) for number in range(self._count)))

    async def _client(self, http: httpx.AsyncClient, number: int) -> None:
        rng = random.Random(number)
        while time.monotonic() < self._deadline:
            kind = rng.choice(["chat", "chat", "chat", "json", "leaves"])
            try:
                await self._stream(http, kind, rng)
                self.done[kind] += 1
            except Exception as error:
                self.errors.append(f"{kind}: {type(error).__name__}: {error}")

    async def _stream(self, http: httpx.AsyncClient, kind: str, rng: random.Random) -> None:
        words = " ".join(rng.choices(["time", "fox", "dog", "where"], k=rng.randint(1, 30)))
        body: dict[str, Any] = {
            "messages": [{"role": "user", "content": words}],
            "max_tokens": rng.randint(5, 40),
            "stream": True,
        }
        if kind == "json":
            body["response_format"] = FORMAT
        leave_after = rng.randint(1, 4) if kind == "leaves" else 0
        last, events = "", 0
        async with http.stream("POST", "/v1/chat/completions", json=body) as answer:
            if answer.status_code != 200:
                raise RuntimeError((await answer.aread()).decode())
            async for line in answer.aiter_lines():
                if not line.startswith("data: "):
                    continue
                last, events = line.removeprefix("data: "), events + 1
                if "error" in last and "error" in json.loads(last):
                    raise RuntimeError(last)
                self.tokens += 1
                if leave_after and events >= leave_after:
                    return
        if last != "[DONE]":
            raise RuntimeError(f"the stream ended with {last!r}")


async def load(url: str, server: Program, count: int, seconds: float) -> tuple[Clients, Any, Any]:
    clients = Clients(url, count, time.monotonic() + seconds)
    running = asyncio.create_task(clients.run())
    await asyncio.sleep(seconds / 4)
    before = readings(server)
    await running
    await asyncio.sleep(2)  # what clients left behind is let go
    return clients, before, readings(server)


def report(before: dict[str, Reading], after: dict[str, Reading]) -> list[str]:
    """Prints the table; what has grown too much."""
    wrong = [f"{name} is gone" for name in before.keys() - after.keys()]
    print(f"{'process':20} {'MiB':>7} {'then':>7} {'fds':>5} {'then':>5}")
    for name, then in after.items():
        first = before.get(name, then)
        print(f"{name:20} {first.rss_mib:7.1f} {then.rss_mib:7.1f} {first.fds:5} {then.fds:5}")
        if then.rss_mib - first.rss_mib > MOST_GROWTH_MIB:
            wrong.append(f"{name} grew by {then.rss_mib - first.rss_mib:.1f} MiB")
        if then.fds - first.fds > MOST_FDS:
            wrong.append(f"{name} has {then.fds - first.fds} descriptors more")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--minutes", type=float, default=2.0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tpr_") as name:
        os.environ.setdefault("XDG_RUNTIME_DIR", name)
        tiny = make_tiny("qwen3", Path(name) / "tiny")
        command = (*TP_RUNTIME, "serve", str(tiny), "-tp", "2", *SMALL, "--http", "--port", "0")
        with program(Path(name) / "out", *command) as server:
            server.wait_ready(150)
            url = server.folders()[0].read_http()
            clients, before, after = asyncio.run(
                load(url, server, given.clients, 60 * given.minutes)
            )
            state = httpx.get(f"{url}/health").json()["status"]
    wrong = report(before, after)
    if clients.errors:
        wrong.append(f"{len(clients.errors)} errors, the first: {clients.errors[0]}")
    if state != "ready":
        wrong.append(f"the server is {state}")
    streams = ", ".join(f"{count} {kind}" for kind, count in sorted(clients.done.items()))
    print(f"{given.clients} clients, {given.minutes:g} minutes: {streams}; {clients.tokens} events")
    print("\n".join(wrong) or "no error, no growth")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
