"""y = w * round(x / sqrt(mean(x^2) + eps)), alone or with x replaced by round(x + residual).

The mean is in float32; `round` casts to the dtype of x, as in transformers. A program handles a few
rows. References: `tp_runtime.ops.norm.rms_norm_reference`, `add_rms_norm_reference`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tp_runtime.ops.kernels.host_math import ceil_div, power_of_2
from tp_runtime.ops.kernels.overlap import after_previous, overlaps

_ELEMENTS_PER_PROGRAM = 1024
"""Short rows (heads of 64 to 256 elements) are handled several at a time."""


@triton.jit(do_not_specialize=["rows"])
def _rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    y_ptr,
    sum_ptr,
    rows,
    inner,
    x_outer_stride,
    x_inner_stride,
    residual_stride,
    eps,
    SIZE: tl.constexpr,
    ADD: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    after_previous(OVERLAP)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (column < SIZE)
    x_offset = row // inner * x_outer_stride + row % inner * x_inner_stride + column
    x = tl.load(x_ptr + x_offset, mask=inside, other=0.0)
    dtype = x.dtype
    wide = x.to(tl.float32)
    if ADD:
        residual = tl.load(residual_ptr + row * residual_stride + column, mask=inside, other=0.0)
        summed = (wide + residual.to(tl.float32)).to(dtype)
        tl.store(sum_ptr + row * SIZE + column, summed, mask=inside)
        wide = summed.to(tl.float32)
    mean = tl.sum(wide * wide, axis=1) / SIZE
    scale = tl.rsqrt(mean + eps)[:, None]
    normed = (wide * scale).to(dtype).to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=column < SIZE, other=0.0).to(tl.float32)
    tl.store(y_ptr + row * SIZE + column, (weight * normed).to(dtype), mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """[tokens, size] or [tokens, heads, size], last stride 1, other strides free -> contiguous."""
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(x, x, weight, y, y, eps, add=False)
    return y


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x, residual [tokens, size], last stride 1 -> (norm(x + residual), x + residual)."""
    if x.dim() != 2 or residual.shape != x.shape:
        raise ValueError(
            f"add_rms_norm takes two [tokens, size] tensors, not {list(x.shape)} "
            f"and {list(residual.shape)}."
        )
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    summed = torch.empty_like(y)
    _launch(x, residual, weight, y, summed, eps, add=True)
    return y, summed


def _launch(
    x: Tensor, residual: Tensor, weight: Tensor, y: Tensor, summed: Tensor, eps: float, add: bool
) -> None:
    size = x.shape[-1]
    rows = x.numel() // size
    if rows == 0:
        return
    if x.dim() not in (2, 3) or x.stride(-1) != 1 or residual.stride(-1) != 1:
        raise ValueError(
            f"rms_norm takes 2 or 3 dimensions with last stride 1, not shape {list(x.shape)} "
            f"with strides {list(x.stride())}."
        )
    block = power_of_2(size)
    overlap = overlaps(x)
    per_program = max(1, _ELEMENTS_PER_PROGRAM // block)
    _rms_norm_kernel[(ceil_div(rows, per_program),)](
        x,
        residual,
        weight,
        y,
        summed,
        rows,
        x.shape[1] if x.dim() == 3 else 1,
        x.stride(0),
        x.stride(1) if x.dim() == 3 else 0,
        residual.stride(0),
        eps,
        SIZE=size,
        ADD=add,
        ROWS=per_program,
        BLOCK=block,
        OVERLAP=overlap,
        launch_pdl=overlap,
        num_warps=8 if block >= 4096 else 4,
    )
