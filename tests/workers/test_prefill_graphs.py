"""Recorded steps with prompts against eager ones; the CPU form calls what a graph holds."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gloo_pool import GlooPool
from tests.tiny_models import make_tiny
from tests.workers.engine_in_process import EngineInProcess
from tp_runtime.engine_config import EngineConfig
from tp_runtime.messages import Chunk
from tp_runtime.ops.attention.metadata import DecodeMetadata, PrefillMetadata
from tp_runtime.ops.attention.reference import ReferenceBackend
from tp_runtime.ops.group import TPGroup
from tp_runtime.sampling_params import SamplingParams
from tp_runtime.workers import prefill_graphs
from tp_runtime.workers.prefill_check import record_prefills
from tp_runtime.workers.prefill_graphs import PrefillGraphs, Room, rooms_for
from tp_runtime.workers.runner import Runner
from tp_runtime.workers.sharded_sampler import ShardedSampler
from tp_runtime.workers.worker import Worker

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
DIFFERS = "a recorded step differs from the same step run eagerly"
ROOMS = (Room(0, 16), Room(0, 64), Room(3, 16), Room(3, 64), Room(8, 128))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("qwen3", tmp_path_factory.mktemp("prefill") / "model")


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rng = random.Random(5)
    return [[rng.randrange(320) for _ in range(n)] for n in (1, 16, 17, 70, 5, 128, 40)]


def tokens(
    folder: Path,
    prompts: list[list[int]],
    rooms: tuple[Room, ...] = ROOMS,
    params: SamplingParams = GREEDY,
    **limits: Any,
) -> tuple[list[list[int]], list[Room]]:
    """Requests that arrive one by one beside those that run; and the rooms that were used."""
    engine = EngineInProcess(folder, rooms=rooms, **limits)
    used: list[Room] = []
    graphs = engine.runner.prefill_graphs
    if graphs is not None:
        run = graphs.run

        def noting(room: Room, *args: Any) -> torch.Tensor:
            used.append(room)
            return run(room, *args)

        graphs.run = noting
    seqs = []
    for i, prompt in enumerate(prompts):
        seqs.append(engine.add(str(i), prompt, params, seed=i))
        engine.step()
    engine.run()
    return [seq.generated_ids for seq in seqs], used


@pytest.mark.parametrize(
    "limits", [{}, {"max_num_batched_tokens": 24}, {"num_blocks": 20}], ids=str
)
@pytest.mark.parametrize("graph_sizes", [(), (1, 2, 4, 8)], ids=["", "decode graphs"])
def test_recorded_steps_give_the_tokens_of_eager_ones(
    folder: Path, prompts: list[list[int]], limits: dict[str, int], graph_sizes: tuple[int, ...]
) -> None:
    """Chunks of prompts, cached prefixes after preemption, more rows than there is room for."""
    want, _ = tokens(folder, prompts, (), **limits)
    got, used = tokens(folder, prompts, graph_sizes=graph_sizes, **limits)
    assert got == want
    assert len(set(used)) >= 3


def test_several_prompts_share_a_step_and_find_each_others_blocks(folder: Path) -> None:
    shared = list(range(32))
    prompts = [[*shared, i] for i in range(3)] + [[7]]
    results = []
    for rooms in ((), (Room(0, 128),)):
        engine = EngineInProcess(folder, rooms=rooms)
        seqs = [engine.add(str(i), prompt, GREEDY) for i, prompt in enumerate(prompts)]
        engine.run()
        results.append([seq.generated_ids for seq in seqs])
    assert results[0] == results[1]


def test_logprobs_of_prompts_are_those_of_eager_steps(
    folder: Path, prompts: list[list[int]]
) -> None:
    params = SamplingParams(
        temperature=0.0, max_tokens=3, ignore_eos=True, logprobs=2, prompt_logprobs=2
    )
    results = []
    for rooms in ((), ROOMS):
        engine = EngineInProcess(folder, rooms=rooms, max_num_batched_tokens=50)
        found: dict[str, list[float]] = {}
        for i, prompt in enumerate(prompts):
            engine.add(str(i), prompt, params)
        while engine.scheduler.has_work:
            engine.step()
            for update in engine.updates:
                tops = [*(update.prompt_logprobs or ()), update.logprobs]
                values = [top.chosen.logprob for top in tops if top is not None]
                found.setdefault(str(update.seq.key), []).extend(values)
        results.append(found)
    assert results[0].keys() == results[1].keys()
    for name, values in results[0].items():
        assert len(values) > 2
        assert values == pytest.approx(results[1][name], abs=1e-5)


def test_padding_is_inert_even_when_unset_memory_is_nan(
    folder: Path, prompts: list[list[int]]
) -> None:
    want, _ = tokens(folder, prompts[:3], ())
    engine = EngineInProcess(folder, rooms=[Room(8, 64)], enable_prefix_caching=False)
    for layer in engine.runner.kv:
        layer.k.fill_(float("nan"))
        layer.v.fill_(float("nan"))
    engine.runner.state.block_tables.fill_(engine.limits.num_blocks - 1)
    seqs = []
    for i, prompt in enumerate(prompts[:3]):
        seqs.append(engine.add(str(i), prompt, GREEDY, seed=i))
        engine.step()
    engine.run()
    assert [seq.generated_ids for seq in seqs] == want
    assert bool(engine.runner.kv[0].k[-1].isnan().all())


def test_the_smallest_room_is_taken_and_none_where_nothing_fits(folder: Path) -> None:
    graphs = EngineInProcess(folder, rooms=ROOMS, max_num_seqs=8).runner.prefill_graphs
    assert isinstance(graphs, PrefillGraphs)

    def fitting(rows: int, *chunks: int, start: int = 0) -> Room | None:
        return graphs.fitting(
            rows, [Chunk(0, start, bytes(4 * size), sample=True) for size in chunks]
        )

    assert fitting(0, 1) == Room(0, 16)
    assert fitting(0, 9, 8) == Room(0, 64)
    assert fitting(1, 16) == Room(3, 16)
    assert fitting(4, 16) == Room(8, 128)
    assert fitting(0, *[2] * 8) == Room(0, 64)  # more chunks than the room of 16 tokens has
    assert fitting(0, *[2] * 9) is None
    assert fitting(9, 16) is None
    assert fitting(0, 129) is None
    assert fitting(0, 1, start=prefill_graphs.LONGEST_PREFIX) == Room(0, 16)
    assert fitting(0, 1, start=prefill_graphs.LONGEST_PREFIX + 1) is None


def test_a_room_that_is_not_recorded_is_not_taken(folder: Path) -> None:
    runner = EngineInProcess(folder, max_num_seqs=8).runner
    graphs = PrefillGraphs(runner.model, runner.kv, runner.state, ROOMS)
    chunk = [Chunk(0, 0, bytes(4), sample=True)]
    assert graphs.fitting(0, chunk) is None
    graphs.record(Room(8, 128))
    assert graphs.fitting(0, chunk) == Room(8, 128)
    graphs.record(Room(0, 16))
    assert graphs.fitting(0, chunk) == Room(0, 16)
    for later in graphs.later():
        later.record()
    assert [graphs.fitting(rows, chunk) for rows in (0, 2, 4)] == [ROOMS[0], ROOMS[2], ROOMS[4]]
    assert graphs.later() == []


def test_a_few_tokens_do_not_take_a_graph_of_very_many(folder: Path) -> None:
    runner = EngineInProcess(folder, max_num_seqs=8, num_blocks=200, max_model_len=1024).runner
    rooms = [Room(0, 16), Room(8, prefill_graphs.FEW_TOKENS - 8), Room(8, 1024)]
    graphs = PrefillGraphs(runner.model, runner.kv, runner.state, rooms)
    graphs.record(rooms[2])

    def fitting(rows: int, tokens: int) -> Room | None:
        return graphs.fitting(rows, [Chunk(0, 0, bytes(4 * tokens), sample=True)])

    assert fitting(8, 250) == Room(8, 1024)
    assert fitting(8, 249) is None
    graphs.record(rooms[1])
    assert fitting(1, 1) == rooms[1]
    assert fitting(0, 1) == rooms[1]
    graphs.record(rooms[0])
    assert fitting(0, 1) == rooms[0]


def test_rooms_end_with_the_largest_batch_and_the_largest_step() -> None:
    assert rooms_for(1, 63) == ()
    assert rooms_for(1, 64) == (Room(0, 64), Room(1, 64))
    assert rooms_for(64, 300)[-1] == Room(64, 256)
    many = rooms_for(1000, 8192)
    assert {room.decode for room in many} == set(prefill_graphs.ROOM_ROWS)
    assert {room.prompt for room in many} == set(prefill_graphs.ROOM_TOKENS)


class Forgetful(ReferenceBackend):
    """Does something wrong once a step is recorded."""

    fault = "none"

    def prefill(self, q, k, v, k_cache, v_cache, meta: PrefillMetadata, scale, window):
        if meta.recorded and self.fault == "raises":
            raise RuntimeError("operation not permitted when stream is capturing")
        if meta.recorded and self.fault == "no prefix":
            lengths = meta.cu_seqlens_q.diff()
            meta = dataclasses.replace(meta, context_lens=lengths)
        out = super().prefill(q, k, v, k_cache, v_cache, meta, scale, window)
        if meta.recorded and self.fault == "zeros":
            return torch.zeros_like(out)
        if meta.recorded and self.fault == "nan":
            return out.fill_(float("nan"))
        return out

    def decode(self, q, k_cache, v_cache, meta: DecodeMetadata, scale, window):
        out = super().decode(q, k_cache, v_cache, meta, scale, window)
        padded = meta.context_lens.shape[0] > 1
        return torch.zeros_like(out) if padded and self.fault == "decode" else out


def recorded(
    runner: Runner, max_model_len: int = 256, rooms: tuple[Room, ...] = ROOMS
) -> tuple[PrefillGraphs | None, str]:
    return record_prefills(
        runner.model, runner.kv, runner.state, runner.group, rooms, max_model_len
    )


@pytest.mark.parametrize("fault", ["none", "zeros", "nan", "no prefix", "raises", "decode"])
def test_a_start_finds_out_whether_recorded_steps_do_what_eager_ones_do(
    folder: Path, fault: str
) -> None:
    backend = Forgetful()
    engine = EngineInProcess(folder, backend=backend, max_num_seqs=8)
    backend.fault = fault
    runner = engine.runner
    tables = runner.state.block_tables.clone()
    graphs, wrong = recorded(runner)
    assert (graphs is None) == (fault != "none") == bool(wrong)
    assert ("capturing" in wrong) == (fault == "raises")
    assert torch.equal(runner.state.block_tables, tables)
    assert not any(bool(layer.k.any() or layer.v.any()) for layer in runner.kv)


def test_a_start_sees_a_recorded_step_that_stores_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = PrefillGraphs.run

    def forgetting(self: PrefillGraphs, room: Room, ids, positions, slots, *rest: Any):
        return run(self, room, ids, positions, torch.full_like(slots, -1), *rest)

    monkeypatch.setattr(PrefillGraphs, "run", forgetting)
    graphs, wrong = recorded(EngineInProcess(folder, max_num_seqs=8).runner)
    assert graphs is None
    assert "differs" in wrong


def test_the_check_stays_within_the_longest_sequence(folder: Path) -> None:
    """Which need not fill its last block: positions behind it have no angle."""
    runner = EngineInProcess(folder, max_model_len=100, block_size=16, max_num_seqs=8).runner
    graphs, wrong = recorded(runner, 100)
    assert graphs is not None, wrong


@pytest.mark.parametrize("blocks", [2, 3, 6])
def test_a_cache_that_is_too_small_to_ask_is_no_fault(folder: Path, blocks: int) -> None:
    runner = EngineInProcess(folder, num_blocks=blocks, max_num_seqs=8).runner
    graphs, wrong = recorded(runner)
    assert graphs is not None
    assert wrong == ""


@pytest.mark.parametrize(
    ("settings", "records", "fault", "said"),
    [
        ({}, True, "none", ""),
        ({}, True, "zeros", "differs from the same step run eagerly (--disable-prefill-graphs"),
        ({"disable_prefill_graphs": True}, True, "zeros", ""),
        ({"max_num_batched_tokens": 63}, True, "zeros", ""),
        ({}, False, "zeros", ""),  # a CPU, --enforce-eager: nothing is missing there
    ],
)
def test_a_worker_has_graphs_of_prompts_where_they_work(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    settings: dict[str, Any],
    records: bool,
    fault: str,
    said: str,
) -> None:
    backend = Forgetful()
    engine = EngineInProcess(folder, backend=backend, max_num_seqs=8)
    backend.fault = fault
    runner, worker = engine.runner, object.__new__(Worker)
    worker.config = EngineConfig(**{"model": "m", "max_num_seqs": 8, **settings})
    worker.rank = 0
    if records:
        monkeypatch.setattr(worker, "_can_record", lambda device, backend: True)
    place = (runner.model, runner.kv, runner.state, TPGroup.single(), backend, 256)
    graphs = worker._record_prefill_graphs(*place)
    assert (graphs is not None) == (records and fault == "none" and not settings)
    assert [said in record.message for record in caplog.records] == [True] * bool(said)


def of_two_ranks(group: TPGroup, folder: str, prompts: list[list[int]], fault: str) -> Any:
    """Tokens of this rank's engine, with recorded prefills where all ranks have them."""
    backend = Forgetful()
    engine = EngineInProcess(Path(folder), backend=backend, group=group, sampler=ShardedSampler)
    backend.fault = fault if group.rank == 1 else "none"
    graphs, wrong = recorded(engine.runner, rooms=(Room(3, 64), Room(8, 128)))
    backend.fault = "none"
    engine.runner.prefill_graphs = graphs
    seqs = []
    for i, prompt in enumerate(prompts):
        seqs.append(engine.add(str(i), prompt, GREEDY, seed=i))
        engine.step()
    engine.run()
    return [seq.generated_ids for seq in seqs], wrong


@pytest.mark.parametrize("fault", ["none", "zeros"])
def test_two_ranks_have_recorded_prefills_together_or_not_at_all(
    gloo_pool: Callable[[int], GlooPool], folder: Path, prompts: list[list[int]], fault: str
) -> None:
    want, _ = tokens(folder, prompts[:4], ())
    (first, said), (second, cause) = gloo_pool(2).run(of_two_ranks, str(folder), prompts[:4], fault)
    assert first == second == want
    assert (said, cause) == (("", "") if fault == "none" else (DIFFERS, DIFFERS))
