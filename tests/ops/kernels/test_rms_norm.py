"""The RMSNorm kernel against its reference: plain, per head, and with the residual add."""

from __future__ import annotations

import pytest
import torch

from tests.ops.kernels.closeness import assert_close, assert_same_bits
from tp_runtime.ops.kernels.rms_norm import add_rms_norm, rms_norm
from tp_runtime.ops.norm import add_rms_norm_reference, rms_norm_reference

EPS = 1e-6
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [64, 576, 1000])
def test_norm_of_rows_with_any_stride(device: torch.device, dtype: torch.dtype, size: int) -> None:
    x = torch.randn(5, size + 7, device=device).to(dtype)[:, 3 : size + 3]
    weight = (1 + 0.3 * torch.randn(size, device=device)).to(dtype)
    got = rms_norm(x, weight, EPS)
    assert got.is_contiguous()
    assert_close(got, rms_norm_reference(x, weight, EPS))


@pytest.mark.parametrize("size", [64, 128, 192])
def test_norm_per_head_of_a_packed_projection(device: torch.device, size: int) -> None:
    """Queries are a view of [q | k | v]; several heads share a program, also at the last rows."""
    qkv = torch.randn(7, 5 * size, device=device).bfloat16()
    q = qkv[:, size : 4 * size].unflatten(-1, (3, size))
    weight = (1 + 0.3 * torch.randn(size, device=device)).bfloat16()
    got = rms_norm(q, weight, EPS)
    assert got.shape == q.shape
    assert_close(got, rms_norm_reference(q, weight, EPS))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [64, 576])
def test_add_norm_rounds_the_sum_before_the_norm(
    device: torch.device, dtype: torch.dtype, size: int
) -> None:
    x = torch.randn(3, size, device=device).to(dtype)
    residual = (8 * torch.randn(3, size + 1, device=device)).to(dtype)[:, 1:]
    weight = (1 + 0.3 * torch.randn(size, device=device)).to(dtype)
    kept = residual.clone()
    got, summed = add_rms_norm(x, residual, weight, EPS)
    want, want_sum = add_rms_norm_reference(x, residual, weight, EPS)
    assert_same_bits(summed, want_sum)
    assert torch.equal(residual, kept)
    assert_close(got, want)


def test_norm_of_no_rows_is_empty(device: torch.device) -> None:
    none = torch.empty(0, 64, device=device)
    assert rms_norm(none, torch.ones(64, device=device), EPS).shape == (0, 64)


def test_norm_refuses_what_it_would_misread(device: torch.device) -> None:
    weight = torch.ones(64, device=device)
    with pytest.raises(ValueError, match="last stride 1"):
        rms_norm(torch.ones(64, 4, device=device).t(), weight, EPS)
    with pytest.raises(ValueError, match=r"\[tokens, size\]"):
        add_rms_norm(
            torch.ones(2, 64, device=device), torch.ones(3, 64, device=device), weight, EPS
        )
