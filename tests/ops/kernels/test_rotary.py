"""The rotary kernel against its reference, whole and partial, with packed inputs."""

from __future__ import annotations

import pytest
import torch

from tests.ops.kernels.closeness import assert_same_bits
from tp_runtime.ops.kernels.rotary import rotate
from tp_runtime.ops.rotary import rotate_reference

POSITIONS = [0, 1, 99, 41]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("size", "rotary"), [(64, 64), (128, 128), (192, 192), (192, 64), (64, 16), (96, 94)]
)
def test_rotation_equals_the_reference_bit_for_bit(
    device: torch.device, dtype: torch.dtype, size: int, rotary: int
) -> None:
    q_heads, k_heads = 3, 1
    row = torch.randn(len(POSITIONS), (q_heads + 2 * k_heads) * size + 5, device=device).to(dtype)
    q = row[:, : q_heads * size].unflatten(-1, (q_heads, size))
    k = row[:, q_heads * size : (q_heads + k_heads) * size].unflatten(-1, (k_heads, size))
    angles = torch.rand(100, rotary // 2, device=device) * 6
    table = torch.cat((angles.cos(), angles.sin()), dim=-1)
    positions = torch.tensor(POSITIONS, device=device)
    before = row.clone()
    got = rotate(q, k, positions, table)
    cos, sin = table[positions].chunk(2, dim=-1)
    for mine, x in zip(got, (q, k), strict=True):
        want = rotate_reference(x, cos, sin)
        if dtype == torch.float32:  # the compiler may fuse product and sum in float32
            torch.testing.assert_close(mine, want, rtol=1e-6, atol=1e-6)
        else:
            assert_same_bits(mine, want)
    assert torch.equal(row, before)


def test_rotation_refuses_strided_lanes(device: torch.device) -> None:
    q = torch.zeros(2, 64, 3, device=device).transpose(1, 2)
    table = torch.zeros(4, 64, device=device)
    with pytest.raises(ValueError, match="stride 1"):
        rotate(q, q, torch.zeros(2, dtype=torch.int64, device=device), table)
