"""Graphs recorded on a GPU between the steps of requests: tokens are those of eager steps."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from tests.gpu.engine_on_gpu import engine_on_gpu
from tests.tiny_models import make_tiny
from tp_runtime.sampling_params import SamplingParams
from tp_runtime.workers.decode_graphs import DecodeGraphs
from tp_runtime.workers.later_graphs import LaterGraphs
from tp_runtime.workers.prefill_graphs import PrefillGraphs, Room

pytestmark = pytest.mark.gpu

SIZES = (1, 2, 4, 8)
ROOMS = (Room(0, 64), Room(4, 64), Room(8, 128))
PARAMS = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)


def tokens(folder: Path, later: bool) -> tuple[list[list[int]], int]:
    """With `later` every step records a graph that is left; how many are left in the end."""
    engine = engine_on_gpu(folder)
    runner, plan = engine.runner, engine.scheduler.plan
    if later:
        decode = DecodeGraphs(runner.model, runner.kv, runner.state, runner.sampler, SIZES)
        prefill = PrefillGraphs(runner.model, runner.kv, runner.state, ROOMS)
        decode.record(SIZES[-1])
        prefill.record(ROOMS[-1])
        runner.graphs, runner.prefill_graphs = decode, prefill
        runner.later_graphs = LaterGraphs(
            runner.group, torch.device("cuda"), prefill.later() + decode.later()
        )
        engine.scheduler.plan = lambda: plan(engine.scheduler.has_work)  # type: ignore[method-assign]
    rng = random.Random(4)
    seqs = []
    for n, length in enumerate((5, 60, 16, 100, 30, 1)):
        prompt = [rng.randrange(320) for _ in range(length)]
        seqs.append(engine.add(str(n), prompt, PARAMS))
        engine.step()
    engine.run()
    left = 0 if runner.later_graphs is None else len(runner.later_graphs)
    return [seq.generated_ids for seq in seqs], left


def test_tokens_are_those_of_eager_steps(tmp_path: Path) -> None:
    folder = make_tiny(
        "qwen3", tmp_path / "tiny", head_dim=64, num_attention_heads=8, num_key_value_heads=2
    )
    want, _ = tokens(folder, later=False)
    assert tokens(folder, later=True) == (want, 0)
