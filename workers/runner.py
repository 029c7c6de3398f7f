"""Runs one step plan on this rank: state delta, model, logits, draw, state advance.

The runner decides nothing: rows, chunks and sizes come from the plan. It never waits for the
device, but to record a graph; what the coordinator must see is returned as copies on their way to
the host.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tp_runtime.messages import Chunk, StepPlan
from tp_runtime.ops.attention.metadata import (
    AttentionMetadata,
    DecodeMetadata,
    LayerKV,
    PrefillMetadata,
)
from tp_runtime.ops.group import TPGroup
from tp_runtime.workers.batch_state import BatchState
from tp_runtime.workers.decode_graphs import RECORDED_CLASSES, DecodeGraphs
from tp_runtime.workers.host_copy import PendingCopy, to_device
from tp_runtime.workers.later_graphs import LaterGraphs
from tp_runtime.workers.logprobs import LogprobCollector, PendingLogprobs
from tp_runtime.workers.models.decoder import CausalLM
from tp_runtime.workers.prefill_graphs import PrefillGraphs
from tp_runtime.workers.sampler import Sampler
from tp_runtime.workers.sampling_rows import SamplingRows
from tp_runtime.workers.state_check import StateCheck


@dataclass
class StepInput:
    """Device form of a plan. Tokens are ordered: decode rows, then chunks."""

    ids: Tensor
    """[tokens] int64."""
    positions: Tensor
    """[tokens] int64."""
    slots: Tensor
    """[tokens] int64."""
    sample_at: Tensor
    """[sampled] int64: token indices whose logits are needed."""
    sample_rows: Tensor
    """[sampled] int64: the rows they belong to."""
    host_sample_rows: list[int]
    host_decode_rows: list[int]
    decode_rows: Tensor


@dataclass
class StepResult:
    """What rank 0 answers with; other ranks have `ids` too and ignore it."""

    plan: StepPlan
    ids: PendingCopy
    logprobs: PendingLogprobs | None
    check: StateCheck | None = None

    def ready(self) -> bool:
        """Never blocks."""
        parts = (self.ids, self.logprobs, self.check)
        return all(part is None or part.ready() for part in parts)


class Runner:
    """Owns nothing but references: model, KV cache, batch state, sampler."""

    def __init__(
        self,
        model: CausalLM,
        kv: list[LayerKV],
        state: BatchState,
        sampler: Sampler,
        group: TPGroup,
        graphs: DecodeGraphs | None = None,
        prefill_graphs: PrefillGraphs | None = None,
        later_graphs: LaterGraphs | None = None,
    ) -> None:
        self.group = group
        self.graphs = graphs
        self.prefill_graphs = prefill_graphs
        self.later_graphs = later_graphs
        self.model = model
        self.kv = kv
        self.state = state
        self.sampler = sampler
        self.sampling = SamplingRows(state)
        self.logprobs = LogprobCollector(state, model, sampler)
        self.applied_at = 0
        """When the batch state followed the last plan, nanoseconds; for traces."""
        self._host_rows = list(range(state.max_rows))
        self._arange = torch.arange(state.max_rows, device=state.device)

    @torch.inference_mode()
    def step(self, plan: StepPlan) -> StepResult:
        """Applies and launches the plan; collective. Raises ProtocolError when it does not fit."""
        self.state.apply(plan)
        self.applied_at = time.monotonic_ns()
        if plan.records_graph and self.later_graphs is not None:
            self.later_graphs.record_next()
        if not plan.chunks and not plan.num_decode:
            return StepResult(plan, PendingCopy(self.state.last_id[:0].to(torch.int32)), None)
        graphs = self.graphs
        if plan.padded and graphs is not None and (size := graphs.fitting(plan.padded)):
            return self._replay(plan, graphs, size)
        step = self._prepare(plan)
        hidden = self._hidden(plan, step)
        self.state.advance_decode(step.decode_rows, step.host_decode_rows)
        self.state.advance_chunks(plan.chunks)
        return self._finish(plan, step, hidden)

    def _hidden(self, plan: StepPlan, step: StepInput) -> Tensor:
        """Of all tokens of the step, [tokens, hidden]."""
        rows, graphs = len(step.host_decode_rows), self.prefill_graphs
        if graphs is not None and plan.chunks:
            room = graphs.fitting(rows, plan.chunks)
            if room is not None:
                return graphs.run(
                    room, step.ids, step.positions, step.slots, step.decode_rows, plan.chunks
                )
        metadata = AttentionMetadata(
            slot_mapping=step.slots,
            decode=self._decode_metadata(
                step.decode_rows, step.host_decode_rows, step.positions[:rows]
            ),
            prefill=self._prefill_metadata(plan.chunks),
        )
        hidden: Tensor = self.model(step.ids, step.positions, self.kv, metadata)
        return hidden

    def _replay(self, plan: StepPlan, graphs: DecodeGraphs, size: int) -> StepResult:
        """A pure decode step of the first rows."""
        n, state = plan.num_decode, self.state
        rows, host_rows = self._arange[:n], self._host_rows[:n]
        graphs.run_model(size, n)
        for row in host_rows:
            state.rows[row].position += 1
        kind = self.sampling.kind(host_rows)
        alternatives = self.logprobs.alternatives(host_rows)
        if kind in RECORDED_CLASSES and alternatives < 0 and not plan.masks:
            ids = graphs.run_sampler(size, kind)[:n]
            return self._result(plan, ids, None)
        position = graphs.buffers.input.drawn_position[:n]
        batch = self.sampling.batch(rows, host_rows, position, plan.masks)
        drawn = self.sampler.draw(graphs.logits(size)[:n], batch, alternatives)
        state.record_sampled(rows, drawn.ids)
        logprobs = self.logprobs.collect(plan, host_rows, drawn, hidden=drawn.ids)
        return self._result(plan, drawn.ids.to(torch.int32), logprobs)

    def _result(self, plan: StepPlan, ids: Tensor, logprobs: PendingLogprobs | None) -> StepResult:
        check = StateCheck(self.state, self.group, plan.step) if plan.check else None
        return StepResult(plan, PendingCopy(ids), logprobs, check)

    def _finish(self, plan: StepPlan, step: StepInput, hidden: Tensor) -> StepResult:
        state = self.state
        positions = step.positions[step.sample_at] + 1
        batch = self.sampling.batch(step.sample_rows, step.host_sample_rows, positions, plan.masks)
        logits = self.model.compute_logits(hidden[step.sample_at])
        alternatives = self.logprobs.alternatives(step.host_sample_rows)
        drawn = self.sampler.draw(logits, batch, alternatives)
        state.record_sampled(step.sample_rows, drawn.ids)
        logprobs = self.logprobs.collect(plan, step.host_sample_rows, drawn, hidden)
        return self._result(plan, drawn.ids.to(torch.int32), logprobs)

    # ------------------------------------------------------------ plan -> device

    def _prepare(self, plan: StepPlan) -> StepInput:
        decode, host_decode = self._decode_rows(plan)
        decode_ids = self.state.last_id[decode].clamp(min=0)
        decode_positions = self.state.position[decode]
        chunk_ids, chunk_rows, chunk_positions = self._chunk_tokens(plan.chunks)
        rows = torch.cat([decode, chunk_rows])
        positions = torch.cat([decode_positions, chunk_positions])
        sampled = _sampled_tokens(plan.chunks, len(host_decode))
        host_sample = host_decode + [row for row, _ in sampled]
        at = to_device(
            np.array(
                list(range(len(host_decode))) + [index for _, index in sampled], dtype=np.int64
            ),
            self.state.device,
        )
        return StepInput(
            ids=torch.cat([decode_ids, chunk_ids]),
            positions=positions,
            slots=self.state.slots(rows, positions),
            sample_at=at,
            sample_rows=rows[at],
            host_sample_rows=host_sample,
            host_decode_rows=host_decode,
            decode_rows=decode,
        )

    def _decode_rows(self, plan: StepPlan) -> tuple[Tensor, list[int]]:
        if plan.decode_rows is None:
            return self._arange[: plan.num_rows], self._host_rows[: plan.num_rows]
        rows = np.frombuffer(plan.decode_rows, dtype=np.int32)
        return to_device(rows.astype(np.int64), self.state.device), rows.tolist()

    def _chunk_tokens(self, chunks: list[Chunk]) -> tuple[Tensor, Tensor, Tensor]:
        """Ids, rows and positions [tokens] int64 of all chunks, in one copy."""
        parts = []
        for chunk in chunks:
            ids = np.frombuffer(chunk.token_ids, dtype=np.int32)
            part = np.empty((3, len(ids)), dtype=np.int64)
            part[0] = ids
            part[1] = chunk.row
            part[2] = np.arange(chunk.start, chunk.start + len(ids))
            parts.append(part)
        packed = np.concatenate(parts, axis=1) if parts else np.empty((3, 0), dtype=np.int64)
        tensor = to_device(packed, self.state.device)
        return tensor[0], tensor[1], tensor[2]

    def _decode_metadata(
        self, rows: Tensor, host_rows: list[int], positions: Tensor
    ) -> DecodeMetadata | None:
        if not host_rows:
            return None
        longest = max(self.state.rows[r].position for r in host_rows) + 1
        return DecodeMetadata(
            context_lens=(positions + 1).to(torch.int32),
            block_tables=self.state.block_tables[rows, : self._blocks_of(longest)],
        )

    def _prefill_metadata(self, chunks: list[Chunk]) -> PrefillMetadata | None:
        if not chunks:
            return None
        lengths = np.array([len(c.token_ids) // 4 for c in chunks], dtype=np.int32)
        contexts = np.array([c.start for c in chunks], dtype=np.int32) + lengths
        cu = np.zeros(len(chunks) + 1, dtype=np.int32)
        np.cumsum(lengths, out=cu[1:])
        tables = None
        longest = int(contexts.max())
        if any(c.start for c in chunks):
            rows = to_device(np.array([c.row for c in chunks], dtype=np.int64), self.state.device)
            tables = self.state.block_tables[rows, : self._blocks_of(longest)]
        return PrefillMetadata(
            cu_seqlens_q=to_device(cu, self.state.device),
            context_lens=to_device(contexts, self.state.device),
            block_tables=tables,
            max_seqlen_q=int(lengths.max()),
            max_seqlen_k=longest,
        )

    def _blocks_of(self, tokens: int) -> int:
        return -(-tokens // self.state.block_size)


def _sampled_tokens(chunks: list[Chunk], first: int) -> list[tuple[int, int]]:
    """(row, token index) of the last token of each chunk that samples."""
    found, at = [], first
    for chunk in chunks:
        at += len(chunk.token_ids) // 4
        if chunk.sample:
            found.append((chunk.row, at - 1))
    return found
