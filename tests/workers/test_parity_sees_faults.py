"""The comparison with transformers turns red for every fault it is there to find.

One fault at a time is planted in a model that is green without it (see tests.workers.mutations).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tiny_models import make_tiny, random_tensors, tiny_config
from tests.workers.mutations import MUTATIONS
from tests.workers.parity import Pools, differences, reference, run_on_ranks

Model = tuple[str, dict[str, Any]]

QWEN3: Model = ("qwen3", {"attention_bias": True, "vocab_size": 347})  # 4 heads, 2 KV heads
LLAMA: Model = ("llama", {"attention_bias": True, "mlp_bias": True, "intermediate_size": 173})
MISTRAL: Model = ("mistral", {"sliding_window": 16})

CASES = [
    *((fault, QWEN3, 2) for fault in ("q_norm", "k_norm", "rotary")),
    *((fault, QWEN3, 2) for fault in ("attention_residual", "mlp_residual")),
    *((f"{name}_bias", LLAMA, 2) for name in ("q", "k", "v", "o", "gate", "up", "down")),
    *((f"{name}_bias_on_every_rank", LLAMA, 2) for name in ("o", "down")),
    *((f"{name}_replica", QWEN3, 4) for name in ("k", "v", "k_bias", "v_bias", "k_norm")),
    *((fault, MISTRAL, 2) for fault in ("window", "window_one_wider")),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("faults")
    models = (QWEN3, LLAMA, MISTRAL)
    made = {kind: make_tiny(kind, root / kind, **fields) for kind, fields in models}
    made["negative"] = _all_logits_negative(root / "negative")
    return made


def _all_logits_negative(folder: Path) -> Path:
    """A model whose logits are all far below zero, so that a padding row's 0 would win: hidden
    dimension 0 is large and the same everywhere, and the head weighs it negatively."""
    fields: dict[str, Any] = {"vocab_size": 331, "num_hidden_layers": 1}
    tensors = random_tensors(tiny_config("llama", **fields))
    tensors["model.embed_tokens.weight"][:, 0] = 40.0
    tensors["model.norm.weight"][0] = 1.0
    tensors["lm_head.weight"][:, 0] = -3.0
    return make_tiny("llama", folder, extra_tensors=tensors, **fields)


@pytest.mark.parametrize(("fault", "model", "size"), CASES, ids=[case[0] for case in CASES])
def test_fault_turns_parity_red(
    fault: str, model: Model, size: int, folders: dict[str, Path], gloo_pool: Pools
) -> None:
    folder = folders[model[0]]
    results = run_on_ranks(gloo_pool, size, folder, greedy=False, mutation=fault)
    assert differences(results, reference(folder, greedy=False))


def test_the_same_models_are_green_without_faults(
    folders: dict[str, Path], gloo_pool: Pools
) -> None:
    for kind, size in (("qwen3", 4), ("llama", 2), ("mistral", 2)):
        results = run_on_ranks(gloo_pool, size, folders[kind], greedy=False)
        assert differences(results, reference(folders[kind], greedy=False)) == []


def test_missing_vocabulary_mask_turns_parity_red(
    folders: dict[str, Path], gloo_pool: Pools
) -> None:
    """Padding rows give 0, which beats real logits that are all negative (331 rows on 2 ranks)."""
    folder = folders["negative"]
    wanted = reference(folder)
    assert wanted.logits.max() < -1
    assert differences(run_on_ranks(gloo_pool, 2, folder), wanted) == []
    results = run_on_ranks(gloo_pool, 2, folder, mutation="vocabulary_mask")
    assert any("greedy" in found for found in differences(results, wanted))


def test_every_planted_fault_is_tried() -> None:
    assert {case[0] for case in CASES} | {"vocabulary_mask"} == set(MUTATIONS)


def test_a_near_tie_in_the_reference_is_not_taken_for_an_answer(
    folders: dict[str, Path], gloo_pool: Pools
) -> None:
    """Greedy tokens at a near-tie differ for no fault at all; the test must not look at them."""
    wanted = reference(folders["llama"], greedy=False)
    results = run_on_ranks(gloo_pool, 1, folders["llama"], greedy=False)
    tie = type(wanted)(wanted.logits, [], gap=1e-6)
    with pytest.raises(AssertionError, match="near-tie"):
        differences(results, tie)
    assert torch.isfinite(wanted.logits).all()
