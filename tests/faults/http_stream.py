"""A completion over HTTP, piece by piece, and the process that serves it."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator

from tests.faults.fault_server import FaultServer
from tests.launch.processes import command_of_pid
from tp_runtime.launch.descendants import descendants
from tp_runtime.run_folder import ProcessId

PROMPT = [5, 6, 7, 8]


def http_stream(server: FaultServer, max_tokens: int) -> Iterator[str]:
    """Pieces of text as an HTTP client gets them; the last line must say that it is whole."""
    fields = {"prompt": PROMPT, "temperature": 0, "max_tokens": max_tokens, "ignore_eos": True}
    with urllib.request.urlopen(f"{server.folder.read_http()}/v1/models", timeout=30) as answer:
        fields["model"] = json.load(answer)["data"][0]["id"]
    request = urllib.request.Request(
        f"{server.folder.read_http()}/v1/completions",
        json.dumps({**fields, "stream": True}).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as lines:
        for line in lines:
            if line.strip() == b"data: [DONE]":
                return
            if line.startswith(b"data: "):
                yield json.loads(line.removeprefix(b"data: "))["choices"][0]["text"]
    raise AssertionError("the stream was cut off")


def http_process(server: FaultServer) -> ProcessId:
    found = descendants(server.program.process.pid)
    return next(p for p in found if "tp_runtime.http" in command_of_pid(p.pid))


def healthy(server: FaultServer) -> bool:
    """Whether the HTTP process answers and has found the coordinator."""
    try:
        with urllib.request.urlopen(f"{server.folder.read_http()}/health", timeout=5) as answer:
            return answer.status == 200
    except OSError:
        return False
