"""`tp-runtime serve` from the first line to the last process, as a person would see it."""

from __future__ import annotations

import os
import signal
import time

import pytest

from tests.launch.processes import SMALL, TORCHRUN, TP_RUNTIME, parent_of, program
from tests.tiny_models import make_tiny
from tp_runtime import Client, SamplingParams, ServerUnavailableError, WorkerFailedError
from tp_runtime.launch import exit_status
from tp_runtime.run_folder import list_servers

LONG = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=200)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return str(make_tiny("qwen3", tmp_path_factory.mktemp("models") / "tiny"))


@pytest.fixture
def serve(tiny, tmp_path):
    with program(tmp_path / "out", *TP_RUNTIME, "serve", tiny, "-tp", "2", *SMALL) as server:
        yield server


def first_chunk(client: Client):
    """A stream that has begun and goes on for long."""
    stream = client.generate("The quick brown", LONG, stream=True)
    next(stream)
    return stream


def test_a_server_answers_says_nothing_else_and_drains_on_sigterm(serve):
    info = serve.wait_ready()
    with Client() as client:  # the only one of this user
        assert client.address == info.address
        assert client.info().tensor_parallel_size == 2
        assert len(serve.workers()) == 2
        serve.wait_for("is ready on 2 cpu workers")
        stream = first_chunk(client)
        serve.signal(signal.SIGTERM)
        list(stream)
        assert len(stream.output.token_ids) == LONG.max_tokens
    assert serve.wait() == exit_status.OK
    serve.assert_all_gone()
    # Whatever is printed is ours: no warning of a library reaches the terminal.
    assert all(line.startswith("tp_runtime: ") for line in serve.text().splitlines()), serve.text()


def test_ctrl_c_during_generation_leaves_nothing_after_two_seconds(serve):
    address = serve.wait_ready().address
    with Client(address, reconnect=False) as client:
        first_chunk(client)
        serve.signal(signal.SIGINT)
        serve.assert_all_gone(2.0)
    assert serve.process.returncode == exit_status.OK


@pytest.mark.parametrize("processes", [1, 4], ids=["torch is imported", "keepers have started"])
def test_ctrl_c_during_start_leaves_nothing_after_two_seconds(serve, processes):
    while len(serve.seen) < processes or not serve.folders():
        serve.watch()
        time.sleep(0.02)
    time.sleep(0.3)
    serve.signal(signal.SIGINT)
    serve.assert_all_gone(2.0)
    assert serve.process.returncode == exit_status.OK
    assert "Traceback" not in serve.text()


@pytest.mark.faults
def test_a_lost_keeper_is_replaced_and_kill_minus_nine_of_the_launcher_ends_all(serve):
    address = serve.wait_ready().address
    with Client(address) as client:
        before = client.generate("The quick brown", LONG).token_ids
        worker = min(serve.workers(), key=lambda worker: worker.pid)
        os.kill(parent_of(worker), signal.SIGKILL)
        assert client.generate("The quick brown", LONG, timeout=60).token_ids == before
    with Client(address, reconnect=False) as client:
        stream = first_chunk(client)
        serve.signal(signal.SIGKILL)
        serve.assert_all_gone(2.0)
        # Which of the two it is depends on who saw the end first: the coordinator or the client.
        with pytest.raises((ServerUnavailableError, WorkerFailedError)):
            list(stream)


def test_a_second_signal_ends_everything_at_once(tiny, tmp_path):
    with program(tmp_path / "out", *TP_RUNTIME, "serve", tiny, *SMALL) as serve:
        address = serve.wait_ready().address
        with Client(address, reconnect=False) as client:
            first_chunk(client)
            # A stopped worker cannot finish its request, so the drain lasts.
            for worker in serve.workers():
                os.kill(worker.pid, signal.SIGSTOP)
            serve.signal(signal.SIGTERM)
            time.sleep(0.5)
            assert serve.process.poll() is None
            serve.signal(signal.SIGTERM)
            serve.assert_all_gone(2.0)
        assert serve.process.returncode == exit_status.of_signal(signal.SIGTERM)


def test_two_torchrun_servers_side_by_side_do_not_meet(tiny, tmp_path):
    other = str(make_tiny("llama", tmp_path / "other"))
    entry = ("-m", "tp_runtime.launch.serve")
    with (
        program(tmp_path / "a", *TORCHRUN, *entry, tiny, *SMALL) as first,
        program(tmp_path / "b", *TORCHRUN, *entry, other, *SMALL) as second,
    ):
        addresses = [first.wait_ready(120).address, second.wait_ready(120).address]
        assert sorted(s.address for s in list_servers()) == sorted(addresses)
        with pytest.raises(ServerUnavailableError, match="2 servers") as caught:
            Client()
        assert all(address in str(caught.value) for address in addresses)
        with Client(addresses[0]) as a, Client(addresses[1]) as b:
            assert a.info().architecture == "Qwen3ForCausalLM"
            assert b.info().architecture == "LlamaForCausalLM"
            assert len(first.workers()) == len(second.workers()) == 2
            first.signal(signal.SIGKILL)
            first.assert_all_gone(2.0)
            assert len(b.generate("The quick brown", LONG).token_ids) == LONG.max_tokens
            stream = first_chunk(b)
            second.signal(signal.SIGINT)
            second.assert_all_gone(2.0, but_torchrun=True)
            second.wait()
            stream.close()
