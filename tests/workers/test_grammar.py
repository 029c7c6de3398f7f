"""Tokens under a grammar equal those of transformers under llguidance's own masks, token for token.

The reference takes the logits of transformers on the CPU, the mask of llguidance (which reads
tokenizer.json itself here), and the best allowed id; nothing of this runtime is in it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.gloo_pool import GlooPool
from tests.tiny_models import END_ID, make_tiny
from tests.workers.engine_in_process import EngineInProcess
from tp_runtime.ops.group import TPGroup
from tp_runtime.sampling_params import SamplingParams, StructuredOutputsParams
from tp_runtime.text.grammar import WHITESPACE
from tp_runtime.workers.gather_sampler import GatherSampler
from tp_runtime.workers.sharded_sampler import ShardedSampler

Pools = Callable[[int], GlooPool]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "colours": {"type": "array", "items": {"enum": ["red", "blue"]}, "maxItems": 3},
    },
    "required": ["name", "age", "colours"],
    "additionalProperties": False,
}
PROMPTS = [[3, 1, 4, 1, 5], [9, 2, 6], [5, 3, 5, 8, 9, 7, 9, 3, 2]]
TOKENS = 60
CONSTRAINED = SamplingParams(
    temperature=0.0,
    max_tokens=TOKENS,
    structured_outputs=StructuredOutputsParams(json=SCHEMA),
)
FREE = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny("qwen3", tmp_path_factory.mktemp("models") / "tiny"))


@pytest.fixture(scope="module")
def reference(folder: str) -> list[list[int]]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return [brute_force(model, Path(folder), prompt) for prompt in PROMPTS]


@torch.inference_mode()
def brute_force(model: Any, folder: Path, prompt: list[int]) -> list[int]:
    """Greedy, one forward pass over everything for each token. What ends it is no part of it."""
    import llguidance

    tokenizer = llguidance.LLTokenizer(
        (folder / "tokenizer.json").read_text("utf-8"), eos_token=[END_ID]
    )
    options: Any = {"whitespace_pattern": WHITESPACE}
    source = llguidance.LLMatcher.grammar_from_json_schema(SCHEMA, defaults=options)
    matcher = llguidance.LLMatcher(tokenizer, source)
    ids = list(prompt)
    while not matcher.is_stopped() and len(ids) - len(prompt) < TOKENS:
        bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        allowed = np.flatnonzero(np.unpackbits(bits, bitorder="little"))
        logits = model(torch.tensor([ids])).logits[0, -1]
        best = int(allowed[logits[allowed].argmax()])
        assert matcher.consume_token(best)
        ids.append(best)
    return ids[len(prompt) :]


def answers(
    group: TPGroup, folder: str, sharded: bool, graph_sizes: tuple[int, ...], params: list[Any]
) -> list[list[int]]:
    engine = EngineInProcess(
        Path(folder),
        group=group,
        sampler=ShardedSampler if sharded else GatherSampler,
        graph_sizes=graph_sizes,
    )
    found = [
        engine.add(str(number), prompt, each, seed=number)
        for number, (prompt, each) in enumerate(zip(PROMPTS, params, strict=True))
    ]
    engine.run()
    return [seq.generated_ids for seq in found]


@pytest.mark.parametrize("sharded", [False, True], ids=["gather", "sharded"])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_greedy_under_a_grammar_is_the_brute_force_reference(
    gloo_pool: Pools, folder: str, reference: list[list[int]], size: int, sharded: bool
) -> None:
    for of_rank in gloo_pool(size).run(answers, folder, sharded, (), [CONSTRAINED] * 3):
        assert of_rank == reference


def test_the_reference_is_worth_comparing_with(reference: list[list[int]]) -> None:
    assert all(len(ids) > 15 for ids in reference)
    assert len({tuple(ids) for ids in reference}) == 3


@pytest.mark.parametrize("graph_sizes", [(), (1, 2, 4, 8)], ids=["eager", "graphs"])
@pytest.mark.parametrize("sharded", [False, True], ids=["gather", "sharded"])
def test_rows_with_and_without_a_grammar_do_not_change_each_other(
    folder: str, reference: list[list[int]], sharded: bool, graph_sizes: tuple[int, ...]
) -> None:
    group = TPGroup.single()
    free = answers(group, folder, sharded, graph_sizes, [FREE] * 3)
    for pattern in ([0, 1, 1], [1, 0, 1], [1, 1, 0]):
        params = [CONSTRAINED if constrained else FREE for constrained in pattern]
        found = answers(group, folder, sharded, graph_sizes, params)
        wanted = [reference[i] if constrained else free[i] for i, constrained in enumerate(pattern)]
        assert found == wanted
