"""Waits are explained once they are long, and not before."""

from __future__ import annotations

import io

import pytest

from tp_runtime.launch import wait_notice
from tp_runtime.launch.server_notice import ServerNotice
from tp_runtime.launch.wait_notice import WaitNotice
from tp_runtime.run_folder import ProcessId, RunFolder, ServerInfo


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(wait_notice.time, "monotonic", lambda: now[0])
    return now


def told(clock, phases) -> list[str]:
    """Lines printed when each (seconds, text) goes on for so long."""
    stream = io.StringIO()
    notice = WaitNotice(stream)
    for seconds, text in phases:
        for _ in range(int(seconds * 10)):
            clock[0] += 0.1
            notice.update(text)
    return stream.getvalue().splitlines()


def test_nothing_is_said_in_the_first_two_seconds(clock):
    assert told(clock, [(1.8, "loading")]) == []


def test_a_long_wait_is_named_once_and_again_after_ten_seconds(clock):
    lines = told(clock, [(13, "loading")])
    assert lines == ["tp_runtime: loading ...", "tp_runtime: loading (12 s) ..."]


def test_many_short_phases_are_told_once_the_whole_wait_is_long(clock):
    lines = told(clock, [(1.0, "a"), (1.0, "b"), (1.0, "c"), (0.3, "d"), (1.0, "e")])
    assert lines == ["tp_runtime: c ...", "tp_runtime: e ..."]


def test_the_address_is_told_once_when_the_server_is_ready(tmp_path):
    folder = RunFolder(tmp_path / "f").create()
    stream = io.StringIO()
    notice = ServerNotice(folder, stream=stream)
    notice.turn()
    folder.write_server(
        ServerInfo(
            address="ipc:///x",
            model="tiny",
            tensor_parallel_size=2,
            device="cpu",
            process=ProcessId.current(),
        )
    )
    folder.write_status("ready")
    notice.turn()
    notice.turn()
    assert stream.getvalue().count("tiny is ready on 2 cpu workers at ipc:///x") == 1
