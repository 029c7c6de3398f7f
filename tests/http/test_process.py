"""The HTTP process: what it loads, when it ends, that it comes back; keys."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from tests.coordinator.fake_engine import fake_server, wait_until
from tests.http.api_server import announce, api_server, wait_healthy
from tests.launch.processes import ROOT
from tp_runtime.http.settings import HttpSettings
from tp_runtime.launch.http_process import HttpProcess
from tp_runtime.run_folder import ProcessId, RunFolder

CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}


def process_of(http: HttpProcess) -> ProcessId:
    assert http._process is not None
    return ProcessId.of(http._process.pid)


def test_it_loads_neither_torch_nor_transformers_nor_numpy(tmp_path):
    """While it serves, tokenizer included."""
    with api_server(tmp_path) as api:
        api.post("/v1/chat/completions", **CHAT).raise_for_status()
        maps = Path(f"/proc/{process_of(api.process).pid}/maps").read_text()
        assert "msgspec" in maps  # the look would show them
        for name in ("/torch/", "/transformers/", "/numpy/", "/triton/"):
            assert name not in maps
    source = "import sys, tp_runtime.http.process as p; print([m for m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", source],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "'uvicorn'" in done.stdout
    for name in ("torch", "transformers", "numpy", "triton"):
        assert f"'{name}'" not in done.stdout


def test_the_key_is_asked_for_where_work_is_done(tmp_path):
    with api_server(tmp_path, api_key="secret") as api:
        for path in ("/health", "/metrics", "/version"):
            assert api.http.get(path).status_code == 200
        answer = api.post("/v1/chat/completions", **CHAT)
        assert answer.status_code == 401
        assert answer.json()["error"]["code"] == "invalid_api_key"
        assert answer.headers["www-authenticate"] == "Bearer"
        assert api.http.get("/v1/models").status_code == 401
        api.http.headers["authorization"] = "Bearer wrong"
        assert api.http.get("/v1/models").status_code == 401
        api.http.headers["authorization"] = "Bearer secret"
        assert api.post("/v1/chat/completions", **CHAT).status_code == 200
        line = Path(f"/proc/{process_of(api.process).pid}/cmdline").read_bytes()
        assert b"secret" not in line  # every user can read command lines


def test_a_killed_http_process_is_started_again_at_the_same_port(tmp_path, capfd):
    with api_server(tmp_path) as api:
        first = process_of(api.process)
        os.kill(first.pid, signal.SIGKILL)
        wait_until(lambda: not first.alive())

        def is_back() -> bool:
            api.process.turn()
            return process_of_or_none(api.process) not in (None, first)

        wait_until(is_back)
        with httpx.Client(base_url=api.url, timeout=20) as http:  # the old connection is gone
            wait_healthy(http)
            assert http.post("/v1/chat/completions", json=CHAT).status_code == 200
    assert "started again" in capfd.readouterr().err


def process_of_or_none(http: HttpProcess) -> ProcessId | None:
    try:
        return process_of(http)
    except ProcessLookupError:
        return None


_STARTER = """
import sys, time
from tp_runtime.http.settings import HttpSettings
from tp_runtime.launch.http_process import HttpProcess
from tp_runtime.run_folder import RunFolder
http = HttpProcess(HttpSettings(port=0))
http.start(RunFolder(sys.argv[1]).create())
print(http._process.pid, http.url, flush=True)
time.sleep(60)
"""


def test_it_ends_with_the_process_that_started_it(tmp_path):
    starter = subprocess.Popen(
        [sys.executable, "-c", _STARTER, str(tmp_path / "run")],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert starter.stdout is not None
    pid, url = starter.stdout.readline().split()
    http = ProcessId.of(int(pid))
    with httpx.Client(base_url=url, timeout=20) as client:
        assert client.get("/health").status_code == 503  # it serves, and knows no coordinator
    starter.kill()
    starter.wait()
    wait_until(lambda: not http.alive(), 2.0)


def test_before_the_coordinator_is_there_it_says_what_is_waited_for(tmp_path):
    folder = RunFolder(tmp_path / "run").create()
    folder.write_status("starting", "loading weights, 3 of 9 files")
    process = HttpProcess(HttpSettings(port=0))
    try:
        process.start(folder)
        with httpx.Client(base_url=process.url, timeout=20) as http:
            health = http.get("/health")
            assert health.status_code == 503
            assert health.json()["status"] == "starting"
            answer = http.post("/v1/chat/completions", json=CHAT)
            assert answer.status_code == 503
            assert "loading weights, 3 of 9 files" in answer.json()["error"]["message"]
            assert answer.headers["retry-after"]
            with fake_server() as engine:
                announce(folder, engine)
                wait_healthy(http)
    finally:
        process.close()


def test_a_coordinator_that_comes_back_is_found_again(tmp_path):
    """At its old address, as the keeper starts it; requests under way go on."""
    listen = f"ipc://{tmp_path}/client.sock"
    folder = RunFolder(tmp_path / "run").create()
    process = HttpProcess(HttpSettings(port=0))
    try:
        process.start(folder)
        with httpx.Client(base_url=process.url, timeout=30) as http:
            with fake_server(listen) as engine:
                announce(folder, engine)
                wait_healthy(http)
            health = http.get("/health")
            assert (health.status_code, health.json()["status"]) == (503, "unavailable")
            with fake_server(listen):
                wait_healthy(http)
                assert http.post("/v1/chat/completions", json=CHAT).status_code == 200
    finally:
        process.close()


@pytest.mark.parametrize("host", ["0.0.0.0"])
def test_an_open_address_without_a_key_is_warned_of(host, capfd):
    HttpProcess(HttpSettings(host=host, port=0)).close()
    assert "--api-key" in capfd.readouterr().err
    HttpProcess(HttpSettings(host=host, port=0, api_key="k")).close()
    assert capfd.readouterr().err == ""


def test_closing_leaves_no_process(tmp_path):
    with api_server(tmp_path) as api:
        process = process_of(api.process)
        started = time.monotonic()
        api.process.close()
        assert time.monotonic() - started < 2
        assert not process.alive()
