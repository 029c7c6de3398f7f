"""x W^T + b by the routine that suits the number of rows."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tp_runtime.ops.compiled import runs_kernels
from tp_runtime.ops.tuned_product import TunedProduct

MAX_SKINNY_ROWS = 32
"""Up to here a product is mostly a read of the weight, and `ops.kernels.skinny_linear` is used."""
MAX_SMALL_SKINNY_ROWS = 16
"""The same for weights that are read in less than 4 us or so."""
MAX_SILU_ROWS = 48
"""The same where the activation is part of the kernel."""
_SMALL_WEIGHT = 9 << 20


def product(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, tuned: TunedProduct | None = None
) -> Tensor:
    """x [rows, inputs], weight [outputs, inputs] -> [rows, outputs].

    A few rows on a GPU are a read of the weight at memory speed, where our own kernels are ahead of
    the library's, but for what `tuned` has found to be faster; everything else is the library's, by
    the algorithm of `tuned` where there is one and no bias."""
    if runs_kernels(x) and x.dim() == 2 and x.shape[0] == 1 and x.shape[1]:
        from tp_runtime.ops.kernels.row_linear import row_linear  # triton: CUDA only

        return row_linear(x, weight, bias)[0]
    y = tuned.multiply(x, weight) if tuned is not None and bias is None else None
    if y is not None:
        return y
    if is_skinny(x, most_skinny_rows(weight)):
        from tp_runtime.ops.kernels.skinny_linear import skinny_linear  # triton: CUDA only

        return skinny_linear(x, weight, bias)
    return F.linear(x, weight, bias)


def product_into(out: Tensor, x: Tensor, weight: Tensor, tuned: TunedProduct | None = None) -> None:
    """Writes x [rows, inputs] times weight [outputs, inputs] to `out` [rows, outputs]; for so many
    rows that the product is the library's."""
    if tuned is None or tuned.multiply(x, weight, out) is None:
        torch.mm(x, weight.t(), out=out)


def most_skinny_rows(weight: Tensor) -> int:
    """Up to how many rows a product with this weight is our own kernels' if nothing is tuned."""
    return MAX_SMALL_SKINNY_ROWS if weight.numel() < _SMALL_WEIGHT else MAX_SKINNY_ROWS


def is_skinny(x: Tensor, most: int) -> bool:
    """Whether a product with these rows, [rows, inputs], is `skinny_linear`'s: 2 to `most`. float32
    is not: its tensor cores would round it to tf32. Nor are inputs that cannot be read 16 at a
    time."""
    narrow = x.dtype in (torch.bfloat16, torch.float16)
    few = x.dim() == 2 and 2 <= x.shape[0] <= most
    read = x.shape[-1] > 0 and x.shape[-1] % 16 == 0 and x.stride(-1) == 1
    return runs_kernels(x) and narrow and few and read
