"""A decode step's bookkeeping on the device: from batch state to model input, from draw to state.

Both functions write to tensors that are given, so that they can be recorded in a graph.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tp_runtime.ops.sampling.packed import unpack_id


@dataclass
class DecodeInput:
    """Of `n` rows. ids, positions, drawn_position (of the token to be drawn), slots: [n] int64;
    context_lens: [n] int32, 0 for padding."""

    ids: Tensor
    positions: Tensor
    drawn_position: Tensor
    slots: Tensor
    context_lens: Tensor

    @classmethod
    def empty(cls, n: int, device: torch.device) -> DecodeInput:
        ids, positions, drawn, slots = (
            torch.zeros(n, dtype=torch.int64, device=device) for _ in range(4)
        )
        context = torch.zeros(n, dtype=torch.int32, device=device)
        return cls(ids, positions, drawn, slots, context)

    def first(self, n: int) -> DecodeInput:
        """Views of the first n rows."""
        return DecodeInput(
            self.ids[:n],
            self.positions[:n],
            self.drawn_position[:n],
            self.slots[:n],
            self.context_lens[:n],
        )


def begin_decode_reference(
    num_rows: Tensor,
    last_id: Tensor,
    position: Tensor,
    block_tables: Tensor,
    block_size: int,
    out: DecodeInput,
) -> None:
    """Fills `out` from the state of its first rows and moves `position` on by one.

    num_rows [1] int64: rows from there on are padding. last_id, position [rows] int64,
    block_tables [rows, blocks] int32."""
    n = out.ids.shape[0]
    rows = torch.arange(n, device=num_rows.device)
    active = rows < num_rows
    positions = torch.where(active, position[:n], 0)
    block = block_tables[rows, positions // block_size].to(torch.int64)
    out.ids.copy_(torch.where(active, last_id[:n].clamp(min=0), 0))
    out.positions.copy_(positions)
    out.drawn_position.copy_(positions + 1)
    out.slots.copy_(torch.where(active, block * block_size + positions % block_size, -1))
    out.context_lens.copy_(torch.where(active, positions + 1, 0))
    position[:n] += active


def begin_decode(
    num_rows: Tensor,
    last_id: Tensor,
    position: Tensor,
    block_tables: Tensor,
    block_size: int,
    out: DecodeInput,
) -> None:
    """As `begin_decode_reference`; on CUDA by one kernel."""
    if not num_rows.is_cuda:
        begin_decode_reference(num_rows, last_id, position, block_tables, block_size, out)
        return
    from tp_runtime.ops.kernels import decode_step as kernels  # triton: CUDA only

    kernels.begin_decode(
        num_rows,
        last_id,
        position,
        block_tables,
        block_size,
        out.ids,
        out.positions,
        out.drawn_position,
        out.slots,
        out.context_lens,
    )


def end_decode_reference(best: Tensor, num_rows: Tensor, last_id: Tensor, ids: Tensor) -> None:
    """best [n, pieces] int64 (see `ops.sampling.best`) -> ids [n] int32, and last_id of rows that
    are no padding."""
    n = best.shape[0]
    drawn = unpack_id(best.amax(1))
    active = torch.arange(n, device=best.device) < num_rows
    last_id[:n] = torch.where(active, drawn, last_id[:n])
    ids.copy_(drawn)


def end_decode(best: Tensor, num_rows: Tensor, last_id: Tensor, ids: Tensor) -> None:
    """As `end_decode_reference`; on CUDA by one kernel."""
    if not best.is_cuda:
        end_decode_reference(best, num_rows, last_id, ids)
        return
    from tp_runtime.ops.kernels import decode_step as kernels  # triton: CUDA only

    kernels.end_decode(best, num_rows, last_id, ids)
