"""What changes logits before the draw, as one function per parameter, all rows at once.

Order (documented in `sampler.sample`): allowed ids, logit bias, blocked ids (min_tokens),
repetition penalty, frequency and presence penalty; then temperature, min-p, top-k, top-p. Every
function takes and returns [rows, vocab] float32; parameters are [rows] tensors. A row whose
parameter is neutral is left bit for bit as it was.
"""

from __future__ import annotations

import torch
from torch import Tensor

NEG_INF = float("-inf")


def allow_only(logits: Tensor, rows: Tensor, bits: Tensor, on: Tensor) -> Tensor:
    """Adds -inf where `bits` [k, bytes] uint8 (one bit per id, the lowest first; ids past the end
    count as 0) has a 0, for each of `rows` [k] whose `on` [k] is true; the rows may repeat where it
    is not. What is not finite stays so."""
    shifts = torch.arange(8, device=bits.device, dtype=torch.uint8)
    allowed = ((bits[:, :, None] >> shifts) & 1).flatten(1)[:, : logits.shape[-1]].bool()
    missing = logits.shape[-1] - allowed.shape[-1]
    allowed = torch.nn.functional.pad(allowed, (0, missing), value=False)
    added = torch.where(allowed | ~on[:, None], 0.0, NEG_INF)
    return logits.index_add(0, rows, added)


def add_bias(logits: Tensor, rows: Tensor, ids: Tensor, values: Tensor) -> Tensor:
    """Adds `values` [k] at (`rows` [k], `ids` [k]), pairs without repetition."""
    return logits.index_put((rows, ids), values, accumulate=True)


def block_ids(
    logits: Tensor,
    rows: Tensor,
    ids: Tensor,
    values: Tensor,
    min_position: Tensor,
    position: Tensor,
) -> Tensor:
    """Adds `values` [k] (-inf, or 0 for an entry that is off) at (`rows` [k], `ids` [k]) while
    `position[row]` < `min_position[row]`."""
    blocked = (position < min_position)[rows]
    return add_bias(logits, rows, ids, torch.where(blocked, values, 0.0))


def penalize(
    logits: Tensor,
    in_prompt: Tensor,
    counts: Tensor,
    repetition: Tensor,
    frequency: Tensor,
    presence: Tensor,
) -> Tensor:
    """Repetition (CTRL, Keskar et al. 2019): ids seen in prompt or output are divided by the
    penalty when positive, multiplied when negative. Frequency and presence (OpenAI API): minus
    penalty x count, minus penalty once, over generated ids.

    `in_prompt` [rows, vocab] bool, `counts` [rows, vocab] integer counts of generated ids."""
    seen = in_prompt | (counts > 0)
    factor = torch.where(seen, repetition[:, None], 1.0)
    logits = torch.where(logits > 0, logits / factor, logits * factor)
    logits = logits - frequency[:, None] * counts
    return logits - presence[:, None] * (counts > 0)


def apply_min_p(logits: Tensor, min_p: Tensor) -> Tensor:
    """Keeps ids with probability >= min_p x the largest probability (Nguyen et al., 2024)."""
    threshold = logits.amax(-1, keepdim=True) + torch.log(min_p)[:, None]
    return torch.where(logits < threshold, NEG_INF, logits)


def apply_top_k_top_p(logits: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Keeps the `top_k` most likely ids (0: all), then of those the smallest set whose probability,
    renormalised over the kept ones, reaches `top_p` (Holtzman et al., 2020). Of equal logits the
    lower id is the more likely one, so exactly top_k ids stay."""
    vocab = logits.shape[-1]
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    k = torch.where(top_k <= 0, vocab, top_k.clamp(max=vocab))
    column = torch.arange(vocab, device=logits.device)
    ordered = torch.where(column[None, :] >= k[:, None], NEG_INF, ordered)
    probabilities = ordered.softmax(-1)
    before = probabilities.cumsum(-1) - probabilities
    cut = (before >= top_p[:, None]) & (top_p < 1.0)[:, None]
    cut[:, 0] = False
    ordered = torch.where(cut, NEG_INF, ordered)
    return torch.empty_like(logits).scatter_(-1, order, ordered)
