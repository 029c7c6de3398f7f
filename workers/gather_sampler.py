"""Sampling on rank 0 from gathered logits: the plain path, and the reference of the faster ones.

Every rank projects its part of the vocabulary, rank 0 gathers the parts, draws, and broadcasts the
ids, so all ranks continue with the same token whatever their own rounding.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tp_runtime.ops.embedding import ParallelLMHead
from tp_runtime.ops.group import TPGroup
from tp_runtime.ops.sampling.sampler import SamplingBatch, sample


@dataclass
class Drawn:
    """`ids` [rows] int64 on every rank; `logits` [rows, vocab] float32 on rank 0 only."""

    ids: Tensor
    logits: Tensor | None


class GatherSampler:
    """Draws for all ranks at once; collective: every rank calls `draw` with the same rows."""

    name = "gather"

    def __init__(self, group: TPGroup, lm_head: ParallelLMHead) -> None:
        self._group = group
        self._lm_head = lm_head

    def gather(self, local_logits: Tensor) -> Tensor | None:
        """All columns [rows, vocab] on rank 0, None elsewhere; collective."""
        return self._lm_head.gather(local_logits)

    def draw(self, local_logits: Tensor, batch: SamplingBatch) -> Drawn:
        """`local_logits` [rows, padded shard of the vocabulary] float32."""
        logits = self.gather(local_logits)
        if logits is not None:
            ids = sample(logits, batch)
        else:
            ids = torch.empty_like(batch.position)
        if self._group.size > 1:
            self._group.comm.broadcast(ids)
        return Drawn(ids, logits)
