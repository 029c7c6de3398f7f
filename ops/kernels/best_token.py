"""Per row, the best (value, id) of a shard of logits, packed into one int64 that orders by both.

    value = logit                                   for greedy rows (temperature 0)
    value = logit / temperature - log(-log(u))      otherwise; u: see ops.sampling.philox

A program takes one row and a piece of the vocabulary; the best of a row is the maximum of its
pieces.
NaN and +inf logits give the largest int64. Reference: `ops.sampling.best.best_reference`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tp_runtime.ops.kernels.host_math import ceil_div
from tp_runtime.ops.kernels.overlap import after_previous, overlaps

PIECE = 4096
_WORDS = 4
"""Philox makes four words at a time, for four neighbouring ids."""


@triton.jit
def _best_kernel(
    logits_ptr,
    temperature_ptr,
    seed_ptr,
    position_ptr,
    out_ptr,
    stride,
    columns,
    start,
    pieces,
    NOISE: tl.constexpr,
    GROUPS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    after_previous(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    piece = tl.program_id(1)
    column = piece * (GROUPS * 4) + tl.arange(0, GROUPS * 4)
    inside = column < columns
    logit = tl.load(logits_ptr + row * stride + column, mask=inside, other=float("-inf"))
    logit = logit.to(tl.float32)
    value = logit
    if NOISE:
        temperature = tl.load(temperature_ptr + row)
        if temperature != 0.0:
            seed = tl.load(seed_ptr + row)
            position = tl.load(position_ptr + row).to(tl.uint32, bitcast=False)
            group = ((start // 4 + piece * GROUPS) + tl.arange(0, GROUPS)).to(tl.uint32)
            zero = group * 0
            w0, w1, w2, w3 = tl.philox(seed, group, zero + position, zero, zero)
            # [GROUPS, 2, 2] in the order w0 w1 w2 w3, which is that of the ids.
            word = tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), (GROUPS * 4,))
            uniform = ((word >> 9).to(tl.float32) + 0.5) * 1.1920928955078125e-07
            value = logit / temperature - tl.log(-tl.log(uniform))
    # The largest value, then the lowest id that has it, in 32 bits each; 64 take twice the time.
    broken = tl.max(((logit != logit) | (logit == float("inf"))).to(tl.int32), axis=0)
    value = tl.where(value == value, value, float("-inf"))
    highest = tl.max(value, axis=0)
    first = tl.min(tl.where(value == highest, column, 0x7FFFFFFF), axis=0)
    bits = (highest + 0.0).to(tl.int32, bitcast=True).to(tl.int64)
    ordered = tl.where(bits >= 0, bits, -(bits & 0x7FFFFFFF))
    key = (ordered << 32) | (0xFFFFFFFF - (start + first).to(tl.int64))
    key = tl.where(broken > 0, 0x7FFFFFFFFFFFFFFF, key)
    tl.store(out_ptr + row * pieces + piece, key)


def best_token(
    logits: Tensor,
    start: int,
    temperature: Tensor | None,
    seed: Tensor,
    position: Tensor,
) -> Tensor:
    """logits [rows, columns] (last stride 1) of vocabulary ids start, start + 1, ...; start a
    multiple of 4. temperature [rows] float32 (None: all greedy), seed and position [rows] int64.
    Returns [rows, pieces] int64, each as `tp_runtime.ops.sampling.best.pack_best`."""
    rows, columns = logits.shape
    if start % _WORDS or logits.stride(1) != 1:
        raise ValueError(
            f"best_token takes shards that begin at a multiple of {_WORDS}, not {start}, with last "
            "stride 1."
        )
    pieces = ceil_div(columns, PIECE)
    overlap = overlaps(logits)
    out = torch.empty((rows, pieces), dtype=torch.int64, device=logits.device)
    _best_kernel[(rows, pieces)](
        logits,
        temperature if temperature is not None else logits,
        seed,
        position,
        out,
        logits.stride(0),
        columns,
        start,
        pieces,
        NOISE=temperature is not None,
        GROUPS=PIECE // _WORDS,
        OVERLAP=overlap,
        launch_pdl=overlap,
        num_warps=8,
    )
    return out
