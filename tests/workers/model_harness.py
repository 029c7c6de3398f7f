"""Runs a model folder on one rank, as workers do: loaded shard, paged cache, prefill and decode.

`run_model` is what the gloo pools call. Caches start full of NaN and block tables are shuffled, so
that reading a slot that was never written, or the wrong block, cannot go unseen. Nothing here needs
transformers; `tests.workers.parity` compares with it.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tests.workers.mutations import MUTATIONS, attentions
from tp_runtime.model_config import ModelConfig
from tp_runtime.ops.attention.metadata import (
    AttentionMetadata,
    DecodeMetadata,
    LayerKV,
    PrefillMetadata,
)
from tp_runtime.ops.attention.reference import ReferenceBackend
from tp_runtime.ops.group import TPGroup
from tp_runtime.workers.loader import load_weights
from tp_runtime.workers.models.decoder import CausalLM
from tp_runtime.workers.models.registry import build_model

BLOCK_SIZE = 4
CHUNKS = (23, 17)
"""Prefill chunks of the forced sequence, neither a multiple of the block size; then decode steps
while the other sequence generates."""


@dataclass(frozen=True)
class RankResult:
    """Logits are the gathered ones, on rank 0 only; ids are found on every rank."""

    prefill: Tensor | None
    """[forced, vocab]: the whole sequence in one prefill."""
    paged: Tensor | None
    """[forced, vocab]: chunks over the cache, then one token at a time, in mixed batches."""
    greedy: list[int]
    checksum: float
    """Of the hidden states: equal bits on every rank."""


@dataclass
class Sequence:
    """Block table [blocks] int32 and tokens in the cache so far."""

    table: Tensor
    length: int = 0


class PagedModel:
    """A loaded model and a cache that starts full of NaN, its blocks dealt out in random order."""

    def __init__(self, model: CausalLM, num_blocks: int) -> None:
        self.model = model
        self._free = list(range(num_blocks))
        random.Random(0).shuffle(self._free)
        self._kv = []
        for attention in attentions(model):
            shape = (num_blocks, BLOCK_SIZE, attention.num_kv_heads, attention.head_dim)
            caches = [torch.full(shape, torch.nan, dtype=model.place.dtype) for _ in range(2)]
            self._kv.append(LayerKV(*caches))

    def sequence(self, max_len: int) -> Sequence:
        blocks = -(-max_len // BLOCK_SIZE)
        return Sequence(torch.tensor([self._free.pop() for _ in range(blocks)], dtype=torch.int32))

    def step(
        self,
        decode: list[tuple[Sequence, int]],
        chunk: tuple[Sequence, list[int]] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """One token of each decode row, then a chunk -> hidden of the rows, hidden of the chunk.

        A padding row goes last among the decode rows, as in a padded graph."""
        ids, positions, slots = [], [], []
        for sequence, token in decode:
            ids.append(token)
            positions.append(sequence.length)
            slots.append(self._slot(sequence, sequence.length))
            sequence.length += 1
        if decode:
            ids.append(0)
            positions.append(0)
            slots.append(-1)
        rows = len(ids)
        if chunk is not None:
            sequence, tokens = chunk
            ids += tokens
            new = range(sequence.length, sequence.length + len(tokens))
            positions += new
            slots += [self._slot(sequence, position) for position in new]
            sequence.length += len(tokens)
        meta = AttentionMetadata(
            torch.tensor(slots),
            _decode_metadata([sequence for sequence, _ in decode]),
            _prefill_metadata(*chunk) if chunk else None,
        )
        hidden = self.model(torch.tensor(ids), torch.tensor(positions), self._kv, meta)
        return hidden[: len(decode)], hidden[rows:]

    def _slot(self, sequence: Sequence, position: int) -> int:
        return int(sequence.table[position // BLOCK_SIZE]) * BLOCK_SIZE + position % BLOCK_SIZE


def _decode_metadata(rows: list[Sequence]) -> DecodeMetadata | None:
    if not rows:
        return None
    width = max(len(row.table) for row in rows)
    tables = torch.full((len(rows) + 1, width), -1, dtype=torch.int32)
    for at, row in enumerate(rows):
        tables[at, : len(row.table)] = row.table
    lengths = [row.length for row in rows] + [0]
    return DecodeMetadata(torch.tensor(lengths, dtype=torch.int32), tables, max(lengths))


def _prefill_metadata(sequence: Sequence, ids: list[int]) -> PrefillMetadata:
    return PrefillMetadata(
        cu_seqlens_q=torch.tensor([0, len(ids)], dtype=torch.int32),
        context_lens=torch.tensor([sequence.length], dtype=torch.int32),
        block_tables=sequence.table[None] if sequence.length > len(ids) else None,
        max_seqlen_q=len(ids),
        max_seqlen_k=sequence.length,
    )


def load_model(group: TPGroup, folder: str | Path, max_model_len: int) -> CausalLM:
    """This rank's share in float32 with the reference back-end."""
    config = ModelConfig.from_folder(folder)
    backend = ReferenceBackend()
    model = build_model(config, group, torch.float32, "cpu", backend, max_model_len)
    load_weights(model, folder)
    return model


