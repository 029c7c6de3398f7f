"""The batch as every rank holds it: device tensors by row, changed only by plans and by steps.

A row is a running request. Rows are dense; a plan's `moves` keep them so. The device knows, for
each row, the last sampled id, the position that id will have when it is fed, and the block table;
a step advances them on the device, so the host never reads them back. The host mirrors only what
the plans themselves say: positions, prompt lengths, sampling parameters.

This module does not know the model, the sampler's mathematics or where plans come from.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from tp_runtime.errors import ProtocolError
from tp_runtime.messages import Chunk, NewRow, RowSampling, StepPlan
from tp_runtime.workers.host_copy import to_device
from tp_runtime.workers.row_parameters import RowParameters

_GREEDY = RowSampling(temperature=0.0, seed=0)


@dataclass
class HostRow:
    """What the host knows of a row."""

    sampling: RowSampling = _GREEDY
    prompt_len: int = 0
    position: int = 0
    """Position of the next token to feed: the number of tokens whose K and V are in the cache."""


@dataclass
class TokenCounts:
    """Per row and vocabulary id: occurs in the prompt, times generated. [rows, vocab]."""

    in_prompt: Tensor
    counts: Tensor


@dataclass
class BatchState:
    """`last_id`, `position` [max_rows] int64, `block_tables` [max_rows, max_blocks] int32."""

    max_rows: int
    max_blocks: int
    block_size: int
    vocab_size: int
    device: torch.device
    num_rows: int = 0
    rows: list[HostRow] = field(default_factory=list)
    token_counts: TokenCounts | None = None
    sampling_version: int = 0
    """Changes whenever any row's sampling parameters or place change; keys caches of them."""

    def __post_init__(self) -> None:
        self.rows = [HostRow() for _ in range(self.max_rows)]
        self.last_id = torch.zeros(self.max_rows, dtype=torch.int64, device=self.device)
        self.position = torch.zeros(self.max_rows, dtype=torch.int64, device=self.device)
        self.block_tables = torch.zeros(
            (self.max_rows, self.max_blocks), dtype=torch.int32, device=self.device
        )
        self.parameters = RowParameters(self.max_rows, self.device)

    # ------------------------------------------------------------ plans

    def apply(self, plan: StepPlan) -> None:
        """Moves, new rows, new blocks. Raises ProtocolError when the plan does not fit."""
        if plan.num_rows > self.max_rows:
            raise ProtocolError(f"The plan has {plan.num_rows} rows; this worker {self.max_rows}.")
        if plan.moves:
            self._move(plan.moves)
        for new in plan.new_rows:
            self._add(new)
        if plan.new_rows:
            self.parameters.add(plan.new_rows)
        if plan.new_rows or plan.moves:
            self.sampling_version += 1
        if plan.blocks:
            self._append_blocks(plan)
        if plan.grown:
            self._grow(plan.grown)
        self.num_rows = plan.num_rows

    def _move(self, moves: list[tuple[int, int]]) -> None:
        pairs = to_device(np.array(moves, dtype=np.int64).T, self.device)
        source, target = pairs[0], pairs[1]
        tensors = [self.last_id, self.position, self.block_tables]
        if self.token_counts is not None:
            tensors += [self.token_counts.in_prompt, self.token_counts.counts]
        for tensor in tensors:
            tensor[target] = tensor[source]
        self.parameters.move(source, target)
        moved = [self.rows[s] for s, _ in moves]
        for (_, t), row in zip(moves, moved, strict=True):
            self.rows[t] = row

    def _add(self, new: NewRow) -> None:
        # A fresh object: after moves two places may hold the same HostRow.
        self.rows[new.row] = HostRow(new.sampling, new.prompt_len)
        if new.sampling.has_penalties:
            self._count_history(new)

    def _count_history(self, new: NewRow) -> None:
        counts = self._ensure_counts()
        ids = to_device(np.frombuffer(new.history, dtype=np.int32).astype(np.int64), self.device)
        prompt, generated = ids[: new.prompt_len], ids[new.prompt_len :]
        counts.in_prompt[new.row] = False
        counts.in_prompt[new.row, prompt] = True
        counts.counts[new.row] = torch.bincount(generated, minlength=self.vocab_size)

    def _ensure_counts(self) -> TokenCounts:
        if self.token_counts is None:
            shape = (self.max_rows, self.vocab_size)
            self.token_counts = TokenCounts(
                torch.zeros(shape, dtype=torch.bool, device=self.device),
                torch.zeros(shape, dtype=torch.int32, device=self.device),
            )
        return self.token_counts

    def _append_blocks(self, plan: StepPlan) -> None:
        rows, columns, blocks = [], [], []
        for entry in plan.blocks:
            ids = np.frombuffer(entry.blocks, dtype=np.int32)
            if entry.first + len(ids) > self.max_blocks:
                raise ProtocolError(f"Row {entry.row} gets more than {self.max_blocks} blocks.")
            rows.append(np.full(len(ids), entry.row, dtype=np.int64))
            columns.append(np.arange(entry.first, entry.first + len(ids), dtype=np.int64))
            blocks.append(ids.astype(np.int64))
        packed = to_device(
            np.stack([np.concatenate(rows), np.concatenate(columns), np.concatenate(blocks)]),
            self.device,
        )
        self.block_tables[packed[0], packed[1]] = packed[2].to(torch.int32)

    def _grow(self, grown: bytes) -> None:
        """The entry is known to the device: that of the position the row feeds next."""
        pairs = np.frombuffer(grown, dtype=np.int32).reshape(-1, 2).T.astype(np.int64)
        rows, blocks = to_device(pairs, self.device)
        self.block_tables[rows, self.position[rows] // self.block_size] = blocks.to(torch.int32)

    # ------------------------------------------------------------ steps

    def slots(self, rows: Tensor, positions: Tensor) -> Tensor:
        """Cache slots [n] int64 of `positions` [n] in `rows` [n]."""
        block = self.block_tables[rows, positions // self.block_size].to(torch.int64)
        return block * self.block_size + positions % self.block_size

    def advance_decode(self, rows: Tensor, host_rows: list[int]) -> None:
        """Each of `rows` consumed one token."""
        self.position[rows] += 1
        for row in host_rows:
            self.rows[row].position += 1

    def advance_chunks(self, chunks: list[Chunk]) -> None:
        """Prefilled rows stand after their chunk."""
        if not chunks:
            return
        ends = [(c.row, c.start + len(c.token_ids) // 4) for c in chunks]
        packed = to_device(np.array(ends, dtype=np.int64).T, self.device)
        self.position[packed[0]] = packed[1]
        for row, end in ends:
            self.rows[row].position = end

    def record_sampled(self, rows: Tensor, ids: Tensor) -> None:
        """`ids` [n] were sampled for `rows` [n]; they are fed in each row's next decode step."""
        self.last_id[rows] = ids
        if self.token_counts is not None:
            counts = self.token_counts.counts
            counts.index_put_(
                (rows, ids.clamp(min=0)), torch.ones_like(rows, dtype=torch.int32), accumulate=True
            )

    def checksum(self) -> Tensor:
        """[num_rows] int64: a hash of last id, position and block table of each row."""
        n = self.num_rows
        weights = torch.arange(1, self.max_blocks + 1, device=self.device) * 2_654_435_761
        table = (self.block_tables[:n].to(torch.int64) * weights).sum(-1)
        return self.last_id[:n] * 1_000_003 + self.position[:n] * 7_919 + table
