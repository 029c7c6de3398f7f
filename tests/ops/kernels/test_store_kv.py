"""The KV-store kernel writes exactly what the reference writes, whatever the layout of k and v."""

from __future__ import annotations

import mmap

import pytest
import torch

from tp_runtime.ops.kernels.store_kv import store_kv
from tp_runtime.ops.kv_store import store_kv_reference

BLOCKS, BLOCK_SIZE = 5, 4
SLOTS = [7, -1, 0, 19, -1, 3]
_NORESERVE = 0x4000 | mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
"""Linux's MAP_NORESERVE has no name in Python 3.11: address space without a promise of memory."""


def _packed(heads: int, size: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """k and v as views of a packed row [q | k | v | odd tail], as the model hands them over."""
    q_size, kv_size = 5 * size, heads * size
    row = torch.randn(len(SLOTS), q_size + 2 * kv_size + 3).to(dtype)
    _, k, v, _ = row.split([q_size, kv_size, kv_size, 3], dim=-1)
    return k.unflatten(-1, (heads, size)), v.unflatten(-1, (heads, size))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("heads", "size"), [(1, 64), (2, 128), (3, 192), (1, 192), (3, 40)])
def test_store_equals_the_reference_and_skips_slot_minus_one(
    device: torch.device, dtype: torch.dtype, heads: int, size: int
) -> None:
    k, v = (part.to(device) for part in _packed(heads, size, dtype))
    slots = torch.tensor(SLOTS, device=device)
    # Caches 1 and 2 of three: whatever is written before a cache is seen in the one before it.
    before = torch.randn(3, BLOCKS, BLOCK_SIZE, heads, size, device=device).to(dtype)
    got, want = before.clone(), before.clone()
    store_kv(k, v, got[1], got[2], slots)
    store_kv_reference(k, v, want[1], want[2], slots)
    assert torch.equal(got, want)
    assert torch.equal(got[1].flatten(0, 1)[19], k[3])
    changed = (got != before).flatten(3).any(-1).flatten(1).sum(1)
    assert changed.tolist() == [0, 4, 4]


def test_store_takes_heads_that_do_not_lie_side_by_side(device: torch.device) -> None:
    wide = torch.randn(6, 2, 3, 64, device=device)
    k, v = wide[:, 0, :, :32], wide[:, 1, :, 16:48]
    assert k.stride() == (2 * 3 * 64, 64, 1)
    slots = torch.tensor(SLOTS, device=device)
    got = torch.zeros(2, BLOCKS, BLOCK_SIZE, 3, 32, device=device)
    want = torch.zeros_like(got)
    store_kv(k, v, got[0], got[1], slots)
    store_kv_reference(k, v, want[0], want[1], slots)
    assert torch.equal(got, want)


def test_store_reaches_slots_past_two_to_the_31_elements(device: torch.device) -> None:
    """Slot times row size overflows 32 bits in any cache of more than 4 GB of bfloat16.

    The cache is virtual memory: only the touched page of it ever exists."""
    heads, size, block = 1, 64, 16
    blocks = 2**31 // (heads * size * block) + 2
    if device.type == "cuda":
        cache = torch.zeros(blocks, block, heads, size, dtype=torch.bfloat16, device=device)
    else:
        memory = mmap.mmap(-1, blocks * block * heads * size * 2, flags=_NORESERVE)
        cache = torch.frombuffer(memory, dtype=torch.bfloat16).view(blocks, block, heads, size)
    slot = blocks * block - 1
    k = torch.randn(1, heads, size, device=device).bfloat16()
    store_kv(k, k, cache, cache, torch.tensor([slot], device=device))
    assert slot * size > 2**31
    assert torch.equal(cache[-1, -1], k[0])


def test_store_refuses_layouts_it_would_misread(device: torch.device) -> None:
    k = torch.zeros(2, 3, 64, device=device)
    cache = torch.zeros(4, 4, 3, 64, device=device)
    slots = torch.zeros(2, dtype=torch.int64, device=device)
    with pytest.raises(ValueError, match="stride 1"):
        store_kv(torch.zeros(2, 64, 3, device=device).transpose(1, 2), k, cache, cache, slots)
    with pytest.raises(ValueError, match="contiguous"):
        store_kv(k, k, cache.transpose(0, 1), cache, slots)
    with pytest.raises(ValueError, match="int64"):
        store_kv(k, k, cache, cache, slots.int())


def test_store_of_no_tokens_changes_nothing(device: torch.device) -> None:
    cache = torch.ones(1, 2, 1, 8, device=device)
    none = torch.empty(0, 1, 8, device=device)
    store_kv(none, none, cache, cache, torch.empty(0, dtype=torch.int64, device=device))
    assert (cache == 1).all()
