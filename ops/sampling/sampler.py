"""The draw: from logits [rows, vocab] to token ids [rows], on any device, without a host value.

Parameters are tensors with one entry per row (`SamplingBatch`), so one call serves rows of every
kind; `SamplingClass` says which work can be skipped for a whole batch. Greedy is the argmax with
the lowest id on ties. A row whose logits are not usable (NaN, +inf, or nothing but -inf) gets id
-1. Transformations follow this order: allowed ids, logit bias, blocked ids, repetition penalty,
frequency and presence penalty, temperature, min-p, top-k, top-p, Gumbel-max draw.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tp_runtime.ops.compiled import compilable, runs_kernels
from tp_runtime.ops.sampling.packed import INVALID_ID, unpack_id
from tp_runtime.ops.sampling.philox import gumbel
from tp_runtime.ops.sampling.processors import (
    add_bias,
    allow_only,
    apply_min_p,
    apply_top_k_top_p,
    block_ids,
    penalize,
)


class SamplingClass(enum.IntEnum):
    """The least work that serves every row of a batch."""

    GREEDY = 0
    GUMBEL = 1
    FULL = 2


@dataclass
class Penalties:
    """Rows of the batch state that count tokens. `in_prompt` [rows, vocab] bool, `counts`
    [rows, vocab] int32 of generated ids; the three penalties are [rows] float32."""

    in_prompt: Tensor
    counts: Tensor
    repetition: Tensor
    frequency: Tensor
    presence: Tensor


@dataclass
class Entries:
    """Sparse (row, id, value) entries, each [k]: logit bias, and blocked ids (value -inf)."""

    rows: Tensor
    ids: Tensor
    values: Tensor


@dataclass
class Allowed:
    """The ids that some rows may draw: `rows` [k] int64, `bits` [k, bytes] uint8 as in
    `processors.allow_only`. `on` [k] bool: an entry that is off changes nothing."""

    rows: Tensor
    bits: Tensor
    on: Tensor


@dataclass
class SamplingBatch:
    """One entry per row. `position` is the position the drawn token will have. [rows]: temperature
    float32 (0 = greedy), seed and position int64, top_k int64 (0 = all), top_p and min_p float32
    (1 and 0 = off), min_position int64. The optional parts are None when no row needs them."""

    kind: SamplingClass
    temperature: Tensor
    seed: Tensor
    position: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    min_position: Tensor
    bias: Entries | None = None
    blocked: Entries | None = None
    penalties: Penalties | None = None
    truncated: bool = True
    """Some row uses top-k, top-p or min-p."""
    allowed: Allowed | None = None


def usable_rows(logits: Tensor) -> Tensor:
    """[rows] bool: the largest logit is a finite number (NaN and +inf show in the maximum)."""
    return torch.isfinite(logits.amax(-1))


def process(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """Everything before temperature: the logits a greedy row takes its argmax of."""
    if (a := batch.allowed) is not None:
        logits = allow_only(logits, a.rows, a.bits, a.on)
    if (e := batch.bias) is not None:
        logits = add_bias(logits, e.rows, e.ids, e.values)
    if (e := batch.blocked) is not None:
        logits = block_ids(logits, e.rows, e.ids, e.values, batch.min_position, batch.position)
    if (p := batch.penalties) is not None:
        logits = penalize(logits, p.in_prompt, p.counts, p.repetition, p.frequency, p.presence)
    return logits


def sample(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """Ids [rows] int64 for logits [rows, vocab]; -1 for a row that is not usable."""
    logits = logits.float()
    if batch.kind == SamplingClass.FULL:
        logits = process(logits, batch)
    if batch.kind == SamplingClass.GREEDY:
        return _best_id(logits, logits)
    scaled = scale(logits, batch.temperature)
    if batch.kind == SamplingClass.FULL and batch.truncated:
        scaled = apply_min_p(scaled, batch.min_p)
        scaled = apply_top_k_top_p(scaled, batch.top_k, batch.top_p)
    draw = _draw_by_kernel if runs_kernels(scaled) else _draw
    return draw(logits, scaled, batch.temperature, batch.seed, batch.position)


@compilable
def scale(logits: Tensor, temperature: Tensor) -> Tensor:
    """logits [rows, n] / temperature [rows]; rows with temperature 0 as they are."""
    return logits / torch.where(temperature == 0, 1.0, temperature)[:, None]


def add_noise(logits: Tensor, scaled: Tensor, noise: Tensor, temperature: Tensor) -> Tensor:
    """What the drawn id is the argmax of [rows, n]; greedy rows keep their `logits`."""
    return torch.where((temperature == 0)[:, None], logits, scaled + noise)


@compilable
def _draw(
    logits: Tensor, scaled: Tensor, temperature: Tensor, seed: Tensor, position: Tensor
) -> Tensor:
    noise = gumbel(seed, position, 0, logits.shape[-1])
    return _best_id(logits, add_noise(logits, scaled, noise, temperature))


def _draw_by_kernel(
    logits: Tensor, scaled: Tensor, temperature: Tensor, seed: Tensor, position: Tensor
) -> Tensor:
    """As `_draw`, where the noise takes two hundred operations on all logits."""
    from tp_runtime.ops.kernels.best_token import best_token  # triton: CUDA only

    # The temperature is in `scaled` already; what is left of it is whether there is noise.
    noisy = (temperature != 0).float()
    # Divided by a tiny temperature a logit may be infinite; `best_token` takes that for a fault.
    finite = scaled.clamp(max=torch.finfo(scaled.dtype).max).contiguous()
    best = best_token(finite, 0, noisy, seed, position).amax(1)
    return torch.where(usable_rows(logits), unpack_id(best), INVALID_ID)


@compilable
def _best_id(logits: Tensor, keyed: Tensor) -> Tensor:
    return torch.where(usable_rows(logits), keyed.argmax(-1), INVALID_ID)


class TopLogprobs(NamedTuple):
    """Log-probabilities of some rows: of a chosen id, its rank from 1, and of the k likeliest ids
    in falling order. `chosen_id`, `rank` [rows] int64; `chosen` [rows], `values` [rows, k] float32;
    `ids` [rows, k] int64."""

    chosen_id: Tensor
    chosen: Tensor
    rank: Tensor
    values: Tensor
    ids: Tensor


def top_logprobs(logits: Tensor, chosen: Tensor, k: int) -> TopLogprobs:
    """Of the unmodified distribution: `logits` [rows, vocab]; `chosen` [rows] int64, where a
    negative id is treated as 0."""
    logprobs = logits.float().log_softmax(-1)
    chosen = chosen.clamp(min=0)
    picked = logprobs.gather(-1, chosen[:, None])
    rank = (logprobs > picked).sum(-1) + 1
    values, ids = logprobs.topk(min(k, logprobs.shape[-1]), dim=-1)
    return TopLogprobs(chosen, picked[:, 0], rank, values, ids)
