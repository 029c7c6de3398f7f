"""Rotary embedding and its length extensions against transformers' own modules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.gpt_neox.modeling_gpt_neox import apply_rotary_pos_emb as apply_partial
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from tp_runtime.ops.rotary import RopeParameters, RotaryEmbedding, rope_frequencies

ORIGINAL, HEAD_DIM = 1024, 64
VARIANTS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": ORIGINAL,
    },
    "yarn": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": ORIGINAL,
    },
    "yarn with every field": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": ORIGINAL,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "mscale": 0.7,
        "mscale_all_dim": 0.4,
        "truncate": False,
    },
    "yarn with attention factor": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": ORIGINAL,
        "attention_factor": 1.25,
    },
    "yarn with one dimension to blend": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": ORIGINAL,
        "beta_fast": 1e-9,
        "beta_slow": 1e-9,
    },
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
}
MAX_POSITION = {"dynamic": ORIGINAL}  # its only notion of an original length
LENGTHS = [1, ORIGINAL, 2 * ORIGINAL]


def _parameters(variant: str, theta: float) -> RopeParameters:
    fields = dict(VARIANTS[variant])
    return RopeParameters(
        type=fields.pop("rope_type"),
        theta=theta,
        dim=HEAD_DIM,
        max_position=MAX_POSITION.get(variant, 4 * ORIGINAL),
        original_max_position=fields.pop("original_max_position_embeddings", None),
        **fields,
    )


def _theirs(variant: str, theta: float) -> LlamaRotaryEmbedding:
    config = LlamaConfig(
        hidden_size=2 * HEAD_DIM,
        num_attention_heads=2,
        max_position_embeddings=MAX_POSITION.get(variant, 4 * ORIGINAL),
        rope_parameters={"rope_theta": theta, **VARIANTS[variant]},
    )
    return LlamaRotaryEmbedding(config=config)


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("theta", [10_000.0, 1_000_000.0])
@pytest.mark.parametrize("variant", VARIANTS)
def test_rotation_has_the_bits_of_transformers_past_the_original_length(
    variant: str, theta: float, dtype: torch.dtype
) -> None:
    """A scaling that is ignored passes every short test and drifts with position."""
    length = 2 * ORIGINAL + 1
    mine = RotaryEmbedding(HEAD_DIM, _parameters(variant, theta), length, device="cpu")
    q, k = torch.randn(length, 3, HEAD_DIM).to(dtype), torch.randn(length, 1, HEAD_DIM).to(dtype)
    # One forward of the whole length on a fresh module, which is what fixes dynamic NTK's table.
    cos, sin = _theirs(variant, theta)(q, torch.arange(length).unsqueeze(0))
    want_q, want_k = apply_rotary_pos_emb(
        q.transpose(0, 1).unsqueeze(0), k.transpose(0, 1).unsqueeze(0), cos, sin
    )
    at = torch.tensor([0, *LENGTHS])
    got_q, got_k = mine(at, q[at], k[at])
    assert torch.equal(got_q, want_q.squeeze(0).transpose(0, 1)[at])
    assert torch.equal(got_k, want_k.squeeze(0).transpose(0, 1)[at])


@pytest.mark.parametrize("variant", [name for name in VARIANTS if name != "default"])
def test_every_variant_differs_from_plain_rotation(variant: str) -> None:
    plain, _ = rope_frequencies(_parameters("default", 10_000.0), 2 * ORIGINAL)
    scaled, factor = rope_frequencies(_parameters(variant, 10_000.0), 2 * ORIGINAL)
    assert not torch.equal(plain, scaled)
    assert (factor == 1.0) == (not variant.startswith("yarn"))


@pytest.mark.parametrize("length", [1, ORIGINAL, 3 * ORIGINAL])
def test_dynamic_ntk_is_fixed_for_the_longest_allowed_sequence(length: int) -> None:
    frequencies, _ = rope_frequencies(_parameters("dynamic", 10_000.0), length)
    theirs = _theirs("dynamic", 10_000.0)
    theirs(torch.zeros(1), torch.arange(length).unsqueeze(0))
    assert torch.equal(frequencies, theirs.inv_freq)


@torch.inference_mode()
def test_partial_rotation_leaves_the_other_dimensions_alone() -> None:
    rotary_dim = 16
    rope = RopeParameters("default", 10_000.0, rotary_dim, 128)
    mine = RotaryEmbedding(HEAD_DIM, rope, 128, device="cpu")
    q, k = torch.randn(5, 3, HEAD_DIM), torch.randn(5, 1, HEAD_DIM)
    positions = torch.tensor([0, 1, 7, 100, 127])
    angles = positions[:, None].float() * rope_frequencies(rope, 128)[0]
    both = torch.cat((angles, angles), dim=-1).unsqueeze(0)
    want_q, want_k = apply_partial(
        q.transpose(0, 1).unsqueeze(0), k.transpose(0, 1).unsqueeze(0), both.cos(), both.sin()
    )
    got_q, got_k = mine(positions, q, k)
    assert torch.equal(got_q, want_q.squeeze(0).transpose(0, 1))
    assert torch.equal(got_k, want_k.squeeze(0).transpose(0, 1))
    assert torch.equal(got_q[..., rotary_dim:], q[..., rotary_dim:])


@pytest.mark.parametrize("kind", ["longrope", "proportional", "su"])
def test_types_that_are_not_implemented_are_refused_by_name(kind: str) -> None:
    with pytest.raises(ValueError, match=f"'{kind}' is not implemented; .*yarn"):
        rope_frequencies(RopeParameters(kind, 10_000.0, 64, 128), 128)


@pytest.mark.parametrize("dim", [0, 7, 128])
def test_a_rotary_size_that_does_not_fit_the_head_is_refused(dim: int) -> None:
    with pytest.raises(ValueError, match=f"{dim} rotated dimensions do not fit a head of 64"):
        RotaryEmbedding(64, RopeParameters("default", 1e4, dim, 128), 128, device="cpu")
