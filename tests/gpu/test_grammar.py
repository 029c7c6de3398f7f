"""One GPU: rows with a grammar in recorded decode steps get the tokens of eager ones on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu.engine_on_gpu import engine_on_gpu
from tests.tiny_models import make_tiny
from tests.workers.engine_in_process import EngineInProcess
from tests.workers.test_grammar import CONSTRAINED, FREE, PROMPTS
from tp_runtime.workers.gather_sampler import GatherSampler
from tp_runtime.workers.sharded_sampler import ShardedSampler

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("qwen3", tmp_path_factory.mktemp("gpu") / "tiny", head_dim=64)


@pytest.mark.parametrize("sampler", [GatherSampler, ShardedSampler])
@pytest.mark.parametrize("pattern", [[1, 1, 1], [0, 1, 0]], ids=["all", "one of three"])
def test_recorded_steps_draw_what_the_cpu_draws(
    folder: Path, sampler: type[GatherSampler] | type[ShardedSampler], pattern: list[int]
) -> None:
    on_gpu = engine_on_gpu(folder, sampler=sampler, graph_sizes=(1, 2, 4))
    on_cpu = EngineInProcess(folder, sampler=sampler)
    found = []
    for engine in (on_gpu, on_cpu):
        seqs = [
            engine.add(str(number), prompt, CONSTRAINED if constrained else FREE, seed=number)
            for number, (prompt, constrained) in enumerate(zip(PROMPTS, pattern, strict=True))
        ]
        engine.run()
        found.append([seq.generated_ids for seq in seqs])
    assert found[0] == found[1]
