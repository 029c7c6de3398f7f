"""Whether a recorded step with prompts computes what the same step does eagerly, on this machine.

Asked once at start, before any request: a graph that an attention package records wrongly would
otherwise show as odd text. Both ways of the same step run on this rank's model, so what may differ
is rounding: products of other sizes, keys read from other places.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from tp_runtime.messages import Chunk
from tp_runtime.ops.attention.metadata import (
    AttentionMetadata,
    DecodeMetadata,
    LayerKV,
    PrefillMetadata,
)
from tp_runtime.ops.group import TPGroup
from tp_runtime.workers.batch_state import BatchState
from tp_runtime.workers.models.decoder import CausalLM
from tp_runtime.workers.prefill_graphs import PrefillGraphs, Room

_CLOSE = {torch.float32: 1e-3}
_CLOSE_ENOUGH = 0.25
"""Distance of a token's hidden state from the eager one, as part of its length: wide, as rounding
in 16 bits adds up over a deep model, and still less than what attention to wrong tokens makes."""
_SHORT_CHUNK = 5


def record_prefills(
    model: CausalLM,
    kv: list[LayerKV],
    state: BatchState,
    group: TPGroup,
    rooms: Sequence[Room],
) -> tuple[PrefillGraphs | None, str]:
    """Collective. Graphs of which the smallest and the largest were checked; or None, on every
    rank, with what is wrong on this one.

    The ranks vote after each graph, so that one which cannot record stops all. Where it fails in
    the middle of a step the others wait for its part of a sum, as they would in service."""
    graphs = PrefillGraphs(model, kv, state, rooms)
    asked = (graphs.rooms[0], graphs.rooms[-1])
    steps: list[Callable[[], bool]] = [
        partial(_recorded, graphs, room) for room in reversed(graphs.rooms)
    ]
    steps += [partial(replay_agrees, graphs, room, model, kv, state) for room in asked]
    for step in steps:
        wrong = _fault_of(step)
        ballot = torch.full((1,), int(not wrong), device=state.device)
        if int(group.comm.all_reduce(ballot)) != group.size:
            graphs.release()
            return None, wrong or "another rank found a fault"
    return graphs, ""


def _recorded(graphs: PrefillGraphs, room: Room) -> bool:
    graphs.record_room(room)
    return True


def _fault_of(step: Callable[[], bool]) -> str:
    try:
        return "" if step() else "a recorded step differs from the same step run eagerly"
    except Exception as error:  # of torch, of a package, of the driver: the eager way is there
        return f"{type(error).__name__}: {error}"


@torch.inference_mode()
def replay_agrees(
    graphs: PrefillGraphs, room: Room, model: CausalLM, kv: list[LayerKV], state: BatchState
) -> bool:
    """Collective. A step of one decode row, if there is room for any, and two chunks, which leaves
    padding behind each of them. Uses the first blocks of the cache and of the tables' rows, and
    leaves the tables as they were."""
    rows = 1 if room.decode else 0
    blocks = kv[0].k.shape[0]
    most = min(blocks // 3, state.max_blocks) * state.block_size
    chunks = [_SHORT_CHUNK, min(room.prompt - _SHORT_CHUNK - 1, most)]
    if state.max_rows < rows + 2 or most <= _SHORT_CHUNK or chunks[1] < 1:
        return True  # too small to ask, and for more than a request or two
    before = state.block_tables.clone()
    table = torch.arange(blocks // 3 * 3, dtype=torch.int32, device=state.device).view(3, -1)
    width = min(table.shape[1], state.max_blocks)
    state.block_tables[: rows + 2, :width] = table[3 - rows - 2 :, :width]
    try:
        return _compare(graphs, room, model, kv, state, rows, chunks)
    finally:
        state.block_tables.copy_(before)


def _compare(
    graphs: PrefillGraphs,
    room: Room,
    model: CausalLM,
    kv: list[LayerKV],
    state: BatchState,
    rows: int,
    sizes: list[int],
) -> bool:
    device = state.device
    decode_rows = torch.arange(rows, device=device)
    chunk_rows = [decode_rows.new_full((n,), rows + i) for i, n in enumerate(sizes)]
    row = torch.cat([decode_rows, *chunk_rows])
    # The decode row's earlier token is whatever the cache holds: zeros at a start.
    position = torch.cat([decode_rows + 1, *(torch.arange(n, device=device) for n in sizes)])
    ids = (7 * position + 11 * row + 1) % state.vocab_size
    slots = state.slots(row, position)
    starts = torch.tensor([0, sizes[0], sum(sizes)], dtype=torch.int32, device=device)
    decode = DecodeMetadata(
        context_lens=(position[:rows] + 1).to(torch.int32),
        block_tables=state.block_tables[:rows],
    )
    eager = AttentionMetadata(
        slot_mapping=slots,
        decode=decode if rows else None,
        prefill=PrefillMetadata(
            cu_seqlens_q=starts,
            context_lens=starts.diff(),
            block_tables=None,
            max_seqlen_q=max(sizes),
            max_seqlen_k=max(sizes),
        ),
    )
    want = model(ids, position, kv, eager).float()
    plan = [
        Chunk(rows + i, 0, np.zeros(n, dtype=np.int32).tobytes(), sample=True)
        for i, n in enumerate(sizes)
    ]
    got = graphs.run(room, ids, position, slots, decode_rows, plan).float()
    return _is_close(got, want, _CLOSE.get(model.place.dtype, _CLOSE_ENOUGH))


def _is_close(got: Tensor, want: Tensor, tolerance: float) -> bool:
    distance = (got - want).norm(dim=1)
    return bool((distance <= tolerance * want.norm(dim=1)).all())  # NaN is not
