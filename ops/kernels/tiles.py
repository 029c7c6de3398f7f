"""Tile sizes and precision that the attention kernels share."""

from __future__ import annotations

import torch

from tp_runtime.ops.kernels.host_math import power_of_2

_TILE_BYTES = 16384
"""One tile of keys; with values, two stages and the queries it fits 100 KB of shared memory."""


def kv_tile(head_size: int, dtype: torch.dtype) -> tuple[int, int]:
    """(tokens, lanes) of one tile of keys; lanes is head_size rounded up to a power of two."""
    lanes = max(16, power_of_2(head_size))
    return min(64, max(16, _TILE_BYTES // (lanes * dtype.itemsize))), lanes


def precision_of(dtype: torch.dtype) -> str:
    """float32 stays float32: tensor cores would otherwise round it to tf32."""
    return "ieee" if dtype == torch.float32 else "tf32"
