"""Norm, rotation and cache write in one kernel, against the separate layers."""

from __future__ import annotations

import pytest
import torch

from tp_runtime.ops.kernels.rotate_and_store import rotate_and_store
from tp_runtime.ops.kv_store import store_kv_reference
from tp_runtime.ops.norm import rms_norm_reference
from tp_runtime.ops.rotary import rotate_reference

EPS = 1e-6
SLOTS = [5, -1, 0, 11, -1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize(
    ("size", "rotary"), [(64, 64), (128, 128), (192, 192), (192, 64), (64, 16), (96, 94)]
)
def test_equals_the_separate_layers(
    device: torch.device, dtype: torch.dtype, size: int, rotary: int, normed: bool
) -> None:
    q_heads, kv_heads, tokens = 6, 2, len(SLOTS)
    width = (q_heads + 2 * kv_heads) * size
    row = torch.randn(tokens, width + 8, device=device).to(dtype)[:, :width]
    q, k, v = row.split([q_heads * size, kv_heads * size, kv_heads * size], dim=-1)
    q, k, v = (x.unflatten(-1, (-1, size)) for x in (q, k, v))
    q_norm, k_norm = ((1 + 0.3 * torch.randn(size, device=device)).to(dtype) for _ in range(2))
    angles = torch.rand(40, rotary // 2, device=device) * 6
    table = torch.cat((angles.cos(), angles.sin()), dim=-1)
    positions = torch.tensor([0, 3, 39, 7, 7], device=device)
    slots = torch.tensor(SLOTS, device=device)

    def caches() -> tuple[torch.Tensor, torch.Tensor]:
        shape = (3, 4, kv_heads, size)
        nan = float("nan")
        return (
            torch.full(shape, nan, dtype=dtype, device=device),
            torch.full(shape, nan, dtype=dtype, device=device),
        )

    cos, sin = table[positions].chunk(2, dim=-1)
    want_q, want_k = q, k
    if normed:
        want_q, want_k = rms_norm_reference(q, q_norm, EPS), rms_norm_reference(k, k_norm, EPS)
    want_q, want_k = rotate_reference(want_q, cos, sin), rotate_reference(want_k, cos, sin)
    want_cache = caches()
    store_kv_reference(want_k, v, *want_cache, slots)
    norms = (q_norm, k_norm, EPS) if normed else None
    for keep_k in (True, False):
        cache = caches()
        got_q, got_k = rotate_and_store(q, k, v, positions, table, *cache, slots, norms, keep_k)
        assert_near(got_q, want_q)
        assert_near(got_k, want_k if keep_k else k)
        for got, want in zip(cache, want_cache, strict=True):
            assert torch.equal(got.isnan(), want.isnan())
            assert_near(got.nan_to_num(), want.nan_to_num())


def assert_near(got: torch.Tensor, want: torch.Tensor) -> None:
    """A last bit of the norm's sum may move each of two products by one step."""
    if want.dtype == torch.float32:
        torch.testing.assert_close(got, want, rtol=4e-6, atol=4e-6)
    else:
        torch.testing.assert_close(got, want, rtol=2**-9, atol=2**-9)


def test_heads_that_are_not_adjacent_are_refused(device: torch.device) -> None:
    q = torch.zeros(2, 64, 3, device=device).transpose(1, 2)
    cache = torch.zeros(1, 4, 3, 64, device=device)
    nothing = torch.zeros(2, dtype=torch.int64, device=device)
    with pytest.raises(ValueError, match="adjacent"):
        rotate_and_store(
            q, q, q, nothing, torch.zeros(4, 64, device=device), cache, cache, nothing, None, False
        )
