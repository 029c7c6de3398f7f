"""Log-probabilities asked for by rows of a step, computed beside the draw on rank 0.

Generated tokens: of the logits the draw was made from, before any transformation. Prompt tokens:
logits of every position of the chunk, in slices, so that memory stays bounded.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from tp_runtime.messages import Chunk, Logprob, RowLogprobs, StepPlan, TokenLogprobs
from tp_runtime.ops.sampling.sampler import TopLogprobs
from tp_runtime.workers.batch_state import BatchState
from tp_runtime.workers.host_copy import PendingCopy, to_device
from tp_runtime.workers.models.decoder import CausalLM
from tp_runtime.workers.sampler import Drawn, Sampler

PROMPT_SLICE = 256
"""Prompt positions projected to the vocabulary at a time (256 x 151,936 x 4 B = 156 MB)."""


class PendingTop:
    """`TopLogprobs` of some rows, on its way to the host."""

    def __init__(self, top: TopLogprobs) -> None:
        floats = torch.cat([top.chosen[:, None], top.values], dim=1)
        ints = torch.cat([top.chosen_id[:, None], top.rank[:, None], top.ids], dim=1)
        self._floats, self._ints = PendingCopy(floats), PendingCopy(ints)

    def ready(self) -> bool:
        return self._floats.ready() and self._ints.ready()

    def rows(self) -> list[TokenLogprobs]:
        """Waits for the copies."""
        floats, ints = self._floats.wait().tolist(), self._ints.wait().tolist()
        return [
            TokenLogprobs(
                Logprob(i[0], f[0], i[1]),
                [Logprob(i[2 + j], f[1 + j], j + 1) for j in range(len(f) - 1)],
            )
            for f, i in zip(floats, ints, strict=True)
        ]


@dataclass
class PendingLogprobs:
    """What rank 0 will answer with. `generated` has one row per sampled entry, of which those in
    `wanted` (entry, alternatives) are reported. `prompts` holds, per chunk with prompt logprobs,
    (entry, alternatives, slices), where the entry of chunk c is -1 - c when it samples nothing."""

    wanted: list[tuple[int, int]] = field(default_factory=list)
    generated: PendingTop | None = None
    prompts: list[tuple[int, int, list[PendingTop]]] = field(default_factory=list)

    def ready(self) -> bool:
        """Never blocks."""
        tops = [t for _, _, slices in self.prompts for t in slices]
        if self.generated is not None:
            tops.append(self.generated)
        return all(t.ready() for t in tops)

    def collect(self) -> list[RowLogprobs]:
        """Waits for the copies; entries in rising order of `i`."""
        found: dict[int, RowLogprobs] = {}
        if self.generated is not None:
            rows = self.generated.rows()
            for i, k in self.wanted:
                found[i] = RowLogprobs(i, rows[i].chosen, rows[i].top[:k])
        for i, k, slices in self.prompts:
            entry = found.setdefault(i, RowLogprobs(i, None, []))
            for top in slices:
                entry.prompt += [TokenLogprobs(t.chosen, t.top[:k]) for t in top.rows()]
        return [found[i] for i in sorted(found)]


class LogprobCollector:
    """Collective where a chunk wants prompt logprobs: what is done follows from the plan and the
    batch state alone, so every rank does the same."""

    def __init__(self, state: BatchState, model: CausalLM, sampler: Sampler) -> None:
        self._state = state
        self._model = model
        self._sampler = sampler

    def alternatives(self, host_rows: list[int]) -> int:
        """The most alternatives any of the sampled rows asks for; -1: none asks for logprobs."""
        return max((self._state.rows[r].sampling.logprobs for r in host_rows), default=-1)

    def collect(
        self, plan: StepPlan, host_rows: list[int], drawn: Drawn, hidden: Tensor
    ) -> PendingLogprobs | None:
        """`hidden` [tokens, hidden] of the whole step; None when no row of the step asks."""
        params = [self._state.rows[r].sampling for r in host_rows]
        pending = PendingLogprobs(
            [(i, s.logprobs) for i, s in enumerate(params) if s.logprobs >= 0]
        )
        if drawn.top is not None:
            pending.generated = PendingTop(drawn.top)
        self._collect_prompts(plan, len(host_rows), hidden, pending)
        return pending if pending.wanted or pending.prompts else None

    def _collect_prompts(
        self, plan: StepPlan, num_sampled: int, hidden: Tensor, pending: PendingLogprobs
    ) -> None:
        entry = num_sampled - sum(c.sample for c in plan.chunks)
        at = hidden.shape[0] - sum(len(c.token_ids) // 4 for c in plan.chunks)
        for index, chunk in enumerate(plan.chunks):
            length = len(chunk.token_ids) // 4
            k = self._state.rows[chunk.row].sampling.prompt_logprobs
            if k >= 0:
                slices = self._prompt_slices(chunk, hidden[at : at + length], k)
                pending.prompts.append((entry if chunk.sample else -1 - index, k, slices))
            at += length
            entry += chunk.sample

    def _prompt_slices(self, chunk: Chunk, hidden: Tensor, k: int) -> list[PendingTop]:
        """The last position of a chunk predicts a token the chunk does not hold: `next_id`, which
        is empty on the last chunk of the prompt (that position predicts the sampled token)."""
        ids = np.frombuffer(chunk.token_ids + chunk.next_id, dtype=np.int32)[1:].astype(np.int64)
        targets = to_device(ids, hidden.device)
        tops = []
        for start in range(0, len(ids), PROMPT_SLICE):
            part = targets[start : start + PROMPT_SLICE]
            local = self._model.compute_logits(hidden[start : start + len(part)])
            if (top := self._sampler.score(local, part, k)) is not None:
                tops.append(PendingTop(top))
        return tops
