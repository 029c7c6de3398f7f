"""Steps with a few prompt tokens as one replay: a model graph by decode rows and prompt tokens.

The host takes tens of milliseconds to launch the hundreds of kernels of a step, a GPU takes fewer
to run them for a short prompt, beside which the others' tokens would wait. So such steps are
recorded too. Logits and draws are not: they depend on what the requests ask for.

A graph has room for `decode` rows and, behind them, for `prompt` tokens of up to as many chunks.
The decode rows of a step fill their room from its end, so that all tokens of the step lie one
after the other. What is left over is padding: its slot is -1, its context is empty, no chunk has
it. Chunks read everything from the cache, which has their own tokens by then.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

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
from tp_runtime.workers.batch_state import BatchState
from tp_runtime.workers.host_copy import to_device
from tp_runtime.workers.later_graphs import LaterGraph
from tp_runtime.workers.models.decoder import CausalLM
from tp_runtime.workers.recorded import Recorded

ROOM_ROWS = (0, 32, 64, 128, 256)
ROOM_TOKENS = (64, 128, 256, 384, 512, 768, 1024)
MOST_CHUNKS = 32
"""Of a graph. Some attention kernels start programs for every one that there could be."""
FEW_TOKENS, MOST_PADDING = 384, 4
"""A step takes a graph of a few tokens, or of so many times its own; a larger one may take the GPU
longer than launching the step takes the host."""
LONGEST_PREFIX = 16_384
"""Tokens of the cache before a chunk, at most: recorded attention does not divide them among more
programs, as an eager step does."""


class Room(NamedTuple):
    """Of a graph: decode rows and prompt tokens."""

    decode: int
    prompt: int

    @property
    def tokens(self) -> int:
        return self.decode + self.prompt


def rooms_for(max_rows: int, max_tokens: int) -> tuple[Room, ...]:
    """Worth a graph where batches have up to `max_rows` rows and steps `max_tokens` tokens."""
    below = [rows for rows in ROOM_ROWS if rows < max_rows]
    decode = [*below, max_rows] if max_rows <= ROOM_ROWS[-1] else ROOM_ROWS
    prompt = [tokens for tokens in ROOM_TOKENS if tokens <= max_tokens]
    return tuple(Room(rows, tokens) for rows in decode for tokens in prompt)


@dataclass
class _Buffers:
    """What replays read and write; one set for all graphs. ids, positions, slots [tokens] int64,
    hidden [tokens, hidden]; for decode rows and for chunks: context lengths int32 and tables
    [rows, blocks] int32; starts [chunks + 1] int32."""

    ids: Tensor
    positions: Tensor
    slots: Tensor
    hidden: Tensor
    decode_contexts: Tensor
    decode_tables: Tensor
    starts: Tensor
    chunk_contexts: Tensor
    chunk_tables: Tensor


class PrefillGraphs:
    """`record` rooms, the largest first; `fitting` and `run` per step; `release` before the end."""

    def __init__(
        self, model: CausalLM, kv: list[LayerKV], state: BatchState, rooms: Sequence[Room]
    ) -> None:
        self.rooms = sorted(rooms, key=lambda room: (room.tokens, room.decode))
        self._model, self._kv, self._state = model, kv, state
        self._recorded: dict[Room, Recorded] = {}
        self._missed: Counter[Room] = Counter()
        on_gpu = state.device.type == "cuda"
        self._pool = torch.cuda.graph_pool_handle() if on_gpu else None
        rows = max(room.decode for room in rooms)
        chunks = max(self._chunks(room) for room in rooms)
        tokens = max(room.tokens for room in rooms)
        device, blocks = state.device, state.max_blocks

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self._buffers = _Buffers(
            ids=zeros(tokens, dtype=torch.int64),
            positions=zeros(tokens, dtype=torch.int64),
            slots=zeros(tokens, dtype=torch.int64),
            hidden=torch.zeros(
                (tokens, model.config.hidden_size), dtype=model.place.dtype, device=device
            ),
            decode_contexts=zeros(rows),
            decode_tables=zeros(rows, blocks),
            starts=zeros(chunks + 1),
            chunk_contexts=zeros(chunks),
            chunk_tables=zeros(chunks, blocks),
        )

    @torch.inference_mode()
    def record(self, room: Room) -> None:
        """Collective; requests may be running. Whatever runs while it records is padding."""
        buffers = self._buffers
        buffers.slots.fill_(-1)
        for lengths in (buffers.starts, buffers.chunk_contexts, buffers.decode_contexts):
            lengths.zero_()
        step = partial(self._step, room)
        self._recorded[room] = Recorded(step, self._state.device, self._pool)

    def later(self) -> list[LaterGraph]:
        """Of the rooms that are not recorded yet, those with few decode rows first: a server that
        has just started has few."""
        left = sorted(room for room in self.rooms if room not in self._recorded)
        return [
            LaterGraph(
                partial(self.record, room),
                partial(self._recorded.pop, room, None),
                partial(self._missed.__getitem__, room),
            )
            for room in left
        ]

    def fitting(self, decode_rows: int, chunks: Sequence[Chunk]) -> Room | None:
        """The smallest recorded one that such a step fits into; for a step."""
        tokens = sum(len(chunk.token_ids) // 4 for chunk in chunks)
        if max(chunk.start for chunk in chunks) > LONGEST_PREFIX:
            return None
        fitting = [
            room
            for room in self.rooms
            if decode_rows <= room.decode
            and tokens <= room.prompt
            and len(chunks) <= self._chunks(room)
        ]
        if fitting and fitting[0] not in self._recorded:
            self._missed[fitting[0]] += 1
        most = max(MOST_PADDING * (decode_rows + tokens), FEW_TOKENS)
        near = (room for room in fitting if room in self._recorded and room.tokens <= most)
        return next(near, None)

    def run(
        self,
        room: Room,
        ids: Tensor,
        positions: Tensor,
        slots: Tensor,
        decode_rows: Tensor,
        chunks: Sequence[Chunk],
    ) -> Tensor:
        """ids, positions, slots [tokens] int64 of a step, decode rows first; decode_rows [n] int64
        -> hidden states [tokens, hidden], overwritten by the next step."""
        rows, buffers = decode_rows.shape[0], self._buffers
        first = room.decode - rows
        span = slice(first, first + ids.shape[0])
        buffers.ids[span] = ids
        buffers.positions[span] = positions
        buffers.slots[: room.tokens] = -1
        buffers.slots[span] = slots
        buffers.decode_contexts[:first] = 0
        buffers.decode_contexts[first : room.decode] = positions[:rows] + 1
        buffers.decode_tables[first : room.decode] = self._state.block_tables[decode_rows]
        self._place_chunks(room, chunks)
        self._recorded[room].replay()
        return buffers.hidden[span]

    def _place_chunks(self, room: Room, chunks: Sequence[Chunk]) -> None:
        """In one copy from the host; those that are not there begin and end at the last token."""
        number, most = len(chunks), self._chunks(room)
        sizes = np.array([len(chunk.token_ids) // 4 for chunk in chunks])
        packed = np.zeros(2 * most + 1 + number, dtype=np.int32)
        packed[1 : number + 1] = np.cumsum(sizes)
        packed[number + 1 : most + 1] = sizes.sum()
        contexts = packed[most + 1 : 2 * most + 1]
        contexts[:number] = [chunk.start for chunk in chunks] + sizes
        packed[2 * most + 1 :] = [chunk.row for chunk in chunks]
        starts, contexts_, rows = to_device(packed, self._state.device).split(
            [most + 1, most, number]
        )
        buffers = self._buffers
        buffers.starts[: most + 1] = starts
        buffers.chunk_contexts[:most] = contexts_
        buffers.chunk_tables[:number] = self._state.block_tables[rows.to(torch.int64)]

    def _chunks(self, room: Room) -> int:
        """The most that a graph has room for."""
        return min(room.prompt // 8, MOST_CHUNKS, self._state.max_rows)

    def release(self) -> None:
        for recorded in self._recorded.values():
            recorded.release()
        self._recorded.clear()

    # ------------------------------------------------------------ what is recorded

    def _step(self, room: Room) -> None:
        state, buffers, chunks = self._state, self._buffers, self._chunks(room)
        longest = state.max_blocks * state.block_size
        decode = DecodeMetadata(
            context_lens=buffers.decode_contexts[: room.decode],
            block_tables=buffers.decode_tables[: room.decode],
        )
        meta = AttentionMetadata(
            slot_mapping=buffers.slots[: room.tokens],
            decode=decode if room.decode else None,
            prefill=PrefillMetadata(
                cu_seqlens_q=buffers.starts[: chunks + 1],
                context_lens=buffers.chunk_contexts[:chunks],
                block_tables=buffers.chunk_tables[:chunks],
                max_seqlen_q=room.prompt,
                max_seqlen_k=longest,
                recorded=True,
            ),
        )
        ids, positions = buffers.ids[: room.tokens], buffers.positions[: room.tokens]
        buffers.hidden[: room.tokens] = self._model(ids, positions, self._kv, meta)
