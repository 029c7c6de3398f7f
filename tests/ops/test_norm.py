"""RMSNorm against transformers' own module."""

from __future__ import annotations

import pytest
import torch
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from tp_runtime.ops.norm import RMSNorm


def _pair(size: int, dtype: torch.dtype) -> tuple[RMSNorm, torch.nn.Module]:
    theirs = Qwen3RMSNorm(size, eps=1e-5).to(dtype)
    theirs.weight.data = (1 + 0.3 * torch.randn(size)).to(dtype)
    mine = RMSNorm(size, 1e-5, dtype=dtype, device="cpu")
    assert mine.load_weight("weight", theirs.weight.data) == size
    return mine, theirs


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(5, 64), (3, 4, 96)])
def test_norm_has_the_bits_of_transformers(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """In bfloat16 too: the weight multiplies after the cast, not before."""
    mine, theirs = _pair(shape[-1], dtype)
    x = (3 * torch.randn(shape)).to(dtype)
    assert torch.equal(mine(x), theirs(x))


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm_with_residual_adds_first_and_returns_the_sum(dtype: torch.dtype) -> None:
    mine, theirs = _pair(64, dtype)
    x, residual = torch.randn(2, 5, 64).to(dtype)
    kept = residual.clone()
    y, summed = mine(x, residual)
    assert torch.equal(summed, x + kept)
    assert torch.equal(y, theirs(x + kept))
    assert torch.equal(residual, kept)


def test_a_weight_of_another_size_is_refused() -> None:
    with pytest.raises(ValueError, match=r"\[64\] .* gives \[32\]"):
        RMSNorm(64, 1e-5, dtype=torch.float32, device="cpu").load_weight("weight", torch.ones(32))
