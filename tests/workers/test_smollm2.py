"""Real weights: SmolLM2-135M-Instruct gives the same greedy text at every TP size.

9 query heads and 3 KV heads, so that two ranks hold uneven shares. The model is the demo's (made
once, in the cache folder); without it and without a package index the tests are skipped.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.workers.model_harness import PagedModel, best_ids, load_model
from tests.workers.parity import Pools
from tp_runtime.ops.group import TPGroup

PROMPTS = (
    "The capital of France is",
    "Why is the sky blue? Answer in one sentence.",
    "def fibonacci(n):\n",
)
NEW_TOKENS = 20
MAX_LEN = 64


@torch.inference_mode()
def _continuations(group: TPGroup, folder: str, prompts: list[list[int]]) -> list[list[int]]:
    """Greedy ids of all prompts, decoded together."""
    paged = PagedModel(load_model(group, folder, MAX_LEN), 64)
    rows, tokens = [], []
    for prompt in prompts:
        sequence = paged.sequence(MAX_LEN)
        _, hidden = paged.step([], (sequence, prompt))
        rows.append(sequence)
        tokens.append(best_ids(paged.model, hidden[-1:]))
    for _ in range(NEW_TOKENS - 1):
        hidden, _ = paged.step([(row, ids[-1]) for row, ids in zip(rows, tokens, strict=True)])
        for ids, best in zip(tokens, best_ids(paged.model, hidden), strict=True):
            ids.append(best)
    return tokens


@pytest.fixture(scope="module")
def prompt_ids(demo_model: Path) -> list[list[int]]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(demo_model / "tokenizer.json"))
    return [tokenizer.encode(prompt).ids for prompt in PROMPTS]


@pytest.fixture(scope="module")
def alone(demo_model: Path, prompt_ids: list[list[int]]) -> list[list[int]]:
    """What one rank generates."""
    return _continuations(TPGroup.single(), str(demo_model), prompt_ids)


@torch.inference_mode()
def test_one_rank_generates_what_transformers_does(
    demo_model: Path, prompt_ids: list[list[int]], alone: list[list[int]]
) -> None:
    """One forward over prompt and continuation: each id is the best one after those before it."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        demo_model, dtype=torch.float32
    ).eval()
    for prompt, continuation in zip(prompt_ids, alone, strict=True):
        logits = model(torch.tensor([prompt + continuation])).logits[0, len(prompt) - 1 : -1]
        assert logits.argmax(dim=-1).tolist() == continuation


@pytest.mark.parametrize("size", [2, 3])
def test_more_ranks_generate_the_same(
    size: int,
    demo_model: Path,
    prompt_ids: list[list[int]],
    alone: list[list[int]],
    gloo_pool: Pools,
) -> None:
    results = gloo_pool(size).run(_continuations, str(demo_model), prompt_ids, timeout=150)
    assert results == [alone] * size
