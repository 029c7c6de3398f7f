"""Where a layer's weights come from: anything that has a shape and can be sliced.

A `torch.Tensor` is one, a slice of a safetensors file another; so a layer reads only the range
that its rank keeps. This module knows nothing of files or names of checkpoints.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from tp_runtime.ops.sharding import Shard
from tp_runtime.ops.staging import copy_in


class TensorSource(Protocol):
    """A tensor of a checkpoint that has not been read yet."""

    @property
    def shape(self) -> Sequence[int]: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def __getitem__(self, index: tuple[slice, ...], /) -> Tensor:
        """Reads the given range, one slice per dimension, onto the CPU (or where it lies)."""
        ...


def check_shape(what: str, source: TensorSource, wanted: Sequence[int]) -> None:
    """Raises ValueError when the source has not the shape of the whole, unsharded tensor."""
    if tuple(source.shape) != tuple(wanted):
        raise ValueError(
            f"{what} should have shape {list(wanted)} and the checkpoint gives "
            f"{list(source.shape)}; config.json and the weights do not belong together."
        )


def read_range(source: TensorSource, dim: int, shard: Shard) -> Tensor:
    """The range `shard` of dimension `dim`, everything of the other dimensions."""
    index = [slice(0, size) for size in source.shape]
    index[dim] = slice(shard.start, shard.stop)
    return source[tuple(index)]


def fill(destination: Tensor, source: TensorSource, dim: int, shard: Shard) -> int:
    """Copies one range into `destination` (same shape), converting dtype and device.

    Returns the number of elements written. An empty range reads nothing."""
    if destination.numel():
        copy_in(destination, read_range(source, dim, shard))
    return destination.numel()
