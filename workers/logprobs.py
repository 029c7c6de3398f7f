"""Log-probabilities asked for by rows of a step, computed beside the draw on rank 0.

Generated tokens: of the gathered logits the draw was made from, before any transformation. Prompt
tokens: logits of every position of the chunk, in slices, so that memory stays bounded.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn

from tp_runtime.messages import Chunk, Logprob, RowLogprobs, StepPlan, TokenLogprobs
from tp_runtime.ops.sampling.sampler import top_logprobs
from tp_runtime.workers.batch_state import BatchState
from tp_runtime.workers.gather_sampler import Drawn, GatherSampler
from tp_runtime.workers.host_copy import PendingCopy, to_device

PROMPT_SLICE = 256
"""Prompt positions projected to the vocabulary at a time (256 x 151,936 x 4 B = 156 MB)."""


class PendingTop:
    """`top_logprobs` of some rows, on its way to the host."""

    def __init__(self, logits: Tensor, chosen: Tensor, k: int) -> None:
        logprob, rank, values, ids = top_logprobs(logits, chosen, k)
        floats = torch.cat([logprob[:, None], values], dim=1)
        ints = torch.cat([chosen[:, None], rank[:, None], ids], dim=1)
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
    """`generated[j]` belongs to sampled entry `entries[j]`; `prompts` maps a chunk's index in the
    plan to its slices."""

    entries: list[int] = field(default_factory=list)
    wanted: list[int] = field(default_factory=list)
    generated: PendingTop | None = None
    prompts: list[tuple[int, int, list[PendingTop]]] = field(default_factory=list)
    """(entry or -1 - chunk index when the chunk samples nothing, alternatives, slices)."""

    def ready(self) -> bool:
        tops = [t for _, _, slices in self.prompts for t in slices]
        if self.generated is not None:
            tops.append(self.generated)
        return all(t.ready() for t in tops)

    def collect(self) -> list[RowLogprobs]:
        """Waits for the copies; entries in rising order of `i`."""
        found: dict[int, RowLogprobs] = {}
        if self.generated is not None:
            rows = self.generated.rows()
            for i, k, row in zip(self.entries, self.wanted, rows, strict=True):
                found[i] = RowLogprobs(i, row.chosen, row.top[:k])
        for i, k, slices in self.prompts:
            entry = found.setdefault(i, RowLogprobs(i, None, []))
            for top in slices:
                entry.prompt += [TokenLogprobs(t.chosen, t.top[:k]) for t in top.rows()]
        return [found[i] for i in sorted(found)]


def collect_logprobs(
    plan: StepPlan,
    host_sample_rows: list[int],
    state: BatchState,
    drawn: Drawn,
    hidden: Tensor,
    model: nn.Module,
    sampler: GatherSampler,
) -> PendingLogprobs | None:
    """Collective where a chunk wants prompt logprobs (its logits are gathered): the decision
    depends on the plan alone, so every rank takes the same branch. Off rank 0 the result holds
    nothing. None when no row asks."""
    params = [state.rows[r].sampling for r in host_sample_rows]
    entries = [i for i, s in enumerate(params) if s.logprobs >= 0]
    chunk_wants = any(state.rows[c.row].sampling.prompt_logprobs >= 0 for c in plan.chunks)
    if not entries and not chunk_wants:
        return None
    pending = PendingLogprobs()
    if entries and drawn.logits is not None:
        at = to_device(np.array(entries, dtype=np.int64), state.device)
        pending.entries, pending.wanted = entries, [params[i].logprobs for i in entries]
        most = max(pending.wanted)
        pending.generated = PendingTop(drawn.logits[at], drawn.ids[at], most)
    if chunk_wants:
        _collect_prompts(plan, host_sample_rows, state, hidden, model, sampler, pending)
    return pending


def _collect_prompts(
    plan: StepPlan,
    host_sample_rows: list[int],
    state: BatchState,
    hidden: Tensor,
    model: nn.Module,
    sampler: GatherSampler,
    pending: PendingLogprobs,
) -> None:
    sampling_chunks = sum(c.sample for c in plan.chunks)
    entry = len(host_sample_rows) - sampling_chunks
    at = hidden.shape[0] - sum(len(c.token_ids) // 4 for c in plan.chunks)
    for index, chunk in enumerate(plan.chunks):
        length = len(chunk.token_ids) // 4
        k = state.rows[chunk.row].sampling.prompt_logprobs
        key = entry if chunk.sample else -1 - index
        if k >= 0:
            tops = _prompt_slices(chunk, hidden[at : at + length], k, model, sampler)
            pending.prompts.append((key, k, tops))
        at += length
        entry += chunk.sample


def _prompt_slices(
    chunk: Chunk, hidden: Tensor, k: int, model: nn.Module, sampler: GatherSampler
) -> list[PendingTop]:
    """The last position of a chunk predicts a token the chunk does not hold: `next_id`, which is
    empty on the last chunk of the prompt (that position predicts the sampled token)."""
    ids = np.frombuffer(chunk.token_ids, dtype=np.int32).astype(np.int64)
    nexts = np.concatenate([ids[1:], np.frombuffer(chunk.next_id, dtype=np.int32)])
    targets = to_device(nexts, hidden.device)
    tops = []
    for start in range(0, len(nexts), PROMPT_SLICE):
        part = hidden[start : min(start + PROMPT_SLICE, len(nexts))]
        logits = sampler.gather(model.compute_logits(part))
        if logits is not None:
            tops.append(PendingTop(logits, targets[start : start + len(part)], k))
    return tops
