"""Seeds and sampling parameters through scheduler, runner and sampler at TP 1, 2 and 3."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.gloo_pool import GlooPool
from tests.tiny_models import make_tiny
from tests.workers.engine_in_process import EngineInProcess
from tp_runtime.ops.group import TPGroup
from tp_runtime.sampling_params import SamplingParams, StructuredOutputsParams
from tp_runtime.workers.gather_sampler import GatherSampler
from tp_runtime.workers.sharded_sampler import ShardedSampler

Pools = Callable[[int], GlooPool]
TOKENS = 16
PARAMS = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True),
    "plain": SamplingParams(seed=1, max_tokens=TOKENS, ignore_eos=True),
    "hot": SamplingParams(temperature=1.7, min_p=0.01, max_tokens=TOKENS, ignore_eos=True),
    "truncated": SamplingParams(top_k=40, top_p=0.9, max_tokens=TOKENS, ignore_eos=True),
    "large k": SamplingParams(top_k=5000, max_tokens=TOKENS, ignore_eos=True),
    "penalties": SamplingParams(
        repetition_penalty=1.3,
        presence_penalty=0.4,
        frequency_penalty=0.3,
        max_tokens=TOKENS,
        ignore_eos=True,
    ),
    "bias": SamplingParams(logit_bias={5: 3.0, 330: 2.0, 17: -50.0}, max_tokens=TOKENS),
    "late end": SamplingParams(logit_bias={319: 8.0}, min_tokens=6, max_tokens=TOKENS),
    "two ends": SamplingParams(stop_token_ids=[30, 31], max_tokens=TOKENS),
    "grammar": SamplingParams(
        structured_outputs=StructuredOutputsParams(regex="[a-z]+( [a-z]+)*"), max_tokens=TOKENS
    ),
    "greedy grammar": SamplingParams(
        temperature=0.0,
        repetition_penalty=1.2,
        structured_outputs=StructuredOutputsParams(json_object=True),
        max_tokens=TOKENS,
    ),
}
"""Without logprobs: rank 0 alone answers with them, and here every rank reads its own answers."""


def answers(group: TPGroup, folder: str, sharded: bool, together: bool) -> dict[str, list[int]]:
    """Ids of every request of PARAMS, in one batch or one after the other."""
    engine = EngineInProcess(
        Path(folder), group=group, sampler=ShardedSampler if sharded else GatherSampler
    )
    found = {}
    for number, (name, params) in enumerate(PARAMS.items()):
        found[name] = engine.add(name, [3, 1, 4, 1, 5 + number], params, seed=100 + number)
        if not together:
            engine.run()
    engine.run()
    return {name: sequence.generated_ids for name, sequence in found.items()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny("qwen3", tmp_path_factory.mktemp("models") / "tiny"))


@pytest.fixture(scope="module")
def alone(folder: str) -> dict[str, list[int]]:
    return answers(TPGroup.single(), folder, sharded=False, together=False)


@pytest.mark.parametrize("sharded", [False, True], ids=["gather", "sharded"])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_seed_gives_the_same_ids_alone_and_in_a_batch_at_every_size(
    gloo_pool: Pools, folder: str, alone: dict[str, list[int]], size: int, sharded: bool
) -> None:
    for of_rank in gloo_pool(size).run(answers, folder, sharded, True):
        assert of_rank == alone


def test_the_parameters_show_in_the_ids(alone: dict[str, list[int]]) -> None:
    """So that the comparison above compares more than one way of sampling."""
    assert len({tuple(ids) for ids in alone.values()}) == len(PARAMS)
    assert len(alone["late end"]) > 6
    assert 319 not in alone["late end"][:6]
    assert 17 not in alone["bias"]
