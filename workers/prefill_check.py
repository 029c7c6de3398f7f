"""Whether a recorded step with prompts computes what the same step does eagerly, on this machine.

Asked once at start, before any request: a graph that an attention package records wrongly would
otherwise show as odd text. Both ways of the same step run on this rank's model, so what may differ
is rounding: products of other sizes, keys read from other places.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

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
from tp_runtime.workers.graph_votes import attempt, with_memory
from tp_runtime.workers.models.decoder import CausalLM
from tp_runtime.workers.prefill_graphs import PrefillGraphs, Room

_CLOSE = {torch.float32: 1e-3}
_CLOSE_ENOUGH = 0.25
"""Distance of the hidden states of a sequence from the eager ones, as part of their length: wide,
as rounding in 16 bits adds up over a deep model, and still less than what attention to wrong tokens
makes."""
_SHORT_CHUNK = 5


def record_prefills(
    model: CausalLM,
    kv: list[LayerKV],
    state: BatchState,
    group: TPGroup,
    rooms: Sequence[Room],
    max_model_len: int,
) -> tuple[PrefillGraphs | None, str]:
    """Collective. Graphs of which the largest and the smallest are recorded and checked, the others
    not recorded yet; or None, on every rank, with what is wrong on this one."""
    graphs = PrefillGraphs(model, kv, state, rooms)

    def check(room: Room) -> str:
        agrees = replay_agrees(graphs, room, model, kv, state, max_model_len)
        return "" if agrees else "a recorded step differs from the same step run eagerly"

    for room in dict.fromkeys((graphs.rooms[-1], graphs.rooms[0])):
        wrong = with_memory(partial(graphs.record, room), group, state.device)
        wrong = wrong or attempt(partial(check, room), group, state.device)
        if wrong:
            graphs.release()
            return None, wrong
    return graphs, ""


@dataclass(frozen=True)
class _Step:
    """`positions` of each decode row, rows 0 and up; chunks (start, tokens) of the rows behind."""

    positions: list[int]
    chunks: list[tuple[int, int]]


@torch.inference_mode()
def replay_agrees(
    graphs: PrefillGraphs,
    room: Room,
    model: CausalLM,
    kv: list[LayerKV],
    state: BatchState,
    max_model_len: int,
) -> bool:
    """Collective. Two steps, of one decode row if there is room for any, and of two chunks, which
    leave padding behind each of them; in the second the chunks go on where they ended in the first.
    Uses the first blocks of the cache and of the tables' rows: the tables are left as they were, of
    the cache what was used is zeros then."""
    rows = 1 if room.decode else 0
    blocks = kv[0].k.shape[0]
    most = min(blocks // 3 * state.block_size, max_model_len) - _SHORT_CHUNK
    long = min(room.prompt - _SHORT_CHUNK - 1, most)
    if state.max_rows < rows + 2 or most <= _SHORT_CHUNK or long < 1:
        return True  # too small to ask, and for more than a request or two
    first = _Step([1] * rows, [(0, _SHORT_CHUNK), (0, long)])
    second = _Step([2] * rows, [(_SHORT_CHUNK, _SHORT_CHUNK), (long, _SHORT_CHUNK - 1)])
    before = state.block_tables.clone()
    table = torch.arange(blocks // 3 * 3, dtype=torch.int32, device=state.device).view(3, -1)
    width = min(table.shape[1], state.max_blocks)
    state.block_tables[: rows + 2, :width] = table[3 - rows - 2 :, :width]
    try:
        agree = [_agrees(graphs, room, model, kv, state, step) for step in (first, second)]
        return all(agree)  # every rank takes part in both
    finally:
        for layer in kv:
            layer.k[: blocks // 3 * 3] = 0
            layer.v[: blocks // 3 * 3] = 0
        state.block_tables.copy_(before)


def _agrees(
    graphs: PrefillGraphs,
    room: Room,
    model: CausalLM,
    kv: list[LayerKV],
    state: BatchState,
    step: _Step,
) -> bool:
    device, rows = state.device, len(step.positions)
    numbers = [1] * rows + [size for _, size in step.chunks]
    firsts = step.positions + [start for start, _ in step.chunks]
    row = torch.arange(len(numbers), device=device).repeat_interleave(
        torch.tensor(numbers, device=device)
    )
    position = torch.cat(
        [torch.arange(a, a + n, device=device) for a, n in zip(firsts, numbers, strict=True)]
    )
    # The decode row's first token is whatever the cache holds: zeros at a start.
    ids = (7 * position + 11 * row + 1) % state.vocab_size
    slots = state.slots(row, position)
    want = model(ids, position, kv, _eager(state, step, slots)).float()
    _forget(kv, slots)
    plan = [
        Chunk(rows + i, start, np.zeros(n, dtype=np.int32).tobytes(), sample=True)
        for i, (start, n) in enumerate(step.chunks)
    ]
    got = graphs.run(room, ids, position, slots, torch.arange(rows, device=device), plan).float()
    tolerance = _CLOSE.get(model.place.dtype, _CLOSE_ENOUGH)
    return all(_is_close(got[part], want[part], tolerance) for part in _parts(numbers))


def _eager(state: BatchState, step: _Step, slots: Tensor) -> AttentionMetadata:
    device, rows = state.device, len(step.positions)
    sizes = torch.tensor([n for _, n in step.chunks], device=device)
    ends = [start + n for start, n in step.chunks]
    decode = DecodeMetadata(
        context_lens=torch.tensor(step.positions, dtype=torch.int32, device=device) + 1,
        block_tables=state.block_tables[:rows],
    )
    starts = torch.zeros(len(sizes) + 1, dtype=torch.int32, device=device)
    starts[1:] = sizes.cumsum(0)
    cached = any(start for start, _ in step.chunks)
    return AttentionMetadata(
        slot_mapping=slots,
        decode=decode if rows else None,
        prefill=PrefillMetadata(
            cu_seqlens_q=starts,
            context_lens=torch.tensor(ends, dtype=torch.int32, device=device),
            block_tables=state.block_tables[rows : rows + len(ends)] if cached else None,
            max_seqlen_q=max(n for _, n in step.chunks),
            max_seqlen_k=max(ends),
        ),
    )


def _forget(kv: list[LayerKV], slots: Tensor) -> None:
    """So that a replay which stores nothing does not find what the eager step has stored."""
    for layer in kv:
        for cache in layer.k, layer.v:
            cache.view(-1, *cache.shape[2:])[slots] = float("nan")


def _parts(numbers: Sequence[int]) -> Iterator[slice]:
    ends = np.cumsum([0, *numbers]).tolist()
    return (slice(a, b) for a, b in pairwise(ends))


def _is_close(got: Tensor, want: Tensor, tolerance: float) -> bool:
    return bool((got - want).norm() <= tolerance * want.norm())  # NaN is not
