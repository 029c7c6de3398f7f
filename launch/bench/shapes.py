"""Models to measure with that need no download: the shape of a known one, weights at random."""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "attention_bias": False,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 40960,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 151936,
}


def _qwen3(hidden: int, inter: int, layers: int, heads: int, tied: bool) -> dict[str, Any]:
    return {
        **_QWEN3,
        "hidden_size": hidden,
        "intermediate_size": inter,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "tie_word_embeddings": tied,
    }


SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": _qwen3(1024, 3072, 28, 16, tied=True),
    "qwen3-1.7b": _qwen3(2048, 6144, 28, 16, tied=True),
    "qwen3-4b": _qwen3(2560, 9728, 36, 32, tied=True),
    "qwen3-8b": _qwen3(4096, 12288, 36, 32, tied=False),
    "qwen3-32b": _qwen3(5120, 25600, 64, 64, tied=False),
    "tiny": {
        **_qwen3(64, 96, 2, 4, tied=False),
        "head_dim": 16,
        "num_key_value_heads": 2,
        "vocab_size": 10240,
        "bos_token_id": None,
        "eos_token_id": 10239,
    },
}
"""Fields of config.json as the models of these names have them; `tiny` is for CPUs and tests."""


@contextlib.contextmanager
def shape_folder(name: str) -> Iterator[Path]:
    """A model folder of that shape, without weights: for `load_format="dummy"`."""
    with tempfile.TemporaryDirectory(prefix="tp_runtime-shape-") as root:
        folder = Path(root) / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(SHAPES[name], indent=1))
        yield folder
