"""One int64 that orders as a float32 value does and, of equal values, prefers the lower id.

So the maximum over shards or pieces of a vocabulary is what argmax over the whole row would find.
"""

from __future__ import annotations

import torch
from torch import Tensor

INVALID_ID = -1
UNUSABLE = torch.iinfo(torch.int64).max
"""Of a row with NaN or +inf."""
_ID_BITS = 32
_ID_MASK = (1 << _ID_BITS) - 1
_MINUS_INF = -0x7F800000


def ordered_bits(values: Tensor) -> Tensor:
    """float32 [n] -> int64 [n] in the same order (-inf lowest; -0.0 equals 0.0)."""
    bits = (values + 0.0).view(torch.int32).to(torch.int64)
    return torch.where(bits >= 0, bits, -(bits & 0x7FFFFFFF))


def pack_best(values: Tensor, ids: Tensor) -> Tensor:
    """values [rows] float32, ids [rows] int64 -> [rows] int64 that orders by value, then by lowest
    id."""
    return (ordered_bits(values) << _ID_BITS) | (_ID_MASK - ids)


def unpack_id(best: Tensor) -> Tensor:
    """Packed bests [rows] int64 -> ids [rows] int64; INVALID_ID for a row with NaN or +inf, or with
    nothing but -inf."""
    ids = _ID_MASK - (best & _ID_MASK)
    usable = (best != UNUSABLE) & ((best >> _ID_BITS) > _MINUS_INF)
    return torch.where(usable, ids, INVALID_ID)
