"""What a decode step does around the model, as one kernel before it and one after.

Before: from the batch state, the ids to feed, their positions, cache slots and context lengths; the
positions in the state move on by one. After: the best of the pieces becomes the id of each row.
Rows from `num_rows` on are padding: slot -1, context 0, nothing of the state changes.
References: `tp_runtime.ops.decode_step`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from tp_runtime.ops.kernels.host_math import ceil_div, power_of_2
from tp_runtime.ops.kernels.overlap import after_previous, overlaps

_ROWS = 64


@triton.jit
def _begin_kernel(
    num_rows_ptr,
    last_id_ptr,
    position_ptr,
    tables_ptr,
    ids_ptr,
    positions_ptr,
    drawn_ptr,
    slots_ptr,
    context_ptr,
    rows,
    table_stride,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    after_previous(OVERLAP)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    active = inside & (row < tl.load(num_rows_ptr))
    position = tl.load(position_ptr + row, mask=active, other=0)
    last = tl.load(last_id_ptr + row, mask=active, other=0)
    entry = tables_ptr + row.to(tl.int64) * table_stride + position // BLOCK_SIZE
    block = tl.load(entry, mask=active, other=0).to(tl.int64)
    slot = block * BLOCK_SIZE + position % BLOCK_SIZE
    tl.store(ids_ptr + row, tl.maximum(last, 0), mask=inside)
    tl.store(positions_ptr + row, position, mask=inside)
    tl.store(drawn_ptr + row, position + 1, mask=inside)
    tl.store(slots_ptr + row, tl.where(active, slot, -1), mask=inside)
    tl.store(context_ptr + row, tl.where(active, position + 1, 0).to(tl.int32), mask=inside)
    tl.store(position_ptr + row, position + 1, mask=active)


@triton.jit
def _end_kernel(
    best_ptr,
    num_rows_ptr,
    last_id_ptr,
    ids_ptr,
    row_stride,
    piece_stride,
    pieces,
    PIECES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    after_previous(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    piece = tl.arange(0, PIECES)
    lowest = -0x7FFFFFFFFFFFFFFF
    key = tl.load(
        best_ptr + row * row_stride + piece * piece_stride, mask=piece < pieces, other=lowest
    )
    best = tl.max(key, axis=0)
    usable = (best != 0x7FFFFFFFFFFFFFFF) & ((best >> 32) > -0x7F800000)
    token = tl.where(usable, 0xFFFFFFFF - (best & 0xFFFFFFFF), -1)
    tl.store(ids_ptr + row, token.to(tl.int32))
    if row < tl.load(num_rows_ptr):
        tl.store(last_id_ptr + row, token)


def begin_decode(
    num_rows: Tensor,
    last_id: Tensor,
    position: Tensor,
    block_tables: Tensor,
    block_size: int,
    ids: Tensor,
    positions: Tensor,
    drawn: Tensor,
    slots: Tensor,
    context: Tensor,
) -> None:
    """See `tp_runtime.ops.decode_step.begin_decode_reference`."""
    rows = ids.shape[0]
    overlap = overlaps(ids)
    _begin_kernel[(ceil_div(rows, _ROWS),)](
        num_rows,
        last_id,
        position,
        block_tables,
        ids,
        positions,
        drawn,
        slots,
        context,
        rows,
        block_tables.stride(0),
        BLOCK_SIZE=block_size,
        ROWS=_ROWS,
        OVERLAP=overlap,
        launch_pdl=overlap,
        num_warps=2,
    )


def end_decode(best: Tensor, num_rows: Tensor, last_id: Tensor, ids: Tensor) -> None:
    """See `tp_runtime.ops.decode_step.end_decode_reference`."""
    rows, pieces = best.shape
    overlap = overlaps(best)
    _end_kernel[(rows,)](
        best,
        num_rows,
        last_id,
        ids,
        best.stride(0),
        best.stride(1),
        pieces,
        PIECES=power_of_2(pieces),
        OVERLAP=overlap,
        launch_pdl=overlap,
        num_warps=1,
    )
