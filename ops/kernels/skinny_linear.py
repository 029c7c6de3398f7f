"""y = x W^T, a few rows: a matrix product that is a read of W at memory speed.

    y = x W^T + b, or silu(x W_gate^T) * (x W_up^T) for W = [W_gate; W_up]

A program owns a tile of rows of W and walks along a range of its columns. W is the left operand of
the tensor cores, whose fixed side is the long one (64 rows), and x^T the right one, whose side may
be as short as 16; so few rows of x waste nothing. The tiles of a gate and an up projection lie in
one operand, gate rows above up rows.

Where the tiles alone cannot keep a GPU busy, the columns are split. The program of a tile that
comes last adds the sums of all its splits in their order, so the bits of a result depend on no
race. They do not depend on the other rows, and on the number of rows only as far as the
configuration does (the number of splits; tiles below 64 rows use another instruction).

Sums are float32; gate, up and silu(gate) are rounded to the dtype of x as the separate layers do.
References: `torch.nn.functional.linear`, `ops.activation.silu_and_mul_reference`.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tp_runtime.ops.kernels.host_math import ceil_div, power_of_2

MAX_ROWS = 128
_MIN_ROWS = 16
"""The shortest right operand that `wgmma` is used for; below, another instruction would be, and a
result's bits would depend on the number of rows."""
_DTYPES = (torch.bfloat16, torch.float16)
_ARRIVALS = 1024
"""Most tiles whose columns are split: several programs for each processor of any GPU."""
_SMALL_WEIGHT = 3 << 21
"""Fewer elements than this leave processors idle with tiles of 64 rows."""


class SkinnyConfig(NamedTuple):
    """Rows of W per program (gate and up together), columns per turn, programs per tile, turns
    loaded ahead, warps."""

    tile: int
    columns: int
    splits: int
    stages: int
    warps: int


@triton.jit
def _sum_of_splits(partial_ptr, offset, inside, SPLITS: tl.constexpr, SIZE: tl.constexpr):
    """From L2: other programs wrote it."""
    total = tl.load(partial_ptr + offset, mask=inside, other=0.0, cache_modifier=".cg")
    for split in tl.static_range(1, SPLITS):
        total += tl.load(
            partial_ptr + split * SIZE + offset, mask=inside, other=0.0, cache_modifier=".cg"
        )
    return total


@triton.jit
def _with_bias(total, bias_ptr, output, output_inside, BIAS: tl.constexpr):
    if BIAS:
        total += tl.load(bias_ptr + output, mask=output_inside, other=0.0).to(tl.float32)[:, None]
    return total


@triton.jit
def _store_plain(total, bias_ptr, y_ptr, first, row, rows, outputs, BIAS: tl.constexpr):
    """total [outputs of the tile, rows]"""
    output = first + tl.arange(0, total.shape[0])
    inside = output < outputs
    total = _with_bias(total, bias_ptr, output, inside, BIAS)
    place = y_ptr + row[None, :] * outputs + output[:, None]
    dtype = y_ptr.dtype.element_ty
    tl.store(place, total.to(dtype), mask=inside[:, None] & (row < rows)[None, :])


@triton.jit
def _store_silu(gate, up, bias_ptr, y_ptr, first, row, rows, outputs, BIAS: tl.constexpr):
    """gate, up [outputs of the tile, rows]"""
    output = first + tl.arange(0, gate.shape[0])
    inside = output < outputs
    dtype = y_ptr.dtype.element_ty
    gate = _with_bias(gate, bias_ptr, output, inside, BIAS).to(dtype).to(tl.float32)
    up = _with_bias(up, bias_ptr + outputs, output, inside, BIAS).to(dtype).to(tl.float32)
    y = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32) * up
    place = y_ptr + row[None, :] * outputs + output[:, None]
    tl.store(place, y.to(dtype), mask=inside[:, None] & (row < rows)[None, :])


