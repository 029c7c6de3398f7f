"""The SiLU-and-multiply kernel against its reference."""

from __future__ import annotations

import pytest
import torch

from tests.ops.kernels.closeness import assert_close
from tp_runtime.ops.activation import silu_and_mul_reference
from tp_runtime.ops.kernels.silu_and_mul import silu_and_mul


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [1, 128, 1500])
def test_equals_the_reference_with_any_row_stride(
    device: torch.device, dtype: torch.dtype, size: int
) -> None:
    x = (4 * torch.randn(3, 2 * size + 3, device=device)).to(dtype)[:, 1 : 2 * size + 1]
    got, want = silu_and_mul(x), silu_and_mul_reference(x)
    if device.type == "cuda" and dtype == torch.float16:
        # A last bit of the fast exponential can move both roundings, of silu and of the product.
        torch.testing.assert_close(got, want, rtol=2**-9, atol=1e-6)
    else:
        assert_close(got, want)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # the interpreter's NumPy
def test_large_negative_gates_give_zero_and_not_nan(device: torch.device) -> None:
    x = torch.tensor([[-1e4, -80.0, 3.0, 3.0]], device=device)
    torch.testing.assert_close(silu_and_mul(x), silu_and_mul_reference(x))


def test_refuses_odd_widths(device: torch.device) -> None:
    with pytest.raises(ValueError, match=r"2 \* n"):
        silu_and_mul(torch.zeros(2, 5, device=device))
