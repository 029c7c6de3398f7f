"""Recorded prefills on a GPU against eager ones: float32 tokens, and unused slots that are NaN."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from tests.gpu.engine_on_gpu import engine_on_gpu
from tests.tiny_models import make_tiny
from tp_runtime.sampling_params import SamplingParams
from tp_runtime.workers.prefill_graphs import Room

pytestmark = pytest.mark.gpu

GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
ROOMS = (Room(0, 128), Room(0, 256), Room(4, 128), Room(4, 256))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(
        "qwen3",
        tmp_path_factory.mktemp("gpu") / "tiny",
        head_dim=64,
        num_attention_heads=8,
        num_key_value_heads=2,
    )


def tokens(folder: Path, dtype: torch.dtype, rooms: tuple[Room, ...], fill: float) -> list[int]:
    engine = engine_on_gpu(
        folder, dtype, max_num_batched_tokens=200, graph_sizes=(1, 4), rooms=rooms
    )
    for layer in engine.runner.kv:
        layer.k.fill_(fill)
        layer.v.fill_(fill)
    rng = random.Random(3)
    seqs = []
    for n, length in enumerate((5, 128, 16, 190, 50, 1)):
        prompt = [rng.randrange(320) for _ in range(length)]
        seqs.append(engine.add(str(n), prompt, GREEDY))
        engine.step()
    engine.run()
    return [token for seq in seqs for token in seq.generated_ids]


def test_float32_tokens_are_those_of_eager_steps(folder: Path) -> None:
    assert tokens(folder, torch.float32, ROOMS, 0.0) == tokens(folder, torch.float32, (), 0.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nan_in_unused_slots_changes_no_token(folder: Path, dtype: torch.dtype) -> None:
    unset = tokens(folder, dtype, ROOMS, float("nan"))
    assert unset == tokens(folder, dtype, ROOMS, 0.0)
