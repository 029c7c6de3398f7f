"""What the runner needs of a sampler: one draw for all ranks, and scores of given ids.

Two implementations: `GatherSampler` (rank 0 sees whole rows; the reference) and `ShardedSampler`
(no rank gathers the logits). Both give the same ids, token for token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from tp_runtime.ops.sampling.sampler import SamplingBatch, TopLogprobs


@dataclass
class Drawn:
    """`ids` [rows] int64 on every rank; `top` on rank 0 where it was asked for."""

    ids: Tensor
    top: TopLogprobs | None = None


class Sampler(Protocol):
    """Collective: every rank calls the same methods with the same rows, in the same order.

    `local` is this rank's shard of the logits, [rows, padded], padding -inf.
    `alternatives`: number of likeliest ids to report per row; -1: no logprobs at all."""

    @property
    def name(self) -> str: ...

    def draw(self, local: Tensor, batch: SamplingBatch, alternatives: int = -1) -> Drawn: ...

    def best(self, local: Tensor, batch: SamplingBatch) -> Tensor | None:
        """Greedy and temperature only: [rows, pieces] int64 whose maximum names the id, the same on
        every rank (see `ops.sampling.best`); None when the sampler has no such form."""
        ...

    def score(self, local: Tensor, targets: Tensor, alternatives: int) -> TopLogprobs | None:
        """Logprobs of `targets` [rows] int64; on rank 0 only."""
        ...
