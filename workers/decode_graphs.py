"""Pure decode steps as two replays: a model graph by padded size, then a sampler graph by class.

A step of n rows runs the graph of the next larger size that is recorded. Rows n and up are padding:
their slot is -1, their context is empty, nothing of them is stored. The number of rows is a device
word, so one graph serves every n up to its size. The graphs read the batch state (last ids,
positions, tables, sampling parameters) and advance it; the host writes no value between two steps.

Sampling that needs the host's knowledge (truncation, penalties, bias, logprobs) draws from the
model graph's logits without a sampler graph.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from tp_runtime.ops.attention.metadata import AttentionMetadata, DecodeMetadata, LayerKV
from tp_runtime.ops.decode_step import DecodeInput, begin_decode, end_decode
from tp_runtime.ops.sampling.sampler import SamplingBatch, SamplingClass
from tp_runtime.workers.batch_state import BatchState
from tp_runtime.workers.later_graphs import LaterGraph
from tp_runtime.workers.models.decoder import CausalLM
from tp_runtime.workers.recorded import Recorded
from tp_runtime.workers.sampler import Sampler

DEFAULT_SIZES = (1, 2, 4, 8, 16, 24, *range(32, 256, 16), *range(256, 513, 32))
FIRST_SIZES = (1, 4, 16, 64, 256)
"""Recorded before the worker is ready, with the largest; the others after that, one at a time. Each
takes 0.04 to 0.13 s (8B on one and two H200)."""
RECORDED_CLASSES = (SamplingClass.GREEDY, SamplingClass.GUMBEL)


def graph_sizes(max_rows: int) -> tuple[int, ...]:
    """Sizes worth a graph for batches of up to `max_rows`; the last one holds them all."""
    below = [size for size in DEFAULT_SIZES if size < max_rows]
    return (*below, max_rows) if max_rows <= DEFAULT_SIZES[-1] else DEFAULT_SIZES


def first_sizes(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Those of `sizes` that a worker cannot be ready without, largest first: the smaller graphs
    reuse its memory."""
    return tuple(size for size in reversed(sizes) if size in FIRST_SIZES or size == sizes[-1])


@dataclass
class _Buffers:
    """What the replays hand on; one set for all sizes, the leading rows are used."""

    num_rows: Tensor
    """[1] int64: rows that are no padding."""
    input: DecodeInput
    ids: Tensor
    """[largest size] int32: what is answered."""


class DecodeGraphs:
    """`record` each size, the largest first; `run_model` and `run_sampler` per step; `release`
    before the end. `sizes` rise."""

    def __init__(
        self,
        model: CausalLM,
        kv: list[LayerKV],
        state: BatchState,
        sampler: Sampler,
        sizes: tuple[int, ...],
    ) -> None:
        self.sizes = sizes
        self._model, self._kv, self._state, self._sampler = model, kv, state, sampler
        device, largest = state.device, max(sizes)
        self._arange = torch.arange(largest, device=device)
        self.buffers = _Buffers(
            num_rows=torch.zeros(1, dtype=torch.int64, device=device),
            input=DecodeInput.empty(largest, device),
            ids=torch.zeros(largest, dtype=torch.int32, device=device),
        )
        self._logits: dict[int, Tensor] = {}
        self._models: dict[int, Recorded] = {}
        self._samplers: dict[tuple[int, SamplingClass], Recorded] = {}
        self._missed: Counter[int] = Counter()
        self._pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None

    @torch.inference_mode()
    def record(self, size: int) -> None:
        """Collective; requests may be running. Whatever runs while it records is padding."""
        self.buffers.num_rows.zero_()
        model = self._recorded(partial(self._model_step, size))
        for kind in RECORDED_CLASSES:
            self._samplers[size, kind] = self._recorded(partial(self._sample_step, size, kind))
        self._models[size] = model

    def _recorded(self, work: Callable[[], None]) -> Recorded:
        return Recorded(work, self._state.device, self._pool)

    def later(self) -> list[LaterGraph]:
        """Of the sizes that are not recorded yet."""
        left = [size for size in self.sizes if size not in self._models]
        return [
            LaterGraph(
                partial(self.record, n),
                partial(self._forget, n),
                partial(self._missed.__getitem__, n),
            )
            for n in left
        ]

    def _forget(self, size: int) -> None:
        self._models.pop(size, None)
        self._logits.pop(size, None)
        for kind in RECORDED_CLASSES:
            self._samplers.pop((size, kind), None)

    def fitting(self, size: int) -> int:
        """The smallest recorded size of at least `size`, for a step; 0: none."""
        if size in self._models:
            return size
        self._missed[size] += 1
        return min((recorded for recorded in self._models if recorded >= size), default=0)

    def run_model(self, size: int, num_rows: int) -> None:
        """One decode step of rows 0 .. num_rows - 1: cache, positions and logits."""
        self.buffers.num_rows.fill_(num_rows)
        self._models[size].replay()

    def logits(self, size: int) -> Tensor:
        """Of the last replay of this size: [size, padded shard], as the head gives them."""
        return self._logits[size]

    def run_sampler(self, size: int, kind: SamplingClass) -> Tensor:
        """Draws from the logits; ids [size] int32, overwritten by the next step."""
        self._samplers[size, kind].replay()
        return self.buffers.ids[:size]

    def release(self) -> None:
        for recorded in (*self._samplers.values(), *self._models.values()):
            recorded.release()
        self._models.clear()
        self._logits.clear()
        self._samplers.clear()

    # ------------------------------------------------------------ what is recorded

    def _model_step(self, n: int) -> None:
        state, step = self._state, self.buffers.input.first(n)
        begin_decode(
            self.buffers.num_rows,
            state.last_id,
            state.position,
            state.block_tables,
            state.block_size,
            step,
        )
        meta = AttentionMetadata(
            slot_mapping=step.slots,
            decode=DecodeMetadata(
                context_lens=step.context_lens,
                block_tables=state.block_tables[:n],
            ),
        )
        hidden = self._model(step.ids, step.positions, self._kv, meta)
        self._logits[n] = self._model.compute_logits(hidden)

    def _sample_step(self, n: int, kind: SamplingClass) -> None:
        state, parameters = self._state, self._state.parameters
        batch = SamplingBatch(
            kind=kind,
            temperature=parameters.floats[0, :n],
            top_p=parameters.floats[1, :n],
            min_p=parameters.floats[2, :n],
            seed=parameters.ints[0, :n],
            top_k=parameters.ints[1, :n],
            min_position=parameters.ints[2, :n],
            position=self.buffers.input.drawn_position[:n],
        )
        logits, num_rows, ids = self._logits[n], self.buffers.num_rows, self.buffers.ids[:n]
        best = self._sampler.best(logits, batch)
        if best is not None:
            end_decode(best, num_rows, state.last_id, ids)
            return
        drawn = self._sampler.draw(logits, batch).ids
        active = self._arange[:n] < num_rows
        state.last_id[:n] = torch.where(active, drawn, state.last_id[:n])
        ids.copy_(drawn)
