"""Counter-based random numbers: the noise of a draw is a function of (seed, position, id).

Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011). Key: the two
halves of the 64-bit seed. Counter: (vocabulary id // 4, position, 0, 0); word `vocabulary id % 4`
of the result belongs to the id. So a draw is the same whatever the rank, the batch, the padded size
or the tensor-parallel size, and a shard can make its own part of the noise.

`triton.language.philox` with the same arguments gives the same words.
"""

from __future__ import annotations

import torch
from torch import Tensor

_M0, _M1 = 0xD2511F53, 0xCD9E8D57
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_MASK = 0xFFFFFFFF
ROUNDS = 10


def _multiply(a: Tensor, b: int) -> tuple[Tensor, Tensor]:
    """High and low 32-bit words of the 64-bit product of 32-bit words (held in int64)."""
    product = a * b  # wraps as two's complement: the 64 bits are those of the unsigned product
    return (product >> 32) & _MASK, product & _MASK


def philox_words(seed: Tensor, position: Tensor, group: Tensor) -> tuple[Tensor, ...]:
    """Four random 32-bit words (int64 tensors in [0, 2**32)) per element.

    `seed`, `position`, `group` (vocabulary id // 4) are int64 tensors that broadcast."""
    k0, k1 = seed & _MASK, (seed >> 32) & _MASK
    c0, c1 = torch.broadcast_tensors(group & _MASK, position & _MASK)
    c2 = torch.zeros_like(c0)
    c3 = torch.zeros_like(c0)
    for _ in range(ROUNDS):
        hi0, lo0 = _multiply(c0, _M0)
        hi1, lo1 = _multiply(c2, _M1)
        c0, c1, c2, c3 = hi1 ^ c1 ^ k0, lo1, hi0 ^ c3 ^ k1, lo0
        k0, k1 = (k0 + _W0) & _MASK, (k1 + _W1) & _MASK
    return c0, c1, c2, c3


def uniform(seed: Tensor, position: Tensor, start: int, stop: int) -> Tensor:
    """Uniform numbers in the open interval (0, 1) for vocabulary ids start .. stop - 1.

    `seed`, `position`: [rows] int64. Returns [rows, stop - start] float32; multiples of 2**-24, so
    0 and 1 cannot occur and every value is exact."""
    first = start // 4
    groups = torch.arange(first, -(-stop // 4), device=seed.device)
    words = torch.stack(philox_words(seed[:, None], position[:, None], groups[None, :]), dim=-1)
    flat = words.flatten(1)[:, start - 4 * first : stop - 4 * first]
    return ((flat >> 9).float() + 0.5) * 2.0**-23


def gumbel(seed: Tensor, position: Tensor, start: int, stop: int) -> Tensor:
    """Standard Gumbel noise [rows, stop - start] float32: argmax(logits / T + noise) is a draw from
    softmax(logits / T) (Gumbel-max; Maddison et al., "A* sampling", 2014)."""
    return -torch.log(-torch.log(uniform(seed, position, start, stop)))
