"""Two torchrun agents stand for two hosts: one server over both, and the loss of either.

They share this machine, but nothing that several hosts would not: each has a run folder, a ring and
keepers of its own, and one of them meets the coordinator over TCP alone.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.launch.processes import SMALL, TORCHRUN, Program, command_of_pid, program
from tests.tiny_models import make_tiny
from tp_runtime import Client, SamplingParams, TPRuntimeError
from tp_runtime.run_folder import ProcessId

GREEDY = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=24)
LONG = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=200)
PROMPTS = ["The quick brown", "fox", "jumps over the lazy dog"]
ENTRY = ("-m", "tp_runtime.launch.serve")
RELAY = "tp_runtime.coordinator.relay_process"


class Hosts(NamedTuple):
    """`first` is the one that got rank 0."""

    first: Program
    other: Program
    address: str

    def relay(self) -> ProcessId:
        self.other.watch()
        (found,) = (p for p in self.other.seen if RELAY in command_of_pid(p.pid))
        return found


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny("qwen3", tmp_path_factory.mktemp("models") / "tiny"))


def on_core(i: int, *command: str) -> tuple[str, ...]:
    """Each host has a core of its own: two that both think they have them all slow each other."""
    cores = sorted(os.sched_getaffinity(0))
    program = (
        f"import os, sys; os.sched_setaffinity(0, {{{cores[i % len(cores)]}}}); "
        "os.execv(sys.argv[1], sys.argv[1:])"
    )
    return (sys.executable, "-c", program, *command)


@contextlib.contextmanager
def two_hosts(tiny: str, folder: Path, *flags: str) -> Iterator[Hosts]:
    launch = (sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1")
    meet = ("--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--rdzv-id=test")
    command = (*launch, *meet, "--local-addr=127.0.0.1", *ENTRY, tiny, *SMALL, *flags)
    with (
        program(folder / "a", *on_core(0, *command)) as a,
        program(folder / "b", *on_core(1, *command)) as b,
    ):
        first = wait_ready(a, b)
        other = b if first is a else a
        yield Hosts(first, other, first.wait_ready(1).address)


def wait_ready(a: Program, b: Program, seconds: float = 90) -> Program:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        for host in (a, b):
            host.watch()
            assert host.process.poll() is None, a.text() + b.text()
            for folder in host.folders():
                status = folder.read_status()
                if folder.read_server() and status is not None and status.state == "ready":
                    return host
        time.sleep(0.05)
    raise AssertionError(f"not ready after {seconds} s: {a.text()}{b.text()}")


def kill(process: ProcessId) -> None:
    os.kill(process.pid, signal.SIGKILL)


def agent(host: Program) -> ProcessId:
    return ProcessId.of(host.process.pid)


def test_tokens_equal_one_host_workers_come_back_and_a_signal_ends_both_hosts(tiny, tmp_path):
    with (
        program(tmp_path / "one", *TORCHRUN, *ENTRY, tiny, *SMALL) as one,
        Client(one.wait_ready(90).address) as client,
    ):
        alone = [client.generate(prompt, GREEDY).token_ids for prompt in PROMPTS]
    trace = tmp_path / "trace.json"
    with (
        two_hosts(tiny, tmp_path, "--trace", str(trace)) as hosts,
        Client(hosts.address) as client,
    ):
        assert client.info().tensor_parallel_size == 2
        together = [client.generate(prompt, GREEDY).token_ids for prompt in PROMPTS]
        assert together == alone
        # A worker of the other host is lost in the middle of a stream: nothing of it shows.
        whole = client.generate(PROMPTS[0], LONG).token_ids
        stream = client.generate(PROMPTS[0], LONG, stream=True)
        next(stream)
        (worker,) = hosts.other.workers()
        kill(worker)
        list(stream)
        assert stream.output.token_ids == whole
        assert "Rank 1: killed by SIGKILL" in hosts.first.text()
        hosts.other.signal(signal.SIGINT)
        assert_server_gone(hosts, 8.0)
    check_trace(trace)


def check_trace(file: Path) -> None:
    """Both ranks of both generations ran every step, at about the same time."""
    events = json.loads(file.read_text())["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    runs: dict[str, dict[int, float]] = {name: {} for name in names.values()}
    for event in events:
        if event["name"] == "run":
            runs[names[event["pid"]]][event["args"]["step"]] = event["ts"]
    for suffix in ("", ", generation 2"):
        here, there = runs["rank 0" + suffix], runs["rank 1" + suffix]
        common = here.keys() & there.keys()  # the step in which one was killed is its alone
        assert len(common) > 20 and len(here.keys() ^ there.keys()) <= 16
        assert all(abs(here[step] - there[step]) < 1e6 for step in common)


def assert_server_gone(hosts: Hosts, seconds: float) -> None:
    """Nothing of the server is left. A torchrun may wait for the other in its own exit barrier."""
    deadline = time.monotonic() + seconds
    while left := [c for host in hosts[:2] for c in host.left() if "distributed.run" not in c]:
        assert time.monotonic() < deadline, f"left after {seconds} s: {left}"
        time.sleep(0.05)


@pytest.mark.faults
@pytest.mark.parametrize("lost", ["other agent", "first agent", "relay"])
def test_a_lost_host_is_a_typed_error_in_five_seconds_and_leaves_nothing(tiny, tmp_path, lost):
    with two_hosts(tiny, tmp_path) as hosts, Client(hosts.address, reconnect=False) as client:
        stream = client.generate(PROMPTS[0], LONG, stream=True)
        next(stream)
        victim = {
            "other agent": lambda: agent(hosts.other),
            "first agent": lambda: agent(hosts.first),
            "relay": hosts.relay,
        }[lost]()
        started = time.monotonic()
        kill(victim)
        with pytest.raises(TPRuntimeError) as caught:
            list(stream)
        assert time.monotonic() - started < 5.0
        if lost != "first agent":
            assert "Rank 1" in str(caught.value) and "is lost" in str(caught.value)
        hosts.other.assert_all_gone(10.0)
        hosts.first.assert_all_gone(10.0)


@pytest.mark.faults
def test_a_dead_coordinator_comes_back_and_so_do_the_relays_and_the_streams(tiny, tmp_path):
    """Its first keeper starts the next one, the other host's a relay; clients send again."""
    with (
        two_hosts(tiny, tmp_path) as hosts,
        Client(hosts.address, reconnect_timeout=100) as client,
    ):
        whole = client.generate(PROMPTS[0], LONG).token_ids
        for _ in range(2):
            stream = client.generate(PROMPTS[0], LONG, stream=True, timeout=100)
            next(stream)
            coordinator = hosts.first.folders()[0].read_coordinator()
            kill(coordinator)
            list(stream)
            assert stream.output.token_ids == whole
            assert hosts.first.folders()[0].read_coordinator() != coordinator
        assert hosts.other.process.poll() is None
        hosts.other.signal(signal.SIGINT)
        assert_server_gone(hosts, 8.0)


