"""Which range of a dimension each rank holds. Pure functions, no torch, no communication.

Shards are ranges and not `size / ranks`, so that any number of ranks works. Every function is a
partition: the ranges of all ranks cover the dimension exactly once, in rank order (KV heads alone
are repeated when there are more ranks than KV heads). Where shares differ, larger shares come
first.
"""

from __future__ import annotations

from typing import NamedTuple


class Shard(NamedTuple):
    """The half-open range [start, stop) of a dimension."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start

    def scaled(self, factor: int) -> Shard:
        """The same range counted in units `factor` times smaller (heads -> elements)."""
        return Shard(self.start * factor, self.stop * factor)


class HeadShard(NamedTuple):
    """Query heads and KV heads of one rank. Each KV head serves q.size / kv.size query heads."""

    q: Shard
    kv: Shard


class VocabShard(NamedTuple):
    """Vocabulary rows of one rank: `stop - start` real ones (perhaps none), then padding up to
    `padded` rows, a width that is equal on all ranks. Column c of rank r is id r * padded + c."""

    start: int
    stop: int
    padded: int

    @property
    def size(self) -> int:
        return self.stop - self.start


def even_shard(total: int, rank: int, size: int) -> Shard:
    """`total` items over `size` ranks in contiguous ranges that differ by at most one item."""
    _check_rank(rank, size)
    share, larger = divmod(total, size)
    start = rank * share + min(rank, larger)
    return Shard(start, start + share + (1 if rank < larger else 0))


def kv_head_shard(num_heads: int, num_kv_heads: int, rank: int, size: int) -> HeadShard:
    """Query and KV heads of `rank`.

    KV heads >= ranks: whole groups. KV heads < ranks: one KV head per rank; the ranks are dealt to
    the KV heads contiguously, and a group's query heads are split over its ranks.

    Raises ValueError when there are more ranks than query heads, or heads that form no groups."""
    _check_rank(rank, size)
    if num_heads < 1 or num_kv_heads < 1 or num_heads % num_kv_heads:
        raise ValueError(
            f"{num_heads} query heads cannot be grouped over {num_kv_heads} KV heads; "
            "the first number must be a multiple of the second."
        )
    if size > num_heads:
        raise ValueError(
            f"Tensor parallel size {size} is larger than the model's {num_heads} query heads; "
            f"use at most {num_heads} ranks."
        )
    group = num_heads // num_kv_heads
    if num_kv_heads >= size:
        kv = even_shard(num_kv_heads, rank, size)
        return HeadShard(kv.scaled(group), kv)
    for head in range(num_kv_heads):
        ranks = even_shard(size, head, num_kv_heads)
        if rank < ranks.stop:
            break
    inside = even_shard(group, rank - ranks.start, ranks.size)
    first = head * group
    return HeadShard(Shard(first + inside.start, first + inside.stop), Shard(head, head + 1))


def tile_shard(total: int, rank: int, size: int, tile: int = 128) -> Shard:
    """`total` elements split in whole tiles; the last tile may be short.

    128 elements are one tile of a matrix kernel. The tile is halved until every rank gets one, so
    a small dimension still uses every rank; with total < size the last ranks hold nothing."""
    _check_rank(rank, size)
    while tile > 1 and total // tile < size:
        tile //= 2
    tiles = even_shard(-(-total // tile), rank, size)
    return Shard(min(tiles.start * tile, total), min(tiles.stop * tile, total))


def vocab_shard(vocab: int, rank: int, size: int) -> VocabShard:
    """Vocabulary rows of `rank`, padded to one width on all ranks.

    The width is a multiple of 64 (row alignment of the logits and of matrix kernels) unless that
    would leave a rank without a single row; then of the largest smaller power of two that does."""
    _check_rank(rank, size)
    for align in (64, 32, 16, 8, 4, 2, 1):
        width = _round_up(-(-vocab // size), align)
        if (size - 1) * width < vocab:
            break
    return VocabShard(min(rank * width, vocab), min((rank + 1) * width, vocab), width)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _check_rank(rank: int, size: int) -> None:
    if not 0 <= rank < size:
        raise ValueError(f"Rank {rank} is not a rank of {size}; give 0 to {size - 1}.")
