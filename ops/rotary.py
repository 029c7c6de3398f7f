"""Rotary position embedding (Su et al., arXiv:2104.09864) and its length extensions.

Dimension pairs are (i, i + rotary_dim / 2): the "two halves" layout of transformers. cos and sin
are computed in float32 and cast to the dtype of q before use, as transformers does. Frequencies
follow transformers' `ROPE_INIT_FUNCTIONS`; a cache of rotated keys allows one table only, so
dynamic NTK is fixed at start for the longest sequence that will be allowed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tp_runtime.ops.compiled import compilable, runs_kernels

ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "llama3")


@dataclass(frozen=True)
class RopeParameters:
    """One model's rotary settings, named as in its config.json (`rope_parameters`).

    `dim` is the number of rotated dimensions of a head (head_dim times partial_rotary_factor),
    `max_position` the config's max_position_embeddings, `original_max_position` the length the
    model was first trained for. Fields that a type does not use are ignored by it."""

    type: str
    theta: float
    dim: int
    max_position: int
    factor: float = 1.0
    original_max_position: int | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None
    truncate: bool = True


def rope_frequencies(rope: RopeParameters, max_model_len: int) -> tuple[Tensor, float]:
    """Inverse frequencies [dim / 2] float32 and the factor that cos and sin are multiplied by.

    Raises ValueError naming a type that is not implemented (longrope and unknown ones)."""
    if rope.type == "default":
        return _plain(rope.theta, rope.dim), 1.0
    if rope.type == "linear":
        return _plain(rope.theta, rope.dim) / rope.factor, 1.0
    if rope.type == "dynamic":
        return _dynamic(rope, max_model_len), 1.0
    if rope.type == "yarn":
        return _yarn(rope)
    if rope.type == "llama3":
        return _llama3(rope), 1.0
    raise ValueError(
        f"Rotary embedding type {rope.type!r} is not implemented; "
        f"implemented are {', '.join(ROPE_TYPES)}."
    )


def _plain(theta: float | Tensor, dim: int) -> Tensor:
    exponent = torch.arange(0, dim, 2, dtype=torch.int64).to(torch.float32) / dim
    return 1.0 / (theta**exponent)


def _dynamic(rope: RopeParameters, max_model_len: int) -> Tensor:
    """NTK-aware base for one fixed length (transformers: the length seen so far)."""
    # A tensor, because transformers has one here: the power is then rounded to float32 as there.
    length = torch.tensor(max(max_model_len, rope.max_position))
    stretch = rope.factor * length / rope.max_position - (rope.factor - 1)
    return _plain(rope.theta * stretch ** (rope.dim / (rope.dim - 2)), rope.dim)


def _llama3(rope: RopeParameters) -> Tensor:
    """Long wavelengths are divided by `factor`, short ones kept, those between blended."""
    plain = _plain(rope.theta, rope.dim)
    original = rope.original_max_position or rope.max_position
    wavelength = 2 * math.pi / plain
    low = original / rope.low_freq_factor
    high = original / rope.high_freq_factor
    slow = torch.where(wavelength > low, plain / rope.factor, plain)
    smooth = (original / wavelength - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    blended = (1 - smooth) * slow / rope.factor + smooth * slow
    between = ~(wavelength < high) & ~(wavelength > low)
    return torch.where(between, blended, slow)


def _yarn(rope: RopeParameters) -> tuple[Tensor, float]:
    """YaRN (Peng et al., arXiv:2309.00071): interpolate slow dimensions, keep fast ones."""
    original = rope.original_max_position or rope.max_position
    low = _yarn_dimension(rope.beta_fast, rope, original)
    high = _yarn_dimension(rope.beta_slow, rope, original)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    if low == high:
        high += 0.001  # one step instead of a division by zero
    ramp = ((torch.arange(rope.dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    keep = 1 - ramp
    powers = rope.theta ** (torch.arange(0, rope.dim, 2).to(torch.float32) / rope.dim)
    frequencies = 1.0 / (rope.factor * powers) * (1 - keep) + 1.0 / powers * keep
    return frequencies, _yarn_attention_factor(rope)


def _yarn_dimension(rotations: float, rope: RopeParameters, original: int) -> float:
    """The (fractional) dimension that makes `rotations` turns over the original length."""
    return rope.dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))


def _yarn_attention_factor(rope: RopeParameters) -> float:
    def mscale(weight: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * weight * math.log(rope.factor) + 1.0

    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return mscale(rope.mscale) / mscale(rope.mscale_all_dim)
    return mscale(1.0)


@compilable
def rotate_reference(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the first dimensions of [tokens, heads, head_dim] by cos, sin [tokens, dim / 2].

    y1 = x1 cos - x2 sin, y2 = x2 cos + x1 sin, each product rounded to x.dtype."""
    half = cos.shape[-1]
    cos = cos.to(x.dtype).unsqueeze(-2)
    sin = sin.to(x.dtype).unsqueeze(-2)
    x1, x2, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin, rest), dim=-1)


class RotaryEmbedding(nn.Module):
    """The table of one model, shared by its layers; replicated on every rank.

    `max_model_len` is the number of positions. cos_sin: [max_model_len, cos dim/2 | sin dim/2]
    float32."""

    cos_sin: Tensor

    def __init__(
        self,
        head_dim: int,
        rope: RopeParameters,
        max_model_len: int,
        *,
        device: torch.device | str,
    ) -> None:
        super().__init__()
        if rope.dim % 2 or not 0 < rope.dim <= head_dim:
            raise ValueError(
                f"{rope.dim} rotated dimensions do not fit a head of {head_dim}; "
                "give an even number up to the head size."
            )
        self.head_dim = head_dim
        self.rotary_dim = rope.dim
        frequencies, scaling = rope_frequencies(rope, max_model_len)
        angles = torch.arange(max_model_len, dtype=torch.float32)[:, None] * frequencies[None, :]
        table = torch.cat((angles.cos() * scaling, angles.sin() * scaling), dim=-1)
        self.register_buffer("cos_sin", table.to(device), persistent=False)

    def forward(self, positions: Tensor, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """positions [tokens] int64, q [tokens, heads, head_dim], k [tokens, kv_heads, head_dim]
        -> rotated q and k (new tensors). Positions must be below max_model_len."""
        if runs_kernels(q):
            from tp_runtime.ops.kernels.rotary import rotate  # triton: CUDA only

            return rotate(q, k, positions, self.cos_sin)
        cos, sin = self.cos_sin[positions].chunk(2, dim=-1)
        return rotate_reference(q, cos, sin), rotate_reference(k, cos, sin)
