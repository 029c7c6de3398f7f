"""What HTTP adds to the time to the first token, at low load.

    python -m tests.http.bench_http

A fake engine answers at once, so that what is left is the way: the client's own socket, or HTTP on
top of it. One request at a time; medians of 300.
"""

from __future__ import annotations

import http.client
import json
import statistics
import tempfile
import time
from pathlib import Path

from tests.http.api_server import api_server
from tp_runtime import Client

ROUNDS = 300


def through_client(client: Client) -> float:
    started = time.perf_counter()
    stream = client.generate("Hello", max_tokens=2, stream=True)
    next(stream)
    seconds = time.perf_counter() - started
    list(stream)
    return seconds


def through_http(connection: http.client.HTTPConnection) -> float:
    body = json.dumps({"prompt": "Hello", "max_tokens": 2, "stream": True})
    started = time.perf_counter()
    connection.request("POST", "/v1/completions", body)
    answer = connection.getresponse()
    answer.readline()
    seconds = time.perf_counter() - started
    answer.read()
    return seconds


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, api_server(Path(folder)) as api:
        connection = http.client.HTTPConnection(api.url.removeprefix("http://"))
        with Client(api.engine.address) as client:
            pairs = [(through_client(client), through_http(connection)) for _ in range(ROUNDS)]
    direct, web = (1000 * statistics.median(times) for times in zip(*pairs, strict=True))
    print(f"first token, p50: client {direct:.2f} ms, HTTP {web:.2f} ms, added {web - direct:.2f}")


if __name__ == "__main__":
    main()
