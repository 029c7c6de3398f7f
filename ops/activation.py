"""SwiGLU's activation (Shazeer, arXiv:2002.05202)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from tp_runtime.ops.compiled import compilable, runs_kernels


@compilable
def silu_and_mul_reference(x: Tensor) -> Tensor:
    """[tokens, 2 * n] -> [tokens, n]: silu(first half) * second half, each rounded to x.dtype."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


class SiluAndMul(nn.Module):
    """silu(gate) * up of a packed [tokens, gate | up]; no parameters."""

    def forward(self, x: Tensor) -> Tensor:
        """[tokens, 2 * n] -> [tokens, n]"""
        if runs_kernels(x):
            from tp_runtime.ops.kernels.silu_and_mul import silu_and_mul  # triton: CUDA only

            return silu_and_mul(x)
        return silu_and_mul_reference(x)
