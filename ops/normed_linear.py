"""The steps between two projections of a decoder layer, as one call each.

A layer's norm is followed at once by a projection. With one token on a GPU both are memory-bound,
and one kernel does both (`ops.kernels.row_linear`). With a few, the norm is a kernel of its own and
gate, up and activation are one (`ops.kernels.skinny_linear`); otherwise the layers are called one
by one.
"""

from __future__ import annotations

from torch import Tensor

from tp_runtime.ops.activation import SiluAndMul
from tp_runtime.ops.compiled import runs_kernels
from tp_runtime.ops.linear import PackedColumnLinear
from tp_runtime.ops.norm import RMSNorm
from tp_runtime.ops.product import is_skinny


def normed_linear(
    x: Tensor, residual: Tensor | None, norm: RMSNorm, linear: PackedColumnLinear
) -> tuple[Tensor, Tensor]:
    """(linear(norm(x + residual)), x + residual); residual None: (linear(norm(x)), x).

    x, residual [tokens, hidden] -> [tokens, local outputs], [tokens, hidden]"""
    if runs_kernels(x) and x.shape[0] == 1:
        return _one_row(x, residual, norm, linear, silu=False)
    normed, residual = _norm(x, residual, norm)
    return linear(normed), residual


def normed_gate_up(
    x: Tensor, residual: Tensor, norm: RMSNorm, linear: PackedColumnLinear, act: SiluAndMul
) -> tuple[Tensor, Tensor]:
    """(act(linear(norm(x + residual))), x + residual)

    x, residual [tokens, hidden] -> [tokens, local intermediate], [tokens, hidden]"""
    if runs_kernels(x) and x.shape[0] == 1:
        return _one_row(x, residual, norm, linear, silu=True)
    normed, residual = _norm(x, residual, norm)
    if is_skinny(normed):
        from tp_runtime.ops.kernels.skinny_linear import skinny_linear  # triton: CUDA only

        return skinny_linear(normed, linear.weight, linear.bias, silu=True), residual
    return act(linear(normed)), residual


def _norm(x: Tensor, residual: Tensor | None, norm: RMSNorm) -> tuple[Tensor, Tensor]:
    return (norm(x), x) if residual is None else norm(x, residual)


def _one_row(
    x: Tensor, residual: Tensor | None, norm: RMSNorm, linear: PackedColumnLinear, silu: bool
) -> tuple[Tensor, Tensor]:
    from tp_runtime.ops.kernels.row_linear import row_linear  # triton: CUDA only

    return row_linear(
        x, linear.weight, linear.bias, norm=norm.weight, eps=norm.eps, residual=residual, silu=silu
    )
