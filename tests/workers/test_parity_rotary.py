"""Rotary scaling through whole models, at and past the length that the model was trained for.

The forced sequence is twice the original length, so the bound of the comparison covers the first
position, the original length and twice it. A scaling that is ignored passes every short test.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tiny_models import make_tiny, random_tensors, tiny_config
from tests.workers.parity import (
    FORCED,
    TOLERANCE,
    Pools,
    differences,
    forced_ids,
    reference,
    run_on_ranks,
)

ORIGINAL = FORCED // 2
OLD_STYLE: dict[str, Any] = {"max_position_embeddings": ORIGINAL, "rope_theta": 5000.0}

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "linear": ("llama", {**OLD_STYLE, "rope_scaling": {"type": "linear", "factor": 2.0}}),
    "llama3": (
        "llama",
        {
            "max_position_embeddings": FORCED,
            "rope_theta": 500000.0,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": ORIGINAL,
            },
        },
    ),
    "yarn": (
        "qwen3",
        {
            **OLD_STYLE,
            "rope_scaling": {
                "type": "yarn",
                "factor": 2.0,
                "original_max_position_embeddings": ORIGINAL,
            },
        },
    ),
    "yarn-mscale": (
        "mistral",
        {
            "max_position_embeddings": 4 * ORIGINAL,
            "rope_theta": None,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 20000.0,
                "factor": 4.0,
                "original_max_position_embeddings": ORIGINAL,
                "mscale": 1.2,
                "mscale_all_dim": 0.7,
                "beta_fast": 16,
                "beta_slow": 2,
                "truncate": False,
            },
        },
    ),
    "yarn-attention-factor": (
        "qwen2",
        {
            **OLD_STYLE,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": ORIGINAL,
                "attention_factor": 1.3,
            },
        },
    ),
}
"""Old keys (rope_theta, rope_scaling) and new ones (rope_parameters)."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("rotary")
    made = {
        name: make_tiny(kind, root / name, **fields) for name, (kind, fields) in VARIANTS.items()
    }
    dynamic: dict[str, Any] = {**OLD_STYLE, "rope_scaling": {"type": "dynamic", "factor": 2.0}}
    made["dynamic"] = make_tiny("llama", root / "dynamic", **dynamic)
    return made


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("name", VARIANTS)
def test_scaling_equals_transformers(
    name: str, size: int, folders: dict[str, Path], gloo_pool: Pools
) -> None:
    folder = folders[name]
    results = run_on_ranks(gloo_pool, size, folder, max_model_len=FORCED)
    assert differences(results, reference(folder)) == []


@pytest.mark.parametrize("size", [1, 3])
def test_dynamic_scaling_equals_one_forward_of_the_longest_length(
    size: int, folders: dict[str, Path], gloo_pool: Pools
) -> None:
    """transformers widens the base as a sequence grows; a cache of rotated keys cannot, so the
    table is that of --max-model-len, here the length of the forced sequence."""
    folder = folders["dynamic"]
    results = run_on_ranks(gloo_pool, size, folder, greedy=False, max_model_len=FORCED)
    assert differences(results, reference(folder, greedy=False)) == []


@pytest.mark.parametrize("name", [*VARIANTS, "dynamic"])
def test_each_scaling_matters_at_the_length_of_the_test(
    name: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    """Otherwise the comparison above would also pass with the scaling ignored."""
    kind, fields = VARIANTS.get(name, ("llama", OLD_STYLE))
    theta = (fields.get("rope_parameters") or fields)["rope_theta"]
    plain: dict[str, Any] = {"rope_scaling": None, "rope_parameters": None, "rope_theta": theta}
    unscaled = make_tiny(kind, tmp_path, **{**fields, **plain})
    with_scaling = reference(folders[name], greedy=False).logits
    without = reference(unscaled, greedy=False).logits
    assert (with_scaling - without).abs().max() > 1e-2 * with_scaling.abs().max()


def test_partial_rotation_equals_phi3(tmp_path: Path, gloo_pool: Pools) -> None:
    """transformers' Llama ignores partial_rotary_factor; its Phi-3 is Llama with the factor
    honoured and its projections packed, so the same weights go through Phi-3."""
    fields: dict[str, Any] = {"num_attention_heads": 6, "hidden_size": 96}
    fields["partial_rotary_factor"] = 0.5
    folder = make_tiny("llama", tmp_path, **fields)
    wanted = _phi3_logits(tiny_config("llama", **fields))
    for size in (1, 2):
        first = run_on_ranks(gloo_pool, size, folder, greedy=False)[0]
        for logits in (first.prefill, first.paged):
            assert logits is not None
            assert (logits - wanted).abs().max() <= TOLERANCE * wanted.abs().max()


@torch.inference_mode()
def _phi3_logits(config: dict[str, Any]) -> torch.Tensor:
    from transformers import Phi3Config, Phi3ForCausalLM

    same = (
        "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads "
        "num_key_value_heads max_position_embeddings rms_norm_eps partial_rotary_factor rope_theta"
    ).split()
    model = Phi3ForCausalLM(Phi3Config(**{name: config[name] for name in same}, pad_token_id=0))
    tensors = random_tensors(config)
    for layer in range(config["num_hidden_layers"]):
        for packed, parts in (
            ("self_attn.qkv_proj", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
            ("mlp.gate_up_proj", ("mlp.gate_proj", "mlp.up_proj")),
        ):
            prefix = f"model.layers.{layer}."
            rows = [tensors.pop(f"{prefix}{part}.weight") for part in parts]
            tensors[f"{prefix}{packed}.weight"] = torch.cat(rows)
    model.load_state_dict(tensors, strict=True)
    ids = torch.tensor([forced_ids(config["vocab_size"])])
    logits: torch.Tensor = model.eval()(ids).logits[0]
    return logits
