"""y = W n(x), one row: a matrix-vector product with what surrounds it in a decoder folded in.

    n(x) = x, or the RMSNorm of x, or of s = round(x + residual), which is returned as well
    y    = W n(x) + b, or silu(W_gate n(x)) * (W_up n(x)) for W = [W_gate; W_up]

For one row a product is a read of W at memory speed; a program owns a few rows of W, reads them
once, and makes the norm of the whole x again for itself, which costs less than a launch of its own.
Sums are float32; x, the norm, gate and up are rounded to the dtype of x where the separate layers
round them. References: `ops.norm`, `torch.nn.functional.linear`, `ops.activation`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tp_runtime.ops.kernels.host_math import ceil_div, power_of_2
from tp_runtime.ops.kernels.overlap import after_previous, overlaps


class RowConfig(NamedTuple):
    """Rows of W per program, columns per turn, warps."""

    rows: int
    columns: int
    warps: int


@triton.jit
def _normed(
    x_ptr, residual_ptr, norm_ptr, offset, inside, scale, ADD: tl.constexpr, NORM: tl.constexpr
):
    """n(x) at `offset`, float32 holding values of x's dtype."""
    x = tl.load(x_ptr + offset, mask=inside, other=0.0)
    dtype = x.dtype
    wide = x.to(tl.float32)
    if ADD:
        wide += tl.load(residual_ptr + offset, mask=inside, other=0.0).to(tl.float32)
        wide = wide.to(dtype).to(tl.float32)
    if NORM:
        weight = tl.load(norm_ptr + offset, mask=inside, other=0.0).to(tl.float32)
        wide = (weight * (wide * scale).to(dtype).to(tl.float32)).to(dtype).to(tl.float32)
    return wide


@triton.jit
def _row_linear_kernel(
    x_ptr,
    residual_ptr,
    norm_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    sum_ptr,
    outputs,
    weight_stride,
    eps,
    K: tl.constexpr,
    K_BLOCK: tl.constexpr,
    ADD: tl.constexpr,
    NORM: tl.constexpr,
    SILU: tl.constexpr,
    BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row_inside = row < outputs
    base = weight_ptr + row.to(tl.int64)[:, None] * weight_stride
    second = base + outputs.to(tl.int64) * weight_stride
    # The first weights are under way while the kernel before ends.
    column = tl.arange(0, COLUMNS)
    inside = row_inside[:, None] & (column < K)[None, :]
    first_w = tl.load(base + column[None, :], mask=inside, other=0.0)
    first_w2 = first_w
    if SILU:
        first_w2 = tl.load(second + column[None, :], mask=inside, other=0.0)
    after_previous(OVERLAP)
    scale = 1.0
    if NORM:
        whole = tl.arange(0, K_BLOCK)
        x = _normed(x_ptr, residual_ptr, norm_ptr, whole, whole < K, 1.0, ADD, False)
        scale = tl.rsqrt(tl.sum(x * x, axis=0) / K + eps)
        if ADD:  # noqa: SIM102 (a constant of the kernel and a value of the program)
            if tl.program_id(0) == 0:
                tl.store(sum_ptr + whole, x.to(sum_ptr.dtype.element_ty), mask=whole < K)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    total2 = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in tl.static_range(0, K, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        inside = row_inside[:, None] & (column < K)[None, :]
        w = first_w
        w2 = first_w2
        if start > 0:
            w = tl.load(base + column[None, :], mask=inside, other=0.0)
            if SILU:
                w2 = tl.load(second + column[None, :], mask=inside, other=0.0)
        x = _normed(x_ptr, residual_ptr, norm_ptr, column, column < K, scale, ADD, NORM)[None, :]
        total += w.to(tl.float32) * x
        if SILU:
            total2 += w2.to(tl.float32) * x
    y = tl.sum(total, axis=1)
    dtype = y_ptr.dtype.element_ty
    if BIAS:
        y += tl.load(bias_ptr + row, mask=row_inside, other=0.0).to(tl.float32)
    if SILU:
        up = tl.sum(total2, axis=1)
        if BIAS:
            up += tl.load(bias_ptr + outputs + row, mask=row_inside, other=0.0).to(tl.float32)
        gate = y.to(dtype).to(tl.float32)
        y = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32) * up.to(dtype).to(tl.float32)
    tl.store(y_ptr + row, y.to(dtype), mask=row_inside)


def default_config(outputs: int, inputs: int, normed: bool, silu: bool) -> RowConfig:
    """Within 3 % of the best of 48 configurations on an H200 for the projections of Qwen3 0.6B and
    8B, whole and halved."""
    whole = power_of_2(inputs)
    if silu:
        return RowConfig(4, min(whole, 1024), 4)
    if outputs >= 32768:
        return RowConfig(2, min(whole, 2048), 4)
    if normed:
        return RowConfig(4, min(whole, 2048), 4)
    return RowConfig(2, min(whole, 2048), 8 if whole <= 4096 else 4)


def row_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    residual: Tensor | None = None,
    silu: bool = False,
    config: RowConfig | None = None,
) -> tuple[Tensor, Tensor]:
    """x [1, K], weight [N, K] -> (y [1, N], s [1, K]); with `silu` N counts gate and up together
    and y is [1, N / 2]. `norm` [K] is the norm's weight, `residual` [1, K] goes with it; s is x
    itself without a residual. Last strides 1.

    Raises ValueError for other shapes or strides."""
    inputs = x.shape[-1]
    if x.shape != (1, inputs) or weight.shape[1] != inputs or weight.stride(1) != 1:
        raise ValueError(
            f"row_linear takes [1, K] and [N, K] with last stride 1, not {list(x.shape)} and "
            f"{list(weight.shape)} (strides {list(weight.stride())})."
        )
    if residual is not None and norm is None:
        raise ValueError("row_linear adds a residual only in front of a norm.")
    outputs = weight.shape[0] // 2 if silu else weight.shape[0]
    y = torch.empty((1, outputs), dtype=x.dtype, device=x.device)
    summed = x if residual is None else torch.empty_like(x)
    chosen = config or default_config(outputs, inputs, norm is not None, silu)
    overlap = overlaps(x)
    _row_linear_kernel[(ceil_div(outputs, chosen.rows),)](
        x,
        residual if residual is not None else x,
        norm if norm is not None else x,
        weight,
        bias if bias is not None else x,
        y,
        summed,
        outputs,
        weight.stride(0),
        eps,
        K=inputs,
        K_BLOCK=power_of_2(inputs),
        ADD=residual is not None,
        NORM=norm is not None,
        SILU=silu,
        BIAS=bias is not None,
        ROWS=chosen.rows,
        COLUMNS=chosen.columns,
        OVERLAP=overlap,
        launch_pdl=overlap,
        num_warps=chosen.warps,
    )
    return y, summed
