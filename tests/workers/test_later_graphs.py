"""Graphs recorded while requests run, in their CPU form: tokens are those of all at once."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from tests.gloo_pool import GlooPool
from tests.tiny_models import make_tiny
from tests.workers.engine_in_process import EngineInProcess
from tp_runtime.messages import Chunk
from tp_runtime.ops.group import TPGroup
from tp_runtime.sampling_params import SamplingParams
from tp_runtime.workers import graph_votes
from tp_runtime.workers.decode_graphs import (
    FIRST_SIZES,
    DecodeGraphs,
    first_sizes,
    graph_sizes,
)
from tp_runtime.workers.later_graphs import LaterGraph, LaterGraphs
from tp_runtime.workers.prefill_graphs import PrefillGraphs, Room
from tp_runtime.workers.sharded_sampler import ShardedSampler

SIZES = (1, 2, 4, 8)
ROOMS = (Room(0, 16), Room(0, 64), Room(4, 16), Room(8, 128))
NUM_LATER = len(SIZES) + len(ROOMS) - 2
PARAMS = (
    SamplingParams(temperature=0.0, max_tokens=14, ignore_eos=True),
    SamplingParams(temperature=0.9, max_tokens=14, ignore_eos=True),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny("qwen3", tmp_path_factory.mktemp("later") / "model"))


def answers(group: TPGroup, folder: str, later: bool) -> tuple[list[list[int]], int]:
    """Requests that come one by one; `later`: every step records one graph that is left. The other
    figure: how many are recorded in the end."""
    engine = EngineInProcess(Path(folder), group=group, sampler=ShardedSampler, graph_sizes=SIZES)
    runner = engine.runner
    if later:
        decode = DecodeGraphs(runner.model, runner.kv, runner.state, runner.sampler, SIZES)
        prefill = PrefillGraphs(runner.model, runner.kv, runner.state, ROOMS)
        decode.record(SIZES[-1])
        prefill.record(ROOMS[-1])
        todo = prefill.later() + decode.later()
        runner.graphs, runner.prefill_graphs = decode, prefill
        runner.later_graphs = LaterGraphs(group, runner.state.device, todo)
        record_with_every_plan(engine)
    rng = random.Random(2)
    seqs = []
    for i in range(7):
        prompt = [rng.randrange(300) for _ in range(rng.choice((3, 12, 40)))]
        seqs.append(engine.add(str(i), prompt, PARAMS[i % 2], seed=i))
        engine.step()
    engine.run()
    left = 0
    if later and runner.graphs is not None and runner.prefill_graphs is not None:
        left = len(runner.graphs.later()) + len(runner.prefill_graphs.later())
        assert runner.later_graphs is not None
        assert len(runner.later_graphs) == 0
    return [seq.generated_ids for seq in seqs], left


def nobody_missed() -> int:
    return 0


def record_with_every_plan(engine: EngineInProcess) -> None:
    plan = engine.scheduler.plan
    engine.scheduler.plan = lambda: plan(bool(engine.scheduler.has_work))  # type: ignore[method-assign]


def test_tokens_are_those_of_a_start_with_all_graphs(folder: str) -> None:
    want, _ = answers(TPGroup.single(), folder, later=False)
    assert answers(TPGroup.single(), folder, later=True) == (want, 0)


def short_of_memory(group: TPGroup, folder: str, fails_on: int) -> tuple[list[list[int]], int]:
    """As `answers`; on one rank there is no memory at the second and the last time of asking."""
    looks, free = [0], graph_votes._free_bytes

    def free_bytes(device: torch.device) -> int:
        looks[0] += 1
        return 0 if group.rank == fails_on and looks[0] in (2, NUM_LATER) else free(device)

    with patch.object(graph_votes, "_free_bytes", free_bytes):
        return answers(group, folder, later=True)


@pytest.mark.parametrize("fails_on", [-1, 0, 1])
def test_ranks_record_together_and_leave_out_what_one_of_them_has_no_memory_for(
    gloo_pool: Callable[[int], GlooPool], folder: str, fails_on: int
) -> None:
    """A rank that has recorded a graph which another has not would use it, and wait for ever."""
    want, _ = answers(TPGroup.single(), folder, later=False)
    found = gloo_pool(2).run(short_of_memory, folder, fails_on)
    assert found == [(want, 0 if fails_on < 0 else 2)] * 2


def late_fault(group: TPGroup) -> list[int]:
    """Rank 1 fails in the end of a recording, when nobody waits for it any more."""
    forgotten: list[int] = []

    def record() -> None:
        group.comm.all_reduce(torch.ones(3))
        if group.rank == 1:
            raise RuntimeError("the capture failed")

    graph = LaterGraph(record, partial(forgotten.append, group.rank), nobody_missed)
    LaterGraphs(group, torch.device("cpu"), [graph]).record_next()
    return forgotten


def test_a_capture_that_fails_on_one_rank_is_forgotten_by_all(
    gloo_pool: Callable[[int], GlooPool],
) -> None:
    assert gloo_pool(2).run(late_fault) == [[0], [1]]


def test_a_step_without_rows_records_and_is_answered(folder: str) -> None:
    engine = EngineInProcess(Path(folder), graph_sizes=SIZES)
    recorded: list[int] = []
    engine.runner.later_graphs = LaterGraphs(
        TPGroup.single(),
        torch.device("cpu"),
        [LaterGraph(partial(recorded.append, i), recorded.clear, nobody_missed) for i in range(2)],
    )
    for number in range(3):  # one more than there are
        plan = engine.scheduler.plan(records_graph=True)
        assert plan is not None
        result = engine.runner.step(plan)
        assert result.ready()
        assert result.ids.wait().shape == (0,)
        assert recorded == list(range(min(number + 1, 2)))


def test_what_most_steps_would_have_taken_comes_first(folder: str) -> None:
    engine = EngineInProcess(Path(folder), max_num_seqs=8)
    runner, state = engine.runner, engine.runner.state
    decode = DecodeGraphs(runner.model, runner.kv, state, runner.sampler, SIZES)
    prefill = PrefillGraphs(runner.model, runner.kv, state, ROOMS)
    later = LaterGraphs(TPGroup.single(), state.device, prefill.later() + decode.later())
    chunks = [Chunk(0, 0, bytes(4 * 20), sample=True)]
    assert decode.fitting(4) == 0
    for _ in range(2):
        assert prefill.fitting(5, chunks) is None
    later.record_next()
    assert prefill.fitting(5, chunks) == Room(8, 128)
    later.record_next()
    assert decode.fitting(2) == 4
    assert prefill.fitting(0, chunks) == Room(8, 128)
    for _ in range(2):
        later.record_next()
    assert decode.fitting(2) == 2
    assert prefill.fitting(0, chunks) == Room(0, 64)


def test_without_memory_nothing_is_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 20, 1 << 40))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 5 << 20)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 3 << 20)
    begun: list[int] = []
    wrong = graph_votes.with_memory(
        lambda: begun.append(1), TPGroup.single(), torch.device("cuda", 0)
    )
    assert "only 3 MiB of device memory are free" in wrong
    assert not begun


def test_a_worker_begins_with_few_sizes_and_the_largest() -> None:
    assert first_sizes(graph_sizes(256)) == tuple(reversed(FIRST_SIZES))
    assert first_sizes(graph_sizes(100)) == (100, 64, 16, 4, 1)
    assert first_sizes(graph_sizes(1)) == (1,)
    assert first_sizes(graph_sizes(4096))[0] == 512
    sizes = graph_sizes(512)
    assert list(sizes) == sorted(set(sizes))
