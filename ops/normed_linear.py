"""The steps between two projections of a decoder layer, as one call each.

A projection's sum over the ranks, the residual add and the norm come one after the other, and the
next projection follows at once. Over symmetric memory the first three are one kernel
(`ops.kernels.one_shot`, `ops.kernels.two_shot`). With one token on a GPU norm and projection are
one (`ops.kernels.row_linear`), and with a few tokens gate, up and activation are
(`ops.kernels.skinny_linear`). Otherwise the layers are called one by one.
"""

from __future__ import annotations

from torch import Tensor

from tp_runtime.ops.activation import SiluAndMul
from tp_runtime.ops.compiled import runs_kernels
from tp_runtime.ops.linear import PackedColumnLinear
from tp_runtime.ops.norm import RMSNorm
from tp_runtime.ops.partial import Hidden, Partial
from tp_runtime.ops.product import MAX_SILU_ROWS, is_skinny


def add_norm(x: Hidden, residual: Tensor | None, norm: RMSNorm) -> tuple[Tensor, Tensor]:
    """(norm(x + residual), x + residual); residual None: (norm(x), x). All [tokens, hidden]."""
    done = _in_one_kernel(x, residual, norm)
    if done is not None:
        return done
    whole = _whole(x)
    return (norm(whole), whole) if residual is None else norm(whole, residual)


def normed_linear(
    x: Hidden, residual: Tensor | None, norm: RMSNorm, linear: PackedColumnLinear
) -> tuple[Tensor, Tensor]:
    """(linear(norm(x + residual)), x + residual); residual None: (linear(norm(x)), x).

    x, residual [tokens, hidden] -> [tokens, local outputs], [tokens, hidden]"""
    done = _in_one_kernel(x, residual, norm)
    if done is None:
        whole = _whole(x)
        if runs_kernels(whole) and whole.shape[0] == 1:
            return _one_row(whole, residual, norm, linear, silu=False)
        done = add_norm(whole, residual, norm)
    normed, residual = done
    return linear(normed), residual


def normed_gate_up(
    x: Hidden, residual: Tensor, norm: RMSNorm, linear: PackedColumnLinear, act: SiluAndMul
) -> tuple[Tensor, Tensor]:
    """(act(linear(norm(x + residual))), x + residual)

    x, residual [tokens, hidden] -> [tokens, local intermediate], [tokens, hidden]"""
    done = _in_one_kernel(x, residual, norm)
    if done is None:
        whole = _whole(x)
        if runs_kernels(whole) and whole.shape[0] == 1:
            return _one_row(whole, residual, norm, linear, silu=True)
        done = add_norm(whole, residual, norm)
    normed, residual = done
    if runs_kernels(normed) and normed.shape[0] == 1:
        return _one_row(normed, None, None, linear, silu=True)[0], residual
    if is_skinny(normed, MAX_SILU_ROWS):
        from tp_runtime.ops.kernels.skinny_linear import skinny_linear  # triton: CUDA only

        return skinny_linear(normed, linear.weight, linear.bias, silu=True), residual
    return act(linear(normed)), residual


def _in_one_kernel(
    x: Hidden, residual: Tensor | None, norm: RMSNorm
) -> tuple[Tensor, Tensor] | None:
    """Sum over the ranks, residual add and norm, where one kernel makes them; None elsewhere."""
    if not isinstance(x, Partial) or not runs_kernels(x.term):
        return None
    return x.group.comm.all_reduce_norm(x.term, residual, norm.weight, norm.eps)


def _whole(x: Hidden) -> Tensor:
    return x.total() if isinstance(x, Partial) else x


def _one_row(
    x: Tensor,
    residual: Tensor | None,
    norm: RMSNorm | None,
    linear: PackedColumnLinear,
    silu: bool,
) -> tuple[Tensor, Tensor]:
    from tp_runtime.ops.kernels.row_linear import row_linear  # triton: CUDA only

    return row_linear(
        x,
        linear.weight,
        linear.bias,
        norm=None if norm is None else norm.weight,
        eps=0.0 if norm is None else norm.eps,
        residual=residual,
        silu=silu,
    )
