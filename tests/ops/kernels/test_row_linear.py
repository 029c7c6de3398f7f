"""The one-row product against the separate layers it stands for."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.ops.kernels.closeness import assert_close, assert_same_bits
from tp_runtime.ops.activation import silu_and_mul_reference
from tp_runtime.ops.kernels.row_linear import RowConfig, row_linear
from tp_runtime.ops.norm import add_rms_norm_reference, rms_norm_reference

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
EPS = 1e-6


def inputs(
    device: torch.device, dtype: torch.dtype, outputs: int, size: int
) -> tuple[torch.Tensor, ...]:
    x = torch.randn(1, size, device=device).to(dtype)
    weight = (torch.randn(outputs, size, device=device) / size**0.5).to(dtype)
    norm = (1 + 0.3 * torch.randn(size, device=device)).to(dtype)
    return x, weight, norm


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("outputs", "size"), [(7, 64), (33, 576), (16, 1000)])
@pytest.mark.parametrize("config", [None, RowConfig(4, 128, 4)])
def test_plain_product_with_and_without_bias(
    device: torch.device, dtype: torch.dtype, outputs: int, size: int, config: RowConfig | None
) -> None:
    x, weight, _ = inputs(device, dtype, outputs, size)
    bias = torch.randn(outputs, device=device).to(dtype)
    for b in (None, bias):
        got, same = row_linear(x, weight, b, config=config)
        assert same is x
        wide = None if b is None else b.double()
        assert_close(got, F.linear(x.double(), weight.double(), wide).to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [64, 576])
def test_norm_and_residual_in_front(device: torch.device, dtype: torch.dtype, size: int) -> None:
    x, weight, norm = inputs(device, dtype, 37, size)
    got, _ = row_linear(x, weight, norm=norm, eps=EPS)
    want = F.linear(rms_norm_reference(x, norm, EPS).double(), weight.double()).to(dtype)
    assert_close(got, want)
    residual = torch.randn(1, size, device=device).to(dtype)
    got, summed = row_linear(x, weight, norm=norm, eps=EPS, residual=residual)
    normed, want_sum = add_rms_norm_reference(x, residual, norm, EPS)
    assert_same_bits(summed, want_sum)
    assert_close(got, F.linear(normed.double(), weight.double()).to(dtype))


# Five casts in a row: the interpreter's truncation to bfloat16 adds up, so there float16 stands in.
NARROW = torch.bfloat16 if torch.cuda.is_available() else torch.float16


@pytest.mark.parametrize("dtype", [torch.float32, NARROW])
def test_gate_and_up_with_the_activation_behind(device: torch.device, dtype: torch.dtype) -> None:
    x, weight, norm = inputs(device, dtype, 2 * 51, 192)
    got, _ = row_linear(x, weight, norm=norm, eps=EPS, silu=True)
    product = F.linear(rms_norm_reference(x, norm, EPS).double(), weight.double()).to(dtype)
    assert_close(got, silu_and_mul_reference(product))


def test_other_shapes_are_refused(device: torch.device) -> None:
    with pytest.raises(ValueError, match=r"\[1, K\]"):
        row_linear(torch.ones(2, 8, device=device), torch.ones(4, 8, device=device))
    with pytest.raises(ValueError, match="in front of a norm"):
        x = torch.ones(1, 8, device=device)
        row_linear(x, torch.ones(4, 8, device=device), residual=x)
