"""A row that was summed over the ranks, in words of 32 bits: one or two values each.

    total    s = round(sum), or round(round(sum) + residual)
    with a norm  n = w * round(s / sqrt(mean(s^2) + eps))

Rounded where `ops.norm` rounds. A thread's words hold whole values, so that a row is sent as words
and added as values without moving between threads.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tp_runtime.ops.kernels.host_math import power_of_2

DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


def words_of(size: int, dtype: torch.dtype) -> int:
    """32-bit words in `size` elements."""
    return size * dtype.itemsize // 4


def warps_of(words: int) -> int:
    """Sixteen words a thread are enough for a load and few enough for the registers."""
    return max(1, min(16, power_of_2(words) // 512))


@triton.jit
def low_value(bits, DTYPE: tl.constexpr):
    """The first value in each word, float32."""
    if DTYPE == tl.float32:
        return bits.to(tl.float32, bitcast=True)
    else:
        return bits.to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)


@triton.jit
def high_value(bits, DTYPE: tl.constexpr):
    """The second value in each word, float32; zero where a word is one value."""
    if DTYPE == tl.float32:
        return bits.to(tl.float32) * 0.0
    else:
        return (bits >> 16).to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)


@triton.jit
def word_of(low, high, DTYPE: tl.constexpr):
    if DTYPE == tl.float32:
        return low.to(tl.int32, bitcast=True)
    else:
        first = low.to(DTYPE).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        return first | (high.to(DTYPE).to(tl.int16, bitcast=True).to(tl.int32) << 16)


@triton.jit
def finish_row(
    total,
    residual,
    norm,
    y_ptr,
    sum_ptr,
    at,
    inside,
    eps,
    SIZE: tl.constexpr,
    ADD: tl.constexpr,
    NORM: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """total, residual, norm [BLOCK] int32. Stores the row as `y`; with a norm the normed row there
    and the sum as `sum`."""
    if ADD:
        low = low_value(total, DTYPE) + low_value(residual, DTYPE)
        high = high_value(total, DTYPE) + high_value(residual, DTYPE)
        total = word_of(low, high, DTYPE)
    if NORM:
        tl.store(sum_ptr + at, total, mask=inside)
        low = low_value(total, DTYPE)
        high = high_value(total, DTYPE)
        scale = tl.rsqrt(tl.sum(low * low + high * high, axis=0) / SIZE + eps)
        scaled = word_of(low * scale, high * scale, DTYPE)
        low = low_value(scaled, DTYPE) * low_value(norm, DTYPE)
        high = high_value(scaled, DTYPE) * high_value(norm, DTYPE)
        total = word_of(low, high, DTYPE)
    tl.store(y_ptr + at, total, mask=inside)
