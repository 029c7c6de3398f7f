"""Sampling on rank 0 from gathered logits: the plain path, and the reference of the faster one.

Every rank projects its part of the vocabulary, rank 0 gathers the parts, draws, and broadcasts the
ids, so all ranks continue with the same token whatever their own rounding.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tp_runtime.ops.embedding import ParallelLMHead
from tp_runtime.ops.group import TPGroup
from tp_runtime.ops.sampling.sampler import SamplingBatch, TopLogprobs, sample, top_logprobs
from tp_runtime.workers.sampler import Drawn


class GatherSampler:
    """See `workers.sampler.Sampler`."""

    name = "gather"

    def __init__(self, group: TPGroup, lm_head: ParallelLMHead) -> None:
        self._group = group
        self._lm_head = lm_head

    def draw(self, local: Tensor, batch: SamplingBatch, alternatives: int = -1) -> Drawn:
        logits = self._lm_head.gather(local)
        if logits is None:
            return Drawn(self._group.comm.broadcast(torch.empty_like(batch.position)))
        ids = sample(logits, batch)
        self._group.comm.broadcast(ids)
        top = top_logprobs(logits, ids, alternatives) if alternatives >= 0 else None
        return Drawn(ids, top)

    def best(self, local: Tensor, batch: SamplingBatch) -> Tensor | None:
        return None

    def score(self, local: Tensor, targets: Tensor, alternatives: int) -> TopLogprobs | None:
        logits = self._lm_head.gather(local)
        return None if logits is None else top_logprobs(logits, targets, alternatives)