@pytest.mark.faults
def test_a_stopped_relay_counts_as_a_lost_host(tiny, tmp_path):
    with two_hosts(tiny, tmp_path) as hosts, Client(hosts.address, reconnect=False) as client:
        relay = hosts.relay()
        started = time.monotonic()
        os.kill(relay.pid, signal.SIGSTOP)
        try:
            with pytest.raises(TPRuntimeError, match=r"nothing was heard from it for 3 s"):
                client.generate(PROMPTS[0], LONG)
            assert time.monotonic() - started < 5.0
        finally:
            os.kill(relay.pid, signal.SIGCONT)
        hosts.first.assert_all_gone(10.0)
        hosts.other.assert_all_gone(10.0)


@pytest.mark.slow
def test_hosts_with_other_settings_are_refused_by_name(tiny, tmp_path):
    launch = (sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1")
    meet = ("--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--rdzv-id=test")
    command = (*launch, *meet, "--local-addr=127.0.0.1", *ENTRY, tiny, *SMALL)
    with (
        program(tmp_path / "a", *command, "--max-num-seqs", "8") as a,
        program(tmp_path / "b", *command, "--max-num-seqs", "16") as b,
    ):
        assert a.wait(90) != 0
        assert b.wait(30) != 0
        assert "was started with other settings: max_num_seqs" in a.text() + b.text()
        a.assert_all_gone(5.0)
        b.assert_all_gone(5.0)
