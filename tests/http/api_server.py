"""The HTTP process as it is run, in front of a front end with a fake engine (coordinator tests)."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tests.coordinator.fake_engine import FakeServer, fake_server
from tests.text.small_tokenizers import byte_level
from tp_runtime.engine_config import EngineConfig
from tp_runtime.http.settings import HttpSettings
from tp_runtime.launch.http_process import HttpProcess
from tp_runtime.run_folder import ProcessId, RunFolder, ServerInfo


@dataclass
class ApiServer:
    engine: FakeServer
    process: HttpProcess
    http: httpx.Client
    url: str

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.http.post(path, json=body)

    def events(self, path: str, **body: Any) -> list[dict[str, Any]]:
        """The events of a stream, which must end with [DONE]."""
        answer = self.post(path, stream=True, **body)
        assert answer.status_code == 200, answer.text
        assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
        blocks = answer.text.split("\n\n")
        assert blocks[-2:] == ["data: [DONE]", ""]
        return [json.loads(block.removeprefix("data: ")) for block in blocks[:-2]]


def announce(folder: RunFolder, server: FakeServer) -> None:
    """What the coordinator writes when it listens."""
    info = ServerInfo(
        address=server.address,
        model="fake",
        tensor_parallel_size=1,
        device="cpu",
        process=ProcessId.current(),
    )
    folder.write_server(info)


@contextlib.contextmanager
def api_server(folder: Path, api_key: str = "", **fake: Any) -> Iterator[ApiServer]:
    """Serves on a free port of loopback; `fake` are arguments of fake_server."""
    byte_level().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text("{}")
    run = RunFolder(folder / "run").create()
    run.write_config(EngineConfig(model=str(folder), served_model_name="fake"))
    process = HttpProcess(HttpSettings(port=0, api_key=api_key))
    try:
        with fake_server(**fake) as engine, httpx.Client(base_url=process.url, timeout=30) as http:
            announce(run, engine)
            process.start(run)
            wait_healthy(http)
            yield ApiServer(engine, process, http, process.url)
    finally:
        process.close()


def wait_healthy(http: httpx.Client, seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while http.get("/health").status_code != 200:
        assert time.monotonic() < deadline, http.get("/health").text
        time.sleep(0.02)
