"""The product of a few rows against the library's, and what its bits may depend on."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.ops.kernels.closeness import assert_close
from tp_runtime.ops.activation import silu_and_mul_reference
from tp_runtime.ops.kernels.skinny_linear import (
    MAX_ROWS,
    SkinnyConfig,
    default_config,
    skinny_linear,
)

# The interpreter multiplies the bits of bfloat16 matrices.
DTYPES = [torch.float16, *([torch.bfloat16] if torch.cuda.is_available() else [])]
WHOLE = SkinnyConfig(tile=64, columns=64, splits=1, stages=3, warps=4)
SPLIT = SkinnyConfig(tile=32, columns=64, splits=3, stages=3, warps=4)
WIDE = SkinnyConfig(tile=128, columns=64, splits=2, stages=3, warps=4)
CONFIGS = [WHOLE, SPLIT, WIDE]


def inputs(
    device: torch.device, dtype: torch.dtype, rows: int, outputs: int, size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x = torch.randn(rows, size, device=device).to(dtype)
    weight = (torch.randn(outputs, size, device=device) / size**0.5).to(dtype)
    return x, weight, torch.randn(outputs, device=device).to(dtype)


def wide_product(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    wide = None if bias is None else bias.double()
    return F.linear(x.double(), weight.double(), wide).to(x.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 2, 17, 64])
@pytest.mark.parametrize("config", [None, *CONFIGS])
def test_plain_product_with_and_without_bias(
    device: torch.device, dtype: torch.dtype, rows: int, config: SkinnyConfig | None
) -> None:
    x, weight, bias = inputs(device, dtype, rows, 200, 320)
    for b in (None, bias):
        assert_close(skinny_linear(x, weight, b, config=config), wide_product(x, weight, b))


@pytest.mark.parametrize("config", [WHOLE, SPLIT])
@pytest.mark.parametrize("size", [40, 200])
def test_columns_that_fill_no_block(device: torch.device, config: SkinnyConfig, size: int) -> None:
    x, weight, _ = inputs(device, torch.float16, 3, 70, size)
    assert_close(skinny_linear(x, weight, config=config), wide_product(x, weight))


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("config", [None, *CONFIGS])
def test_gate_and_up_with_the_activation_behind(
    device: torch.device, config: SkinnyConfig | None, biased: bool
) -> None:
    x, weight, bias = inputs(device, DTYPES[-1], 5, 2 * 72, 256)
    b = bias if biased else None
    got = skinny_linear(x, weight, b, silu=True, config=config)
    assert_close(got, silu_and_mul_reference(wide_product(x, weight, b)))


@pytest.mark.parametrize("config", CONFIGS)
def test_a_row_does_not_depend_on_the_others(device: torch.device, config: SkinnyConfig) -> None:
    x, weight, _ = inputs(device, torch.float16, 40, 64, 256)
    whole = skinny_linear(x, weight, config=config)
    for rows in (2, 16, 33):
        got = skinny_linear(x[:rows], weight, config=config)
        if device.type == "cuda":
            assert torch.equal(got, whole[:rows])
        else:  # NumPy, behind the interpreter, adds in an order that depends on the shape
            assert_close(got, whole[:rows])
    x[1:] = float("nan")
    assert torch.equal(skinny_linear(x, weight, config=config)[0], whole[0])


def test_a_second_call_finds_the_arrivals_at_zero(device: torch.device) -> None:
    x, weight, _ = inputs(device, torch.float16, 4, 64, 256)
    first = skinny_linear(x, weight, config=SPLIT)
    assert torch.equal(skinny_linear(x, weight, config=SPLIT), first)


def test_defaults_split_alike_for_any_number_of_rows() -> None:
    for outputs, size in ((3072, 4096), (4096, 2048), (1024, 3072), (75968, 4096)):
        configs = [default_config(outputs, size, silu=False)]
        assert len({(config.tile >= 64, config.splits) for config in configs}) == 1


def test_no_rows(device: torch.device) -> None:
    x, weight, _ = inputs(device, torch.float16, 0, 8, 64)
    assert skinny_linear(x, weight).shape == (0, 8)


def test_other_inputs_are_refused(device: torch.device) -> None:
    def ones(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
        return torch.ones(*shape, dtype=dtype, device=device)

    for x, weight in (
        (ones(MAX_ROWS + 1, 8), ones(4, 8)),
        (ones(2, 8), ones(4, 16)),
        (ones(8, 2).T, ones(4, 8)),
        (ones(2, 8), ones(8, 4).T),
    ):
        with pytest.raises(ValueError, match=r"\[rows, K\]"):
            skinny_linear(x, weight)
    with pytest.raises(ValueError, match="float32"):
        skinny_linear(ones(2, 8, dtype=torch.float32), ones(4, 8, dtype=torch.float32))
    with pytest.raises(ValueError, match="gate and up"):
        skinny_linear(ones(2, 8), ones(5, 8), silu=True)


def test_strides_of_views(device: torch.device) -> None:
    """x is often a part of a packed projection, a weight a part of a packed weight."""
    x, weight, _ = inputs(device, torch.float16, 4, 90, 384)
    x, weight = x[:, 128:], weight[10:, :256]
    assert_close(skinny_linear(x, weight, config=WIDE), wide_product(x, weight))
