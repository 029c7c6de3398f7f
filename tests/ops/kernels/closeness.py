"""How close a kernel must come to its reference.

Triton's interpreter *truncates* float32 to bfloat16 where hardware rounds to nearest, so up to two
units in the last place per cast are its own doing; on a GPU, and for the other types everywhere,
the bounds are tight.
"""

from __future__ import annotations

import torch


def rounds_to_nearest(x: torch.Tensor) -> bool:
    return x.is_cuda or x.dtype != torch.bfloat16


def assert_close(got: torch.Tensor, want: torch.Tensor) -> None:
    """Last bits of a float32 sum; one step of a narrow type where such a bit crosses a border."""
    assert got.dtype == want.dtype
    step = {torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}[want.dtype]
    if rounds_to_nearest(want):
        torch.testing.assert_close(got, want, rtol=step, atol=1e-6)
    else:
        torch.testing.assert_close(got, want, rtol=3 * step, atol=2 * step)


def assert_same_bits(got: torch.Tensor, want: torch.Tensor) -> None:
    if rounds_to_nearest(want):
        assert torch.equal(got, want)
    else:
        assert_close(got, want)