@triton.jit(do_not_specialize=["rows"])
def _skinny_linear_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    partial_ptr,
    arrived_ptr,
    rows,
    outputs,
    inputs,
    x_stride,
    weight_stride,
    SILU: tl.constexpr,
    BIAS: tl.constexpr,
    EVEN: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    COLUMNS: tl.constexpr,
    SPLITS: tl.constexpr,
):
    PARTS: tl.constexpr = 2 if SILU else 1
    OUTPUTS: tl.constexpr = TILE // PARTS
    tile = tl.program_id(0) // SPLITS
    split = tl.program_id(0) % SPLITS
    first = tile * OUTPUTS
    turns = tl.cdiv(inputs, COLUMNS)
    begin = turns * split // SPLITS * COLUMNS
    end = tl.minimum(turns * (split + 1) // SPLITS * COLUMNS, inputs)
    member = tl.arange(0, TILE)
    # Rows past the last are the last one: read, multiplied, never stored.
    line = tl.minimum(first + member % OUTPUTS, outputs - 1) + member // OUTPUTS * outputs
    base = weight_ptr + line.to(tl.int64)[:, None] * weight_stride
    row = tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    x_base = x_ptr + row[:, None] * x_stride
    row_inside = (row < rows)[:, None]
    total = tl.zeros((TILE, ROWS), tl.float32)
    for start in range(begin, end, COLUMNS):
        place = (start + column)[None, :]
        if EVEN:
            x = tl.load(x_base + place, mask=row_inside, other=0.0)
            w = tl.load(base + place)
        else:
            x = tl.load(x_base + place, mask=row_inside & (place < inputs), other=0.0)
            w = tl.load(base + place, mask=place < inputs, other=0.0)
        total = tl.dot(w, tl.trans(x), total)

    SIZE: tl.constexpr = TILE * ROWS
    if SPLITS == 1:
        if SILU:
            parts = tl.permute(tl.reshape(total, (2, OUTPUTS, ROWS)), (1, 2, 0))
            gate, up = tl.split(parts)
            _store_silu(gate, up, bias_ptr, y_ptr, first, row, rows, outputs, BIAS)
        else:
            _store_plain(total, bias_ptr, y_ptr, first, row, rows, outputs, BIAS)
    else:
        sums_ptr = partial_ptr + (tile * SPLITS).to(tl.int64) * SIZE
        inside = (row < rows)[None, :]
        mine = split * SIZE + row[None, :] * TILE + member[:, None]
        tl.store(sums_ptr + mine, total, mask=inside)
        tl.debug_barrier()  # every thread's sums, before one thread tells of them
        arrived = tl.atomic_add(arrived_ptr + tile, 1, sem="acq_rel", scope="gpu")
        if arrived == SPLITS - 1:
            tl.store(arrived_ptr + tile, 0)  # as the next launch must find it
            offset = row[None, :] * TILE + tl.arange(0, OUTPUTS)[:, None]
            whole = _sum_of_splits(sums_ptr, offset, inside, SPLITS, SIZE)
            if SILU:
                up = _sum_of_splits(sums_ptr, offset + OUTPUTS, inside, SPLITS, SIZE)
                _store_silu(whole, up, bias_ptr, y_ptr, first, row, rows, outputs, BIAS)
            else:
                _store_plain(whole, bias_ptr, y_ptr, first, row, rows, outputs, BIAS)


def default_config(outputs: int, inputs: int, silu: bool) -> SkinnyConfig:
    """Within 5 % of the best of 20 configurations on an H200 for the projections of Qwen3 0.6B and
    8B, whole and halved, at 2 to 32 rows: about as many programs as there are processors. The same
    for every number of rows, so that a row's bits do not depend on it."""
    tile = 32 if not silu and outputs * inputs < _SMALL_WEIGHT else 64
    tiles = ceil_div(outputs * (2 if silu else 1), tile)
    splits = 1 if tiles > 90 else max(1, min(ceil_div(128, tiles), 8, inputs // 512))
    return SkinnyConfig(tile, 128, splits, stages=4, warps=4)


@functools.cache
def _arrivals(device: torch.device) -> Tensor:
    """How many programs of a tile are done, per tile; zero between launches. One for each device,
    so calls that split must follow each other there, as on one stream they do."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "skinny_linear must run once on a device before it is recorded in a CUDA graph."
        )
    return torch.zeros(_ARRIVALS, dtype=torch.int32, device=device)


def skinny_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    silu: bool = False,
    config: SkinnyConfig | None = None,
) -> Tensor:
    """x [rows, K], weight [N, K] of one dtype, bfloat16 or float16 -> y [rows, N]; with `silu` N
    counts gate and up together and y is [rows, N / 2]. At most `MAX_ROWS` rows; last strides 1.

    Raises ValueError for other shapes, strides or dtypes."""
    _check(x, weight, silu)
    rows, inputs = x.shape
    outputs = weight.shape[0] // 2 if silu else weight.shape[0]
    y = torch.empty((rows, outputs), dtype=x.dtype, device=x.device)
    if not y.numel():
        return y
    chosen = config or default_config(outputs, inputs, silu)
    tile = chosen.tile
    tiles = ceil_div(weight.shape[0], tile)
    splits = min(chosen.splits, ceil_div(inputs, chosen.columns))
    if splits > 1 and tiles > _ARRIVALS:
        raise ValueError(f"skinny_linear splits at most {_ARRIVALS} tiles, not {tiles}.")
    padded = max(_MIN_ROWS, power_of_2(rows))
    even = inputs % chosen.columns == 0
    partial, arrived = y, y
    if splits > 1:
        arrived = _arrivals(x.device)
        shape = (tiles * splits * tile * padded,)
        partial = torch.empty(shape, dtype=torch.float32, device=x.device)
    _skinny_linear_kernel[(tiles * splits,)](
        x,
        weight,
        bias if bias is not None else x,
        y,
        partial,
        arrived,
        rows,
        outputs,
        inputs,
        x.stride(0),
        weight.stride(0),
        SILU=silu,
        BIAS=bias is not None,
        EVEN=even,
        ROWS=padded,
        TILE=tile,
        COLUMNS=chosen.columns,
        SPLITS=splits,
        num_warps=chosen.warps,
        num_stages=chosen.stages,
    )
    return y


def _check(x: Tensor, weight: Tensor, silu: bool) -> None:
    fits = (
        x.dim() == weight.dim() == 2
        and x.shape[0] <= MAX_ROWS
        and x.shape[1] == weight.shape[1]
        and x.stride(1) == weight.stride(1) == 1
    )
    if not fits:
        raise ValueError(
            f"skinny_linear takes [rows, K] with at most {MAX_ROWS} rows and [N, K], last stride "
            f"1, not {list(x.shape)} and {list(weight.shape)} (strides {list(x.stride())} and "
            f"{list(weight.stride())})."
        )
    if x.dtype != weight.dtype or x.dtype not in _DTYPES:
        raise ValueError(
            f"skinny_linear multiplies bfloat16 or float16, both alike, not {x.dtype} and "
            f"{weight.dtype}."
        )
    if silu and weight.shape[0] % 2:
        raise ValueError(
            f"With silu the weight holds gate and up, an even number of rows, not "
            f"{weight.shape[0]}."
        )
