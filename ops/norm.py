"""RMSNorm (Zhang and Sennrich, arXiv:1910.07467), plain and fused with the residual add.

y = w * round(x / sqrt(mean(x^2) + eps)), the mean in float32. The weight is applied after the cast
to the input's dtype, as transformers does; the written description applies it before.
"""

from __future__ import annotations

from typing import overload

import torch
from torch import Tensor, nn

from tp_runtime.ops.compiled import compilable, runs_kernels
from tp_runtime.ops.parameter import ShardId, empty_parameter, parameter_of
from tp_runtime.ops.sharding import Shard
from tp_runtime.ops.tensor_source import TensorSource, check_shape, fill


@compilable
def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Over the last dimension; [..., size] -> [..., size] in x.dtype."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


@compilable
def add_rms_norm_reference(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """(norm(x + residual), x + residual); the sum is rounded to x.dtype first."""
    residual = x + residual
    return rms_norm_reference(residual, weight, eps), residual


class RMSNorm(nn.Module):
    """Norm over the last dimension. Every rank holds the whole weight [size]."""

    def __init__(
        self, size: int, eps: float, *, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        super().__init__()
        self.size = size
        self.eps = eps
        self.weight = empty_parameter(size, dtype=dtype, device=device)

    @property
    def shard_ids(self) -> tuple[ShardId, ...]:
        return (None,)

    def full_shape(self, name: str, shard_id: ShardId = None) -> tuple[int, ...]:
        """Shape of the weight, which is never split."""
        return (self.size,)

    def load_weight(self, name: str, source: TensorSource, shard_id: ShardId = None) -> int:
        """Fills the whole weight. Raises ValueError for an unknown name or a wrong shape."""
        parameter = parameter_of(self, name)
        check_shape(name, source, self.full_shape(name))
        return fill(parameter.data, source, 0, Shard(0, self.size))

    @overload
    def forward(self, x: Tensor) -> Tensor: ...
    @overload
    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]: ...

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """norm(x), or with a residual (norm(x + residual), x + residual).

        `x` and `residual`: [..., size], same dtype. Inputs are not changed."""
        if runs_kernels(x):
            from tp_runtime.ops.kernels import rms_norm as kernels  # triton: CUDA only

            if residual is None:
                return kernels.rms_norm(x, self.weight, self.eps)
            return kernels.add_rms_norm(x, residual, self.weight, self.eps)
        if residual is None:
            return rms_norm_reference(x, self.weight, self.eps)
        return add_rms_norm_reference(x, residual, self.weight, self.eps)
