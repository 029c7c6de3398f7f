"""Runs a model folder on one rank, as workers do: loaded shard, paged cache, prefill and decode.

`run_model` is what the gloo pools call. Caches start full of NaN and block tables are shuffled, so
that reading a slot that was never written, or the wrong block, cannot go unseen. Nothing here needs
transformers; `tests.workers.parity` compares with it.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from tests.workers.mutations import MUTATIONS
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
"""Prefill chunks of the paged run, neither a multiple of the block size; then decode steps."""


@dataclass(frozen=True)
class RankResult:
    """Logits are the gathered ones, on rank 0 only; ids are found on every rank."""

    prefill: Tensor | None
    """[forced, vocab]: the whole sequence in one prefill."""
    paged: Tensor | None
    """[forced, vocab]: chunks over the cache, then one token at a time."""
    greedy: list[int]
    checksum: float
    """Of the hidden states: equal bits on every rank."""


@dataclass
class PagedSequence:
    """One sequence in a cache of its own."""

    model: CausalLM
    max_len: int
    length: int = 0
    kv: list[LayerKV] = field(default_factory=list)
    table: Tensor = field(default_factory=lambda: torch.empty(0))

    def __post_init__(self) -> None:
        blocks = -(-self.max_len // BLOCK_SIZE) + 2
        order = list(range(blocks))
        random.Random(0).shuffle(order)
        self.table = torch.tensor(order, dtype=torch.int32)
        for layer in self.model.model.layers:
            heads, dim = layer.self_attn.attn.num_kv_heads, layer.self_attn.attn.head_dim
            shape = (blocks, BLOCK_SIZE, heads, dim)
            dtype = self.model.place.dtype
            caches = [torch.full(shape, torch.nan, dtype=dtype) for _ in range(2)]
            self.kv.append(LayerKV(*caches))

    def prefill(self, ids: list[int]) -> Tensor:
        """The next tokens as one chunk -> hidden [tokens, hidden]."""
        start, self.length = self.length, self.length + len(ids)
        chunk = PrefillMetadata(
            cu_seqlens_q=torch.tensor([0, len(ids)], dtype=torch.int32),
            context_lens=torch.tensor([self.length], dtype=torch.int32),
            block_tables=self.table[None] if start else None,
            max_seqlen_q=len(ids),
            max_seqlen_k=self.length,
        )
        positions = torch.arange(start, self.length)
        return self._run(ids, positions, self._slots(positions), prefill=chunk)

    def decode(self, token: int) -> Tensor:
        """One token beside a padding row -> hidden [1, hidden]."""
        position = torch.tensor([self.length, 0])
        self.length += 1
        rows = DecodeMetadata(
            context_lens=torch.tensor([self.length, 0], dtype=torch.int32),
            block_tables=torch.stack([self.table, torch.full_like(self.table, -1)]),
            max_context_len=self.length,
        )
        slots = self._slots(position)
        slots[1] = -1
        return self._run([token, 0], position, slots, decode=rows)[:1]

    def _slots(self, positions: Tensor) -> Tensor:
        return self.table.long()[positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE

    def _run(
        self,
        ids: list[int],
        positions: Tensor,
        slots: Tensor,
        prefill: PrefillMetadata | None = None,
        decode: DecodeMetadata | None = None,
    ) -> Tensor:
        meta = AttentionMetadata(slots, decode, prefill)
        hidden: Tensor = self.model(torch.tensor(ids), positions, self.kv, meta)
        return hidden


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
    """Forced logits on both paths, then `new_tokens` greedy ones after the first `prompt_len`."""
    max_len = max_model_len or max(len(forced), prompt_len + new_tokens)
    model = load_model(group, folder, max_len)
    if mutation is not None:
        MUTATIONS[mutation](model)
    hidden = PagedSequence(model, max_len).prefill(forced)
    return RankResult(
        prefill=_gathered(model, hidden),
        paged=_gathered(model, _paged(model, forced, max_len)),
        greedy=_greedy(model, forced[:prompt_len], new_tokens, max_len),
        checksum=hidden.double().sum().item(),
    )


def _paged(model: CausalLM, forced: list[int], max_len: int) -> Tensor:
    sequence, at, parts = PagedSequence(model, max_len), 0, []
    for size in CHUNKS:
        parts.append(sequence.prefill(forced[at : at + size]))
        at += size
    parts += [sequence.decode(token) for token in forced[at:]]
    return torch.cat(parts)


def _greedy(model: CausalLM, prompt: list[int], count: int, max_len: int) -> list[int]:
    """Prefill of the prompt, then decode through the cache."""
    if count == 0:
        return []
    sequence = PagedSequence(model, max_len)
    tokens = [_best(model, sequence.prefill(prompt)[-1:])]
    while len(tokens) < count:
        tokens.append(_best(model, sequence.decode(tokens[-1])))
    return tokens


def _best(model: CausalLM, hidden: Tensor) -> int:
    """The most likely id of one row, by exchange of (value, id) pairs: every local column takes
    part, padding included, as in sampling without a gather of the logits."""
    head = model.lm_head
    value, column = model.compute_logits(hidden).max(dim=-1)
    values = torch.cat(head.group.comm.all_gather(value))
    ids = torch.cat(head.group.comm.all_gather(column + head.shard.start))
    return int(ids[values.argmax()])


def _gathered(model: CausalLM, hidden: Tensor) -> Tensor | None:
    return model.lm_head.gather(model.compute_logits(hidden))
