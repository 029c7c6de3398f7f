"""One GPU: what lies in the cache beside a row's own tokens must not matter, in recorded steps with
padding rows neither."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from tests.gpu.engine_on_gpu import engine_on_gpu
from tests.tiny_models import make_tiny
from tp_runtime.sampling_params import SamplingParams

pytestmark = pytest.mark.gpu

PARAMS = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(
        "qwen3",
        tmp_path_factory.mktemp("gpu") / "tiny",
        head_dim=64,
        num_attention_heads=8,
        num_key_value_heads=2,
    )


def tokens(folder: Path, dtype: torch.dtype, fill: float, graphs: bool) -> list[list[int]]:
    """Of three sequences, in recorded steps of four rows or eagerly. The cache holds `fill`."""
    engine = engine_on_gpu(folder, dtype, graph_sizes=(4,) if graphs else ())
    for layer in engine.runner.kv:
        layer.k.fill_(fill)
        layer.v.fill_(fill)
    rng = random.Random(3)
    prompts = [[rng.randrange(320) for _ in range(n)] for n in (5, 16, 50)]
    seqs = [engine.add(str(n), prompt, PARAMS) for n, prompt in enumerate(prompts)]
    engine.run()
    return [seq.generated_ids for seq in seqs]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("graphs", [True, False], ids=["recorded", "eager"])
def test_nan_in_unused_slots_changes_no_token(
    folder: Path, dtype: torch.dtype, graphs: bool
) -> None:
    assert tokens(folder, dtype, float("nan"), graphs) == tokens(folder, dtype, 0.0, graphs)
