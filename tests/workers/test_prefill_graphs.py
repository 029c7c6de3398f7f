"""Recorded steps with prompts against eager ones; the CPU form calls what a graph holds."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tiny_models import make_tiny
from tests.workers.engine_in_process import EngineInProcess
from tp_runtime.engine_config import EngineConfig
from tp_runtime.ops.attention.metadata import DecodeMetadata, PrefillMetadata
from tp_runtime.ops.attention.reference import ReferenceBackend
from tp_runtime.ops.group import TPGroup
from tp_runtime.sampling_params import SamplingParams
from tp_runtime.workers import prefill_graphs
from tp_runtime.workers.prefill_check import record_prefills
from tp_runtime.workers.prefill_graphs import PrefillGraphs, Room, rooms_for
from tp_runtime.workers.worker import Worker

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
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
    assert graphs.fitting(0, 1, 1) == Room(0, 16)
    assert graphs.fitting(0, 17, 2) == Room(0, 64)
    assert graphs.fitting(1, 16, 1) == Room(3, 16)
    assert graphs.fitting(4, 16, 1) == Room(8, 128)
    assert graphs.fitting(0, 16, 9) is None
    assert graphs.fitting(9, 16, 1) is None
    assert graphs.fitting(0, 129, 1) is None


def test_rooms_end_with_the_largest_batch_and_the_largest_step() -> None:
    assert rooms_for(1, 100) == ()
    assert rooms_for(1, 128) == (Room(0, 128), Room(1, 128))
    assert rooms_for(64, 300)[-1] == Room(64, 256)
    many = rooms_for(1000, 8192)
    assert {room.decode for room in many} == set(prefill_graphs.ROOM_ROWS)
    assert {room.prompt for room in many} == set(prefill_graphs.ROOM_TOKENS)


class Forgetful(ReferenceBackend):
    """Does something wrong once a step is recorded: no eager step has so large a bound."""

    fault = "none"

    def prefill(self, q, k, v, k_cache, v_cache, meta: PrefillMetadata, scale, window):
        out = super().prefill(q, k, v, k_cache, v_cache, meta, scale, window)
        if meta.block_tables is not None and self.fault == "zeros":
            return torch.zeros_like(out)
        if meta.block_tables is not None and self.fault == "nan":
            return out.fill_(float("nan"))
        if meta.block_tables is not None and self.fault == "raises":
            raise RuntimeError("operation not permitted when stream is capturing")
        return out

    def decode(self, q, k_cache, v_cache, meta: DecodeMetadata, scale, window):
        out = super().decode(q, k_cache, v_cache, meta, scale, window)
        padded = meta.context_lens.shape[0] > 1
        return torch.zeros_like(out) if padded and self.fault == "decode" else out


@pytest.mark.parametrize("fault", ["none", "zeros", "nan", "raises", "decode"])
def test_a_start_finds_out_whether_recorded_steps_do_what_eager_ones_do(
    folder: Path, fault: str
) -> None:
    backend = Forgetful()
    engine = EngineInProcess(folder, backend=backend, max_num_seqs=8)
    backend.fault = fault
    runner = engine.runner
    tables = runner.state.block_tables.clone()
    graphs, wrong = record_prefills(runner.model, runner.kv, runner.state, TPGroup.single(), ROOMS)
    assert (graphs is None) == (fault != "none") == bool(wrong)
    assert ("capturing" in wrong) == (fault == "raises")
    assert torch.equal(runner.state.block_tables, tables)


@pytest.mark.parametrize("blocks", [2, 3, 6])
def test_a_cache_that_is_too_small_to_ask_is_no_fault(folder: Path, blocks: int) -> None:
    runner = EngineInProcess(folder, num_blocks=blocks, max_num_seqs=8).runner
    graphs, wrong = record_prefills(runner.model, runner.kv, runner.state, TPGroup.single(), ROOMS)
    assert graphs is not None
    assert wrong == ""


@pytest.mark.parametrize("can_record", [False, True])
def test_a_worker_that_is_asked_for_what_it_cannot_do_says_so(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    can_record: bool,
) -> None:
    engine = EngineInProcess(folder)
    runner, worker = engine.runner, object.__new__(Worker)
    worker.config = EngineConfig(model="m", prefill_graphs=True, max_num_batched_tokens=100)
    worker.rank = 0
    if can_record:
        monkeypatch.setattr(worker, "_can_record", lambda state, backend: True)
    place = (runner.model, runner.kv, runner.state, TPGroup.single(), ReferenceBackend())
    assert worker._record_prefill_graphs(*place) is None
    (record,) = caplog.records
    why = "--max-num-batched-tokens is below 128" if can_record else "on cpu records no steps"
    assert why in record.message
