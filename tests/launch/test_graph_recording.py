"""A server asks its workers for the graphs they put off, and lives on if they die of that."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.tiny_models import make_tiny
from tp_runtime import Client, SamplingParams
from tp_runtime.coordinator.graph_recording import IDLE_S, MOST_CRASHES
from tp_runtime.engine_config import EngineConfig
from tp_runtime.errors import RequestFailedError
from tp_runtime.launch.bench.null_rank import GRAPHS_LEFT
from tp_runtime.launch.bench.null_server import NullServer
from tp_runtime.launch.bench.settled import wait_until_settled

TOKENS = 450
PARAMS = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    folder: Path = make_tiny("qwen3", tmp_path_factory.mktemp("recording") / "model")
    return EngineConfig(model=str(folder), device="cpu", num_kv_blocks=1000, max_model_len=512)


def until(condition: Callable[[], bool], seconds: float = 15.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.05)


def test_an_idle_server_asks_for_all_of_them_and_then_for_nothing(config: EngineConfig) -> None:
    with NullServer(config) as server, Client(server.address) as client:
        wait_until_settled(server.address, 15.0)
        until(lambda: client.info().stats["steps"] == GRAPHS_LEFT)
        time.sleep(2 * IDLE_S)
        assert client.info().stats["steps"] == GRAPHS_LEFT
        assert client.info().stats["graphs_left"] == 0


def test_a_benchmark_does_not_begin_while_graphs_are_left(config: EngineConfig) -> None:
    rank = "tests.launch.aborting_rank"
    with NullServer(config, rank=rank) as server, pytest.raises(RequestFailedError, match="record"):
        wait_until_settled(server.address, 0.05)


def test_workers_that_die_of_it_cost_no_request(config: EngineConfig) -> None:
    """They are replaced, and at last asked no more; no request is suspected."""
    ends: list[int] = []
    rank = "tests.launch.aborting_rank"
    with NullServer(config, 8000, rank=rank) as server, Client(server.address) as client:

        def one() -> None:
            output = client.generate([5, 6, 7], PARAMS, detokenize=False)
            ends.append(len(output.token_ids))

        threads = [threading.Thread(target=one) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert ends == [TOKENS] * 4
        until(lambda: client.info().stats["worker_restarts"] == MOST_CRASHES)
        assert client.info().stats["graphs_left"] == 0
        assert client.info().state == "ready"
