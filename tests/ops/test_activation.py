"""SwiGLU's activation against transformers' expression."""

from __future__ import annotations

import pytest
import torch
from transformers.activations import ACT2FN

from tp_runtime.ops.activation import SiluAndMul


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_first_half_gates_the_second(dtype: torch.dtype) -> None:
    gate, up = torch.randn(2, 5, 24).to(dtype)
    got = SiluAndMul()(torch.cat((gate, up), dim=-1))
    # Vector and scalar lanes of the CPU's exp differ in the last bit, and fall differently here.
    torch.testing.assert_close(got, ACT2FN["silu"](gate) * up)
