"""Every architecture equals transformers: logits within 1e-5 of the largest, greedy tokens equal.

Tiny models in float32 in which every parameter is random, one to eight real gloo processes. The
shapes are the awkward ones: heads, KV heads, intermediate size and vocabulary that no rank count
divides, head sizes that are not hidden / heads.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.tiny_models import make_tiny
from tests.workers.parity import Pools, differences, reference, run_on_ranks

NINE_THREE = {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 72}
TWELVE_SIX = {"num_attention_heads": 12, "num_key_value_heads": 6, "hidden_size": 72}
FOUR_TWO = {"num_attention_heads": 4, "num_key_value_heads": 2}
ODD = {"intermediate_size": 173, "vocab_size": 347}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("qwen3", {**NINE_THREE, **ODD, "head_dim": 20}),
    "qwen3-tied": ("qwen3", {**TWELVE_SIX, "head_dim": 16, "tie_word_embeddings": True}),
    "qwen3-bias": ("qwen3", {**FOUR_TWO, **ODD, "attention_bias": True}),
    "qwen3-window-upper-layer": (
        "qwen3",
        {**FOUR_TWO, "use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1},
    ),
    "llama": ("llama", {**TWELVE_SIX, **ODD}),
    "llama-bias": ("llama", {**NINE_THREE, **ODD, "attention_bias": True, "mlp_bias": True}),
    "llama-one-kv-head-tied": (
        "llama",
        {
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 12,
            "vocab_size": 301,
            "tie_word_embeddings": True,
        },
    ),
    "qwen2": ("qwen2", {**NINE_THREE, **ODD, "seed": 1}),
    "qwen2-tied": ("qwen2", {**FOUR_TWO, "tie_word_embeddings": True}),
    "qwen2-layer-types": (
        "qwen2",
        {
            **FOUR_TWO,
            "use_sliding_window": True,
            "sliding_window": 16,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "mistral-window": ("mistral", {**NINE_THREE, **ODD, "sliding_window": 16}),
    "mistral": ("mistral", {**TWELVE_SIX, "head_dim": 10, "sliding_window": None}),
}


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """name of MODELS -> folder, written once."""
    root = tmp_path_factory.mktemp("models")

    def folder(name: str) -> Path:
        kind, fields = MODELS[name]
        path = root / name
        return path if path.exists() else make_tiny(kind, path, **fields)

    return folder


VARIANTS = (
    "qwen3-window-upper-layer",
    "llama-one-kv-head-tied",
    "qwen2-tied",
    "qwen2-layer-types",
    "mistral",
)
"""Differ in ways that the number of ranks does not touch; two sizes are enough."""
CASES = [(name, size) for name in MODELS for size in ((1, 4) if name in VARIANTS else (1, 2, 3, 4))]
MANY_RANKS = [("qwen3", 7), ("qwen3", 8), ("qwen3-tied", 8)]
"""More ranks than KV heads, uneven shares of everything."""


@pytest.mark.parametrize(("name", "size"), [*CASES, *MANY_RANKS])
def test_equals_transformers(name: str, size: int, model_folder: Any, gloo_pool: Pools) -> None:
    folder = model_folder(name)
    assert differences(run_on_ranks(gloo_pool, size, folder), reference(folder)) == []
