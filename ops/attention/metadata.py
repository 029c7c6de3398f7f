"""What one step tells the attention layers: lengths, block tables, slots. Device form.

Cache layout: k and v are [blocks, block_size, kv_heads, head_dim]; slot s is row s % block_size of
block s // block_size. All tensors lie on the device of q; integers on the host are upper bounds
that never need a device read.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor


@dataclass
class PrefillMetadata:
    """`S` sequences whose new tokens lie one after the other.

    cu_seqlens_q: [S + 1] int32, where each sequence's new tokens begin, counted from the first
        prefill token.
    context_lens: [S] int32, tokens each sequence has after this chunk; its new tokens are the last.
    block_tables: [S, max_blocks] int32 when keys of earlier tokens are read from the cache; None
        when every sequence begins with this chunk, so that the given k and v are all there is.
        Entries past a sequence's blocks may hold anything.
    max_seqlen_q, max_seqlen_k: the largest number of new tokens, and of context tokens.
    recorded: for a CUDA graph that is replayed with other lengths; these two are bounds then, and
        tokens and sequences of padding may follow."""

    cu_seqlens_q: Tensor
    context_lens: Tensor
    block_tables: Tensor | None
    max_seqlen_q: int
    max_seqlen_k: int
    recorded: bool = False


@dataclass
class DecodeMetadata:
    """`B` sequences with one new token each.

    context_lens: [B] int32, tokens including the new one; 0 marks a padding row, whose output is
        zero and which reads no cache.
    block_tables: [B, max_blocks] int32; entries past a sequence's blocks may hold anything.
    plans: by sliding window, what a back-end's `prepare_decode` worked out."""

    context_lens: Tensor
    block_tables: Tensor
    plans: dict[int | None, Tensor] = field(default_factory=dict)


@dataclass
class AttentionMetadata:
    """The first B of T tokens are decode rows, the rest are prefill.

    slot_mapping: [T] int64, where each token's key and value go; -1 stores nothing."""

    slot_mapping: Tensor
    decode: DecodeMetadata | None = None
    prefill: PrefillMetadata | None = None

    @property
    def num_decode_rows(self) -> int:
        return 0 if self.decode is None else self.decode.context_lens.shape[0]


@dataclass
class LayerKV:
    """The cache of one layer on this rank: k and v, [blocks, block_size, kv_heads, head_dim]."""

    k: Tensor
    v: Tensor
