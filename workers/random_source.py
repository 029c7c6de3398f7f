"""A tensor of random numbers that exists only where somebody looks.

Looks like a tensor of a checkpoint (`TensorSource`), so that dummy weights take the same path as
real ones: a rank makes the blocks of rows that its range touches, and every TP size gets the same
whole tensor.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

_BLOCK_ELEMENTS = 1 << 22
"""Elements made at a time: 16 MB; the shape alone decides how rows are grouped into blocks."""
_STD = 0.02
"""Of matrices and biases: the usual initializer_range."""


class RandomSource:
    """Normal numbers, keyed by seed, name and block of rows; 1 + 0.02 N for norms.

    Numbers come from the device's own generator, so CPU and CUDA differ."""

    def __init__(self, name: str, shape: Sequence[int], seed: int, device: torch.device) -> None:
        self.shape = tuple(shape)
        self.dtype = torch.float32
        self._key = f"{seed}/{name}"
        self._mean = 1.0 if "norm" in name else 0.0
        self._generator = torch.Generator(device=device)
        per_row = torch.Size(self.shape[1:]).numel()
        self._rows = max(1, _BLOCK_ELEMENTS // max(1, per_row))

    def __getitem__(self, index: tuple[slice, ...], /) -> Tensor:
        """One slice with start and stop per dimension -> that range, float32, on the device."""
        start, stop = index[0].start, index[0].stop
        first = start // self._rows
        blocks = [self._block(at) for at in range(first, -(-stop // self._rows))]
        offset = first * self._rows
        rows = torch.cat(blocks)[start - offset : stop - offset]
        return rows[(slice(None), *index[1:])]

    def _block(self, at: int) -> Tensor:
        first = at * self._rows
        shape = (min(self._rows, self.shape[0] - first), *self.shape[1:])
        digest = hashlib.blake2b(f"{self._key}/{at}".encode(), digest_size=8).digest()
        self._generator.manual_seed(int.from_bytes(digest, "little") >> 1)
        noise = torch.empty(shape, dtype=self.dtype, device=self._generator.device)
        return noise.normal_(self._mean, _STD, generator=self._generator)
