"""Sampling without gathering the logits anywhere.

Greedy and temperature: each rank finds the best (value, id) of its own shard, with the Gumbel noise
of its own ids; 8 bytes per row and rank are exchanged and every rank takes the best of them.
Everything else: an all-to-all gives each rank rows / N whole rows, which it draws; the ids are
exchanged. Shapes depend on the number of rows alone. The ids equal `GatherSampler`'s bit for bit,
because the same float32 numbers are compared.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from tp_runtime.ops.embedding import ParallelLMHead
from tp_runtime.ops.group import TPGroup
from tp_runtime.ops.sampling.best import best_of_shard
from tp_runtime.ops.sampling.packed import unpack_id
from tp_runtime.ops.sampling.sampler import (
    Allowed,
    Entries,
    Penalties,
    SamplingBatch,
    SamplingClass,
    TopLogprobs,
    sample,
    top_logprobs,
)
from tp_runtime.workers.sampler import Drawn


class ShardedSampler:
    """See `workers.sampler.Sampler`."""

    name = "sharded"

    def __init__(self, group: TPGroup, lm_head: ParallelLMHead) -> None:
        self._group = group
        self._shard = lm_head.shard
        self._vocab = lm_head.vocab_size

    def draw(self, local: Tensor, batch: SamplingBatch, alternatives: int = -1) -> Drawn:
        if batch.kind != SamplingClass.FULL and alternatives < 0:
            return Drawn(self._draw_best(local, batch))
        return self._draw_rows(local, batch, alternatives)

    def score(self, local: Tensor, targets: Tensor, alternatives: int) -> TopLogprobs | None:
        rows = targets.shape[0]
        whole, first, last = self._exchange_rows(local)
        mine = _padded_slice(targets, first, last)
        return self._collect_top(top_logprobs(whole, mine, alternatives), rows)

    # ------------------------------------------------------------ (value, id) exchange

    def _draw_best(self, local: Tensor, batch: SamplingBatch) -> Tensor:
        return unpack_id(self.best(local, batch).amax(1))

    def best(self, local: Tensor, batch: SamplingBatch) -> Tensor:
        """Greedy and temperature only: [rows, pieces] int64 whose maximum names the id, the same on
        every rank (see `ops.sampling.best`)."""
        best = best_of_shard(local, self._shard.start, batch)
        if self._group.size == 1:
            return best
        return torch.stack(self._group.comm.all_gather(best.amax(1)), dim=1)

    # ------------------------------------------------------------ whole rows on every rank

    def _exchange_rows(self, local: Tensor) -> tuple[Tensor, int, int]:
        """Whole rows [rows of this rank, vocab] and the range of rows (the last may not exist)."""
        n, (rows, padded) = self._group.size, local.shape
        share = -(-rows // n)
        parts = local.new_zeros((n * share, padded))
        parts[:rows] = local
        out = torch.empty_like(parts)
        self._group.comm.all_to_all(out, parts)
        whole = out.view(n, share, padded).transpose(0, 1).reshape(share, n * padded)
        first = self._group.rank * share
        return whole[:, : self._vocab], first, first + share

    def _draw_rows(self, local: Tensor, batch: SamplingBatch, alternatives: int) -> Drawn:
        rows = local.shape[0]
        whole, first, last = self._exchange_rows(local)
        mine = slice_batch(batch, first, last)
        ids = sample(whole, mine)
        gathered = torch.cat(self._group.comm.all_gather(ids))[:rows]
        if alternatives < 0:
            return Drawn(gathered)
        return Drawn(gathered, self._collect_top(top_logprobs(whole, ids, alternatives), rows))

    def _collect_top(self, top: TopLogprobs, rows: int) -> TopLogprobs | None:
        floats = torch.cat([top.chosen[:, None], top.values], dim=1)
        ints = torch.cat([top.chosen_id[:, None], top.rank[:, None], top.ids], dim=1)
        all_floats = self._group.comm.gather(floats)
        all_ints = self._group.comm.gather(ints)
        if all_floats is None or all_ints is None:
            return None
        f, i = torch.cat(all_floats)[:rows], torch.cat(all_ints)[:rows]
        return TopLogprobs(i[:, 0], f[:, 0], i[:, 1], f[:, 1:], i[:, 2:])


def _padded_slice(tensor: Tensor, first: int, last: int) -> Tensor:
    """tensor[first:last] with the last row repeated where there are too few."""
    at = torch.arange(first, last, device=tensor.device).clamp(max=tensor.shape[0] - 1)
    return tensor[at]


def _cut_entries(entries: Entries | None, first: int, last: int) -> Entries | None:
    """Entries of other rows stay, with value 0, which changes nothing: the shape is fixed."""
    if entries is None:
        return None
    inside = (entries.rows >= first) & (entries.rows < last)
    rows = torch.where(inside, entries.rows - first, 0)
    return Entries(rows, entries.ids, torch.where(inside, entries.values, 0.0))


def _cut_allowed(allowed: Allowed | None, first: int, last: int) -> Allowed | None:
    """Entries of other rows stay and are off: the shape is fixed."""
    if allowed is None:
        return None
    on = allowed.on & (allowed.rows >= first) & (allowed.rows < last)
    return Allowed(torch.where(on, allowed.rows - first, 0), allowed.bits, on)


def slice_batch(batch: SamplingBatch, first: int, last: int) -> SamplingBatch:
    """Rows first .. last - 1 of a batch; rows past its end repeat the last one."""

    def cut(tensor: Tensor) -> Tensor:
        return _padded_slice(tensor, first, last)

    p = batch.penalties
    if p is not None:
        p = Penalties(
            cut(p.in_prompt), cut(p.counts), cut(p.repetition), cut(p.frequency), cut(p.presence)
        )
    return dataclasses.replace(
        batch,
        temperature=cut(batch.temperature),
        seed=cut(batch.seed),
        position=cut(batch.position),
        top_k=cut(batch.top_k),
        top_p=cut(batch.top_p),
        min_p=cut(batch.min_p),
        min_position=cut(batch.min_position),
        bias=_cut_entries(batch.bias, first, last),
        blocked=_cut_entries(batch.blocked, first, last),
        penalties=p,
        allowed=_cut_allowed(batch.allowed, first, last),
    )
