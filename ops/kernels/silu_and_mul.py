"""y = round(silu(gate)) * up for rows [gate | up]; silu(g) = g / (1 + exp(-g)) in float32.

Reference: `tp_runtime.ops.activation.silu_and_mul_reference`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tp_runtime.ops.kernels.host_math import ceil_div, power_of_2
from tp_runtime.ops.kernels.overlap import after_previous, overlaps

_BLOCK = 1024


@triton.jit
def _silu_and_mul_kernel(
    x_ptr, y_ptr, x_stride, SIZE: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr
):
    after_previous(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < SIZE
    gate = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0)
    up = tl.load(x_ptr + row * x_stride + SIZE + column, mask=inside, other=0.0)
    dtype = gate.dtype
    wide = gate.to(tl.float32)
    activated = (wide / (1.0 + tl.exp(-wide))).to(dtype).to(tl.float32)
    tl.store(y_ptr + row * SIZE + column, (activated * up.to(tl.float32)).to(dtype), mask=inside)


def silu_and_mul(x: Tensor) -> Tensor:
    """[tokens, 2 * n], any row stride, last stride 1 -> [tokens, n]"""
    tokens, width = x.shape
    if width % 2 or x.stride(1) != 1:
        raise ValueError(
            f"silu_and_mul takes [tokens, 2 * n] with last stride 1, not {list(x.shape)} with "
            f"strides {list(x.stride())}."
        )
    size = width // 2
    y = torch.empty((tokens, size), dtype=x.dtype, device=x.device)
    if y.numel():
        overlap = overlaps(x)
        block = min(_BLOCK, power_of_2(size))
        _silu_and_mul_kernel[(tokens, ceil_div(size, block))](
            x, y, x.stride(0), SIZE=size, BLOCK=block, OVERLAP=overlap, launch_pdl=overlap
        )
    return y