@torch.inference_mode()
def run_model(
    group: TPGroup,
    folder: str,
    forced: list[int],
    prompt_len: int,
    new_tokens: int,
    max_model_len: int | None = None,
    mutation: str | None = None,
) -> RankResult:
    """Forced logits on both paths; `new_tokens` greedy ones after the first `prompt_len`."""
    max_len = max_model_len or max(len(forced), prompt_len + new_tokens)
    model = load_model(group, folder, max_len)
    if mutation is not None:
        MUTATIONS[mutation](model)
    blocks_each = -(-max_len // BLOCK_SIZE)
    paged = PagedModel(model, 3 * blocks_each)
    _, whole = paged.step([], (paged.sequence(max_len), forced))
    mixed, greedy = _mixed(paged, forced, forced[:prompt_len], new_tokens, max_len)
    return RankResult(
        prefill=_gathered(model, whole),
        paged=_gathered(model, mixed),
        greedy=greedy,
        checksum=(whole.double().sum() + mixed.double().sum()).item(),
    )


def _mixed(
    paged: PagedModel, forced: list[int], prompt: list[int], count: int, max_len: int
) -> tuple[Tensor, list[int]]:
    """The forced sequence in CHUNKS and decode steps, the prompt greedily, in the same batches.

    Returns hidden states [forced, hidden] and `count` generated ids."""
    first, second = paged.sequence(max_len), paged.sequence(max_len)
    tokens: list[int] = []
    if count:
        _, hidden = paged.step([], (second, prompt))
        tokens += best_ids(paged.model, hidden[-1:])
    work = [forced[: CHUNKS[0]], forced[CHUNKS[0] : sum(CHUNKS)]]
    work += [[token] for token in forced[sum(CHUNKS) :]]
    parts = []
    for at in range(max(len(work), count - 1)):
        decode = [(second, tokens[-1])] if len(tokens) < count else []
        chunk = (first, work[at]) if at < len(CHUNKS) else None
        if len(CHUNKS) <= at < len(work):
            decode.append((first, work[at][0]))
        rows, chunk_hidden = paged.step(decode, chunk)
        if at < len(work):
            parts.append(chunk_hidden if chunk else rows[-1:])
        if len(tokens) < count:
            tokens += best_ids(paged.model, rows[:1])
    return torch.cat(parts), tokens


def best_ids(model: CausalLM, hidden: Tensor) -> list[int]:
    """The most likely id of each row, by exchange of (value, id) pairs: every local column takes
    part, padding included, as in sampling without a gather of the logits."""
    head = model.lm_head
    value, column = model.compute_logits(hidden).max(dim=-1)
    pairs = head.group.comm.all_gather(torch.stack([value.double(), column + head.shard.start]))
    rows = torch.stack(pairs).permute(2, 0, 1).tolist()  # [rows][ranks] of (value, id)
    return [int(max(row, key=lambda pair: (pair[0], -pair[1]))[1]) for row in rows]


def _gathered(model: CausalLM, hidden: Tensor) -> Tensor | None:
    return model.lm_head.gather(model.compute_logits(hidden))
